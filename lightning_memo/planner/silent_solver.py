"""A HiGHS solver that prints nothing."""

from __future__ import annotations

import highspy


class SilentSolver(highspy.Highs):
    """HiGHS without output.

    highspy 1.16 prints two lines when its constructor enables callbacks, so output ends before that.
    """

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]
