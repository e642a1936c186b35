"""Pictures of the memory of a training step: the offsets of its buffers, and memory use over its requests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lightning_memo.artifacts.buffer_placement import StepPlacement
from lightning_memo.artifacts.trace import Trace
from lightning_memo.reports.memory_picture_data import BOUND_COLOR, CURVES, Look, MemoryStep
from lightning_memo.utils.files import replacing
from lightning_memo.utils.units import format_bytes

_PEAK_COLOR: Final = "#555555"


def memory_map(trace: Trace, placement: StepPlacement, path: str | os.PathLike[str]) -> None:
    """Draw a PNG of the offsets of a step's buffers: address over time.

    Args:
        trace: The step that was planned.
        placement: Offsets of its buffers.
        path: The file. Its folder is created if missing.

    Raises:
        ValueError: The placement belongs to other requests than those of the trace.
        OSError: The file cannot be written.
    """
    from matplotlib.collections import PolyCollection  # the import takes a second, and only few runs draw

    step = MemoryStep(trace, placement)
    power, unit = step.unit(placement.peak_bytes)
    with _figure(step, f"Offsets of a step's buffers: {step.summary}", path) as (figure, axes):
        row, left, right = step.pieces
        low = step.offset[row] / power
        high = low + trace.size[row] / power
        corners = np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)
        axes.add_collection(
            PolyCollection(list(corners), facecolors=step.colors(row), linewidths=0, snap=False, rasterized=True),
            autolim=False,
        )
        axes.axhline(placement.peak_bytes / power, color=_PEAK_COLOR, linewidth=3, alpha=0.5, label="peak of the plan")
        axes.axhline(
            placement.lower_bound_bytes / power, color=BOUND_COLOR, linewidth=1, linestyle="--", label="lower bound"
        )
        axes.set_ylim(0, 1.04 * placement.peak_bytes / power or 1)
        axes.set_ylabel(f"address in the arena ({unit})")
        _legend(step, figure, axes)


def memory_curve(trace: Trace, placement: StepPlacement, path: str | os.PathLike[str]) -> None:
    """Draw a PNG of memory over a step, with the plan and with a simulation of PyTorch's caching allocator.

    Args:
        trace: The step that was planned.
        placement: Offsets of its buffers.
        path: The file. Its folder is created if missing.

    Raises:
        ValueError: The placement belongs to other requests than those of the trace.
        OSError: The file cannot be written.
    """
    step = MemoryStep(trace, placement)
    highest = max(int(values.max(initial=0)) for values in step.curves)
    power, unit = step.unit(highest)
    with _figure(step, f"Memory over a step: {step.summary}", path) as (figure, axes):
        for (label, look), values in zip(CURVES.items(), step.curves, strict=True):
            _draw_curve(axes, values / power, look, f"{label}: {format_bytes(int(values.max(initial=0)))}")
        axes.set_ylim(0, 1.04 * highest / power or 1)
        axes.set_ylabel(f"memory ({unit})")
        axes.grid(visible=True, alpha=0.3)
        _legend(step, figure, axes)


@contextmanager
def _figure(step: MemoryStep, title: str, path: str | os.PathLike[str]) -> Iterator[tuple[Any, Any]]:
    """Yield axes over the time of a step, with its phases on top, and save the figure afterwards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), layout="constrained")
    strip, axes = figure.subplots(2, 1, sharex=True, height_ratios=[1, 36])
    figure.suptitle(title)
    start = step.trace.phase_start
    for group, color in enumerate(step.phase_colors.values()):
        phases = np.nonzero(step.phase_groups == group)[0]
        strip.broken_barh(np.stack([start[phases], np.diff(start)[phases]], axis=1), (0, 1), color=color, linewidth=0)
    strip.set_axis_off()
    strip.set_ylim(0, 1)
    axes.set_xlim(0, max(len(step.trace), 1))
    axes.set_xlabel("time (requests of the step)")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    yield figure, axes
    with replacing(Path(path)) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)


def _draw_curve(axes: Any, values: npt.NDArray[np.float64], look: Look, label: str) -> None:
    values = np.append(values, values[-1:])  # the last value lasts to the end of the step
    times = np.arange(len(values))
    if look.style == "area":
        axes.fill_between(times, values, step="post", color=look.color, linewidth=0, label=label)
    else:
        axes.step(times, values, where="post", color=look.color, linestyle=look.style, linewidth=1.2, label=label)


def _legend(step: MemoryStep, figure: Any, axes: Any) -> None:
    """Add a legend of the phases and of all labels below the axes."""
    from matplotlib.patches import Patch

    groups = [Patch(color=color, label=group) for group, color in step.phase_colors.items()]
    figure.legend(handles=groups, loc="outside lower center", ncols=len(groups), frameon=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False)
