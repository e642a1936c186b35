"""Makes docs/performance.md, its pictures and the README's section from the files in benchmarks/results.

    python benchmarks/performance.py
    python benchmarks/performance.py --check

No number is in them that is not in a file. `--check` writes nothing, and ends with status 1 if the pages are not what
the files say.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cells.cell import Result, load_all
from pages import cpu_page, kernels_page
from pages.comparison import Group, groups_of, speedups
from pages.gpu_page import NOT_MEASURED, SPEEDUPS, device_section, speedup_cells
from pages.markdown import table

from lightning_memo.utils.files import replacing

ROOT = Path(__file__).parents[1]
_MARKS = ("<!-- Made by benchmarks/performance.py. -->", "<!-- The end of what was made. -->")
_MORE = """Placement of buffers, the allocator's time, and device memory against length:
[docs/performance.md](docs/performance.md)."""
_WITHOUT_GPU = {
    "reserved": cpu_page.reserved,
    "placement": cpu_page.placement,
    "allocator": cpu_page.allocation,
    "growth": cpu_page.growth,
}
_INTRODUCTION = """# Performance

Made by `python benchmarks/performance.py` from the files in `benchmarks/results`, which hold all samples, commands,
versions and dates. [benchmarks.md](benchmarks.md) says how each is measured."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="has the marks of the section already")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        devices = load_devices(options.results)
        readme = options.readme.read_text(encoding="utf-8")
        made = {
            options.page: page(options.results, devices),
            options.readme: with_section(readme, options.results, devices),
        }
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.check:
        old = [path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
        for path in old:
            print(f"{path} is not what the results say: python benchmarks/performance.py", file=sys.stderr)
        return 1 if old else 0
    for path, text in made.items():
        with replacing(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    _draw(options.page.parent, devices)
    return 0


def load_devices(results: Path) -> dict[str, list[Result]]:
    """Results by the device's own name.

    Raises:
        ValueError: A file is no result.
    """
    devices: dict[str, list[Result]] = {}
    for folder in sorted((results / "gpu").glob("*/")):
        found = load_all(folder)
        if found:
            devices[next((r["device"] for r in found if "device" in r), folder.name)] = found
    return devices


def page(results: Path, devices: dict[str, list[Result]]) -> str:
    """The page.

    Raises:
        ValueError: A file of results can't be read.
    """
    parts = [_INTRODUCTION, "## On a GPU"]
    parts += [NOT_MEASURED] if not devices else []
    for device, found in devices.items():
        pictures = {g.cell.group: _picture(device, g) for g in groups_of(found)}
        parts += [f"## {device}", device_section(found, pictures)]
    parts += map(kernels_page.section, kernels_page.reports(results))
    parts += [
        "## Without a GPU",
        *(make(cpu_page.load(results / f"{name}.json")) for name, make in _WITHOUT_GPU.items()),
    ]
    return "\n\n".join(parts) + "\n"


def with_section(readme: str, results: Path, devices: dict[str, list[Result]]) -> str:
    """The README with its section made anew.

    Raises:
        ValueError: It has no place for it, or a file of results can't be read.
    """
    first, last = _MARKS
    if readme.count(first) != 1 or readme.count(last) != 1:
        raise ValueError(f"the README needs the lines {first!r} and {last!r}, once, around the section of performance")
    before, _, rest = readme.partition(first)
    _, _, after = rest.partition(last)
    parts = [_summary(device, found) for device, found in devices.items()] or [
        "**On a GPU** nothing has been measured yet: `bash benchmarks/gpu_all.sh` does it."
    ]
    parts += [cpu_page.reserved(cpu_page.load(results / "reserved.json")), _MORE]
    return "\n\n".join([before + first, *parts, last + after])


def _summary(device: str, results: Sequence[Result]) -> str:
    """Of a device, how Memo's own choice compares."""
    rows = [[group.cell.group, *speedup_cells(speedup)] for group in groups_of(results) for speedup in speedups(group)]
    told = "Memo and another method have not both been measured at one length yet."
    if rows:
        told = table(["model", *SPEEDUPS], rows)
    title = f"**On one {device}**: how many times as fast Memo trains ([docs/performance.md](docs/performance.md))"
    return f"{title}\n\n{told}"


def _picture(device: str, group: Group) -> Path:
    """Relative to the page."""
    return Path("images") / f"performance-{re.sub(r'[^a-z0-9]+', '_', device.lower())}-{group.cell.group}.png"


def _draw(folder: Path, devices: dict[str, list[Result]]) -> None:
    if not devices:
        return
    from pages.picture import draw  # matplotlib takes long to import

    for device, found in devices.items():
        for group in groups_of(found):
            draw(group, device, folder / _picture(device, group))


if __name__ == "__main__":
    sys.exit(main())
