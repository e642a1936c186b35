"""Folders of the checkout that tests read."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
REFERENCE = TESTS / "reference"
