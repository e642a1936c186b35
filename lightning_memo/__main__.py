"""The commands of the package, as `lightning-memo COMMAND` and `python -m lightning_memo COMMAND`."""

import difflib
import os
import signal
import sys

from lightning_memo import __version__

COMMANDS = {
    "train": "train a model on text or documents (Hydra settings: train --help)",
    "estimate": "estimate whether a run fits, and how fast it is, without a GPU",
    "longest": "find the longest sequence that trains on this machine",
    "place": "place the buffers of a recorded step",
    "export": "write a checkpoint in the format of Hugging Face",
    "doctor": "say whether this machine can train, by what, and what is missing",
}


def main() -> None:
    """Run a command in place of this process, so that it starts other processes and ends as it does by itself."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head`
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        listed = "\n".join(f"  {name:9} {what}" for name, what in COMMANDS.items())
        usage = "usage: lightning-memo COMMAND [arguments], or lightning-memo --version"
        print(f"{usage}\n\n{listed}\n\nCOMMAND --help explains a command.")  # noqa: T201
        return
    if command == "--version":
        print(f"lightning-memo {__version__}")  # noqa: T201
        return
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        meant = f": did you mean {near[0]}?" if near else "."
        message = f"lightning-memo: {command!r} is no command{meant} Commands: {', '.join(COMMANDS)}"
        print(message, file=sys.stderr)  # noqa: T201
        sys.exit(2)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"lightning_memo.{command}", *arguments])


if __name__ == "__main__":
    main()
