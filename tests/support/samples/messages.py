"""Checks of messages and of what an interpreter logs."""

from __future__ import annotations


def assert_one_line(error: BaseException, *words: str) -> None:
    message = str(error)
    assert message
    assert "\n" not in message
    for word in words:
        assert word in message


def imported(log):
    """Return the top-level packages in the output of `-X importtime`."""
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in log.splitlines() if "|" in line}
