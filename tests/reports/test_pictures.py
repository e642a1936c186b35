"""Memory pictures and pages: their content, their safety, and that failures leave no partial files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from support.samples.plans import record_step, small_step, step_of

from lightning_memo.artifacts.buffer_placement import PhasePlacement
from lightning_memo.artifacts.trace import NEVER
from lightning_memo.planner.placement.caching_allocator import replay
from lightning_memo.reports.memory_pictures import PHASE_COLORS, memory_curve, memory_map, memory_page, request_offsets

NASTY = ("</script><script>alert(1)</script>", "<b onclick=x>&amp;\"'", "$x^{$ \u2028 %s {0}")
EVERY = [memory_map, memory_curve, memory_page]
SIZE = (1680, 960)

each_picture = pytest.mark.parametrize("draw", EVERY, ids=lambda draw: draw.__name__)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The trace and the placement of a step of training."""
    strategy = record_step(tmp_path_factory.mktemp("run"))
    return strategy.memory.trace, strategy.plan.placement


class Page(HTMLParser):
    """Elements with their attributes, and the text in scripts."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.scripts = [], []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script":
            self.scripts[-1] += data

    def handle_endtag(self, tag):
        self.lasttag = ""

    @property
    def document(self):
        return json.loads(self.scripts[0])


def values_of(curve, requests):
    """Values of a curve of the page at every request."""
    steps, values = curve["values"]
    return [values[at - 1] for at in np.searchsorted(np.cumsum(steps), np.arange(requests), side="right")]


# ---- places


def test_requests_find_their_places():
    assert request_offsets(*small_step()).tolist() == [0, 10, -1, -1, 40, 60]


def test_order_of_phases_does_not_matter():
    trace, placement = small_step()
    turned = replace(placement, phases=placement.phases[::-1])
    assert request_offsets(trace, turned).tolist() == request_offsets(trace, placement).tolist()


def test_what_can_not_be_planned_has_no_place():
    trace, placement = step_of([(0, 10, NEVER, 0, 50), (0, 10, 2, 0, 0)], ["input"])
    assert request_offsets(trace, placement).tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda phases: phases[1:], "phase 'input'"),
        (lambda phases: (replace(phases[0], name="x"), *phases[1:]), "phase 'input'"),
        (lambda phases: (replace(phases[0], sizes=(11,)), *phases[1:]), "phase 'input'"),
        (lambda phases: (replace(phases[0], sizes=(10, 1), offsets=(0, -1)), *phases[1:]), "phase 'input'"),
        (lambda phases: (*phases, PhasePlacement(name="more", sizes=(1,), offsets=(0,))), "phase 'more'"),
    ],
    ids=["missing", "name", "size", "number", "more"],
)
@each_picture
def test_a_placement_of_another_trace(draw, change, message, tmp_path):
    trace, placement = small_step()
    with pytest.raises(ValueError, match=message):
        draw(trace, replace(placement, phases=change(placement.phases)), tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())


# ---- pictures


@pytest.mark.parametrize("draw", EVERY[:2], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize(
    "phases", [("input", "layer 0 forward", "backward", "layer 0 backward", "optimizer"), (*NASTY, "a", "b")]
)
def test_png(draw, phases, tmp_path):
    draw(*small_step(phases), tmp_path / "folder" / "picture.png")
    with Image.open(tmp_path / "folder" / "picture.png") as picture:
        assert (picture.format, picture.size) == ("PNG", SIZE)
        assert len(picture.convert("RGB").getcolors(10**6)) > 10
    assert len(list((tmp_path / "folder").iterdir())) == 1


def test_map_has_the_colours_of_the_phases(tmp_path):
    memory_map(*small_step(), tmp_path / "map.png")
    with Image.open(tmp_path / "map.png") as picture:
        shown = {
            f"#{red:02x}{green:02x}{blue:02x}" for _, (red, green, blue) in picture.convert("RGB").getcolors(10**6)
        }
    assert shown >= set(PHASE_COLORS.values())


@each_picture
def test_a_recorded_step(draw, recorded, tmp_path):
    draw(*recorded, tmp_path / "picture")  # the name does not choose the format
    assert (tmp_path / "picture").stat().st_size > 10_000


@each_picture
def test_a_step_without_requests(draw, tmp_path):
    draw(*step_of([], [], peak=0, bound=0), tmp_path / "picture.png")
    draw(*step_of([], ["input"], peak=0, bound=0), tmp_path / "picture.png")


@each_picture
def test_nothing_is_left_when_writing_fails(draw, tmp_path):
    (tmp_path / "picture.png").mkdir()
    with pytest.raises(OSError, match="not a regular file"):
        draw(*small_step(), tmp_path / "picture.png")
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]
    assert not list((tmp_path / "picture.png").iterdir())


@each_picture
def test_an_old_picture_stays_when_drawing_fails(draw, tmp_path, monkeypatch):
    (tmp_path / "picture.png").write_text("old")

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    monkeypatch.setattr("pathlib.Path.write_text", fail)
    with pytest.raises(OSError, match="disk full"):
        draw(*small_step(), tmp_path / "picture.png")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


# ---- the page


def test_page_has_every_request(recorded, tmp_path):
    trace, placement = recorded
    memory_page(trace, placement, tmp_path / "page.html")
    document = Page(tmp_path / "page.html").document
    assert [document["sizes"][index] for index in document["size"]] == trace.size.tolist()
    assert document["death"] == trace.death.tolist()
    assert document["offset"] == request_offsets(trace, placement).tolist()
    assert np.repeat(np.arange(len(trace.phases)), np.diff(document["start"])).tolist() == trace.phase.tolist()
    assert tuple(document["phases"]) == trace.phases
    assert (document["peak"], document["bound"]) == (placement.peak_bytes, placement.lower_bound_bytes)


def test_curves_of_the_page(recorded, tmp_path):
    trace, placement = recorded
    memory_page(trace, placement, tmp_path / "page.html")
    document = Page(tmp_path / "page.html").document
    live, with_plan, allocated, reserved, expandable = (
        np.array(values_of(curve, len(trace))) for curve in document["curves"]
    )
    model = replay(trace)
    assert allocated.tolist() == model.allocated_bytes.tolist()
    assert reserved.tolist() == model.reserved_bytes.tolist()
    assert expandable.tolist() == replay(trace, expandable=True).reserved_bytes.tolist()
    assert (with_plan >= placement.peak_bytes).all()
    assert live.max() <= placement.lower_bound_bytes
    assert (live <= allocated).all()


def test_live_and_rest_by_hand(tmp_path):
    memory_page(*small_step(), tmp_path / "page.html")
    document = Page(tmp_path / "page.html").document
    assert values_of(document["curves"][0], 6) == [30, 40, 40, 10, 30, 70]
    assert document["lane"] == [2]
    # One request has no place: PyTorch's allocator keeps 2 MiB for it.
    assert values_of(document["curves"][1], 6) == [100 + 2**21] * 6


def test_kinds_of_phases(tmp_path):
    phases = ["input", "layer 0 forward", "after layer 0 forward", "layer 10 forward 2", "backward", "layer 3 backward"]
    phases += ["after layer 3 backward 2", "optimizer", "input 2", "layer 0 forwards", "optimizers"]
    memory_page(*step_of([(0, 1, 1, 0, 0)], phases), tmp_path / "page.html")
    names = list(PHASE_COLORS)
    assert [names[kind] for kind in Page(tmp_path / "page.html").document["kind"]] == [
        "input", "layer forward", "between layers, loss", "layer forward", "between layers, loss", "layer backward",
        "between layers, loss", "optimizer", "input", "between layers, loss", "between layers, loss",
    ]  # fmt: skip


def test_phases_of_plain_training(tmp_path):
    """Layers that run plainly mark no phases: "input" and "backward" are the whole forward and backward."""
    phases = ["input", "backward", "input 2", "backward 2", "optimizer"]
    memory_page(*step_of([(0, 1, 1, 0, 0)], phases), tmp_path / "page.html")
    document = Page(tmp_path / "page.html").document
    names = list(document["kinds"])
    assert [names[kind] for kind in document["kind"]] == ["forward", "backward", "forward", "backward", "optimizer"]
    assert document["phases"] == ["forward", "backward", "forward 2", "backward 2", "optimizer"]


def test_page_refers_to_nothing_outside(recorded, tmp_path):
    memory_page(*recorded, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    attributes = {name for _, found in page.elements for name in found}
    assert not attributes & {"src", "href", "srcset", "action", "data", "poster", "style"}
    assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttpRequest|import\(", page.text)
    policy = next(found["content"] for tag, found in page.elements if found.get("http-equiv"))
    assert policy.startswith("default-src 'none'")


def test_names_can_not_act(tmp_path):
    memory_page(*small_step((*NASTY, "layer 0 backward", "optimizer")), tmp_path / "nasty.html")
    memory_page(*small_step(), tmp_path / "plain.html")
    nasty, plain = Page(tmp_path / "nasty.html"), Page(tmp_path / "plain.html")
    assert nasty.elements == plain.elements
    assert nasty.document["phases"][:3] == list(NASTY)
    assert nasty.scripts[1] == plain.scripts[1]
    assert "<i>" not in nasty.text and "&lt;i&gt;by hand" in nasty.text


def test_the_policy_allows_the_page_s_own_code_and_no_other(recorded, tmp_path):
    memory_page(*recorded, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    (policy,) = (found["content"] for tag, found in page.elements if found.get("http-equiv"))
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    texts = {tag: re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL) for tag in ("style", "script")}
    assert allowed == {
        "default-src": "'none'",
        **{f"{tag}-src": " ".join(f"'{sha256(text)}'" for text in found) for tag, found in texts.items()},
    }
    assert [tag for tag, _ in page.elements if tag in ("style", "script")] == ["style", "script", "script"]


def sha256(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_what_looks_like_a_placeholder_is_text(tmp_path):
    trace, placement = small_step(("@SUMMARY@", "@DATA@", "@x@", "a", "b"))
    memory_page(trace, replace(placement, method="@DATA@ @SCRIPT_HASH@ \ud800"), tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert page.document["phases"] == ["@SUMMARY@", "@DATA@", "@x@", "a", "b"]
    assert "found by: @DATA@ @SCRIPT_HASH@ ?</p>" in page.text


@pytest.mark.slow
def test_a_large_step_is_drawn_and_embedded_compactly(tmp_path):
    count, unit = 30_000, 2**20 * 64
    row = np.arange(count)
    size = unit * (1 + row % 7) + row % 100
    death = np.minimum(row + 1 + row % 60, count)
    rows = zip(row // 100, size, death, 0 * row, unit * 8 * (row % 61), strict=True)
    phases = [f"layer {number} forward" for number in range(count // 100)]
    trace, placement = step_of(list(rows), phases, peak=unit * 8 * 62, bound=unit * 8)
    memory_page(trace, placement, tmp_path / "page.html")
    memory_map(trace, placement, tmp_path / "map.png")
    assert (tmp_path / "page.html").stat().st_size < 2 * 10**6
    assert len(Page(tmp_path / "page.html").document["size"]) == count
