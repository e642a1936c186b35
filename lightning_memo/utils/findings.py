"""What an examination of the machine tells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One subject of the examination.

    Attributes:
        name: The subject.
        text: What was found, and what to do if it is at fault.
        prevents_training: Whether it is why training cannot run.
    """

    name: str
    text: str
    prevents_training: bool = False
