"""Interactive HTML page of the memory of a training step."""

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
from lightning_memo.reports.memory_picture_data import MemoryStep
from lightning_memo.utils.files import replacing

_TEMPLATE: Final = Path(__file__).with_name("memory_page.html")
"""The page, with placeholders such as @DATA@ for the content that depends on the step."""


def memory_page(trace: Trace, placement: StepPlacement, path: str | os.PathLike[str]) -> None:
    """Write an HTML page with the memory map and the memory curve, which can be zoomed and panned without a network.

    Args:
        trace: The step that was planned.
        placement: Offsets of its buffers.
        path: The file. Its folder is created if missing.

    Raises:
        ValueError: The placement belongs to other requests than those of the trace.
        OSError: The file cannot be written.
    """
    step = MemoryStep(trace, placement)
    template = _TEMPLATE.read_text(encoding="utf-8")
    parts = {
        "SUMMARY": html.escape(step.summary),
        "DETAILS": html.escape(
            f"{len(step.placed):,} of {len(trace):,} requests have an offset; found by: {placement.method}"
        ),
        "STYLE_HASH": _hash(template, "style"),
        "SCRIPT_HASH": _hash(template, "script"),
        "DATA": _for_script(step.document),
    }
    # In one pass, so that text in a part that looks like a placeholder stays unchanged.
    page = re.sub(rf"@({'|'.join(parts)})@", lambda found: parts[found[1]], template)
    with replacing(Path(path)) as unfinished:
        unfinished.write_text(page, encoding="utf-8", errors="replace")  # unpaired surrogates cannot be encoded


def _hash(template: str, tag: str) -> str:
    """Hash for the content security policy, which allows only the page's own style and script."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _for_script(document: dict[str, Any]) -> str:
    """JSON that cannot end the script element that contains it, whatever names occur in it."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
