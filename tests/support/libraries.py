"""What libraries do again and again in a process of tests, of which one time is enough."""

from __future__ import annotations

import functools
import types

import torch
from lightning.fabric.utilities import registry


def look_up_once() -> None:
    """Let each Trainer find the callbacks of other packages by the metadata that the first one has read.

    Seeds for devices that this machine has not got are no longer noted with the stack of whoever has set them.
    """
    registry.entry_points = functools.cache(registry.entry_points)
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.traceback = types.SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]
