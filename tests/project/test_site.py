"""Tests of the documentation site: it builds, has no broken links, and needs no network."""

from __future__ import annotations

import html
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support.benchmark_modules import ROOT

DOCS = ROOT / "docs"
NAMES = {"src", "href", "poster", "srcset", "data"}


class Links(HTMLParser):
    """Collects what a page loads, its links, and its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.places.add(value)
            if name in NAMES and value is not None:
                (self.linked if tag == "a" else self.loaded).append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def parsed(site: Path) -> Iterator[tuple[Path, Links]]:
    for page in sorted(site.rglob("*.html")):
        yield page, Links(page)


@pytest.mark.slow
def test_every_page_is_in_the_site(site: Path) -> None:
    made = {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")}
    assert {page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")} <= made


@pytest.mark.slow
def test_examples_are_shown_in_full(site: Path) -> None:
    page = (site / "examples.html").read_text()
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    for script in ("one_line.py", "finetune_documents.py", "fabric.py", "torchrun.sh", "slurm.sbatch", "two_hosts.sh"):
        assert (ROOT / "examples" / script).read_text().strip() in text


def test_no_link_is_broken(site: Path) -> None:
    found = dict(parsed(site))
    broken = []
    for page, links in found.items():
        for link in (*links.loaded, *links.linked):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.is_file() or (
                parts.fragment and target in found and unquote(parts.fragment) not in found[target].places
            ):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert not broken


def test_the_site_needs_no_network(site: Path) -> None:
    for page, links in parsed(site):
        assert not [link for link in links.loaded if urlsplit(link).netloc], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text()), sheet


def test_the_reference_has_the_public_names(site: Path) -> None:
    told = {place.rpartition(".")[2] for _, links in parsed(site / "api") for place in links.places}
    for module in ("", ".data", ".estimate", ".models", ".planner"):
        names = set(importlib.import_module(f"lightning_memo{module}").__all__)
        assert names - {"SequenceDataModule", "unigram_entropy"} <= told
