"""The documentation's site: it builds, it leads nowhere that is not there, and what it says can be done."""

from __future__ import annotations

import ast
import html
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from benchmark_modules import ROOT, benchmark_modules

from lightning_memo.estimate.command import main as estimate_command

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAMES = {"src", "href", "poster", "srcset", "data"}


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


# ---- the pages


def test_the_quick_start_runs(own_folder: None) -> None:
    found = blocks(DOCS / "quick_start.md")
    assert len(found) >= 5
    names: dict[str, object] = {"__name__": "quick_start"}
    for number, block in enumerate(found):
        exec(compile(block, f"quick_start.md, block {number}", "exec"), names)
    assert Path("plan.json").is_file()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_python_on_the_pages_imports_what_there_is(page: Path) -> None:
    for block in blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert not [name.name for name in node.names if not hasattr(module, name.name)]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_out_of_the_root_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text())
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def estimates() -> list[str]:
    """The commands for an estimate that the README and their page show, but those with names to fill in."""
    text = (ROOT / "README.md").read_text() + (DOCS / "estimate.md").read_text()
    found = re.findall(r"^python -m lightning_memo\.estimate (model.*)$", text, re.MULTILINE)
    return sorted({command for command in found if "FOLDER" not in command})


@pytest.mark.parametrize("arguments", estimates())
def test_commands_for_estimates(in_process: Callable[..., tuple[int, str, str]], arguments: str) -> None:
    status, out, err = in_process(estimate_command, *arguments.split())
    assert status == 0, err
    assert "MFU" in out or "mfu" in out


def literals() -> list[str]:
    """What the code may say, with a gap where it is filled in."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"

    files = (ROOT / "lightning_memo").rglob("*.py")
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return [text(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]


def test_messages_of_troubleshooting_are_the_codes() -> None:
    entries = re.findall(r'\*\*"(.+?)"\*\*', (DOCS / "troubleshooting.md").read_text(), re.DOTALL)
    said = "\n".join(literals())
    unknown = []
    for entry in entries:
        pieces = [re.escape(piece) for piece in re.sub(r"\s+", " ", entry).split("...")]
        if not re.search(r"[^\n]*".join(pieces), said):
            unknown.append(entry)
    assert not unknown
    assert len(entries) > 90


def test_the_tables_for_choosing_are_what_estimates_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["choosing.py", "--check"])
    with benchmark_modules():
        status = importlib.import_module("choosing").main()
    assert status == 0, capsys.readouterr().err


def test_every_picture_is_made_by_the_script_or_by_hand_and_shown() -> None:
    with benchmark_modules():
        made = set(importlib.import_module("pictures")._PICTURES)
    there = {path.name for path in (DOCS / "images").iterdir()}
    assert {name for name in there if not name.startswith("performance-")} == made | {
        "alpha.svg",
        "stages.svg",
        "streams.svg",
    }
    pages = "".join(page.read_text() for page in PAGES)
    assert not [name for name in there if f"images/{name})" not in pages]


# ---- the site


class Links(HTMLParser):
    """What a page loads, where it leads, and which places it has."""

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


def test_every_page_is_in_the_site(site: Path) -> None:
    made = {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")}
    assert {page.relative_to(DOCS).with_suffix("") for page in PAGES} <= made


def test_examples_are_shown_whole(site: Path) -> None:
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
