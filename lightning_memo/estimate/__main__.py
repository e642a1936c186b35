"""`python -m lightning_memo.estimate [overrides]`, or `... calibrate [overrides]`."""

import sys

if __name__ == "__main__":
    from lightning_memo.cli.processes import finish_imports, prepare_process

    prepare_process()  # before the imports that take seconds
    if sys.argv[1:2] == ["calibrate"]:
        from lightning_memo.estimate.calibrate import main

        del sys.argv[1]
    else:
        from lightning_memo.estimate.command import main
    finish_imports()
    main()
