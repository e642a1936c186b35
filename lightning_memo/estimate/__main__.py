"""`python -m lightning_memo.estimate [overrides]`, or `... calibrate [overrides]`."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["calibrate"]:
        from lightning_memo.estimate.calibration.calibrate import main

        del sys.argv[1]
    else:
        from lightning_memo.estimate.command import main
    main()
