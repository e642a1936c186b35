"""A page of the memory of a training step, to zoom, pan and point into."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from pathlib import Path
from typing import Any, Final

from lightning_memo.artifacts.buffer_placement import StepPlacement
from lightning_memo.artifacts.trace import Trace
from lightning_memo.reports.memory_step import MemoryStep
from lightning_memo.utils.files import replacing

_TEMPLATE: Final = Path(__file__).with_name("memory_page.html")
"""The page, with placeholders like @DATA@ for what depends on the step."""


def memory_page(trace: Trace, placement: StepPlacement, path: str | os.PathLike[str]) -> None:
    """Writes one HTML page with both pictures to zoom, pan and point into; it needs no network.

    Args:
        trace: The step that was planned.
        placement: Its places.
        path: The file; its folder is made if missing.

    Raises:
        ValueError: The placement is not for the requests of this trace.
        OSError: The file can't be written.
    """
    step = MemoryStep(trace, placement)
    template = _TEMPLATE.read_text(encoding="utf-8")
    parts = {
        "SUMMARY": html.escape(step.summary),
        "DETAILS": html.escape(
            f"{len(step.placed):,} of {len(trace):,} requests have a place; found by: {placement.method}"
        ),
        "STYLE_HASH": _hash(template, "style"),
        "SCRIPT_HASH": _hash(template, "script"),
        "DATA": _for_script(step.document),
    }
    # All at once: what looks like a placeholder in a part stays as it is.
    page = re.sub(rf"@({'|'.join(parts)})@", lambda found: parts[found[1]], template)
    with replacing(Path(path)) as unfinished:
        unfinished.write_text(page, encoding="utf-8", errors="replace")  # half of a surrogate pair can't be written


def _hash(template: str, tag: str) -> str:
    """The page's own style and script are allowed by their hashes, so that no others count."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _for_script(document: dict[str, Any]) -> str:
    """JSON that can't end the element that it stands in, whatever names are in it."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
