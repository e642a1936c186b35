"""What errors of runs on fake tensors tell a user."""

from __future__ import annotations


def trial_error(error: Exception) -> str:
    """Return why a run on fake tensors that ended with an error proves nothing."""
    return f"a trial run with other numbers of tokens, and without values, ended with: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__
