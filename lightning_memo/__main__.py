"""The commands of the package, as `lightning-memo COMMAND` and `python -m lightning_memo COMMAND`."""

import os
import sys

COMMANDS = {
    "train": "train a model on text or documents (Hydra settings: train --help)",
    "estimate": "estimate whether a run fits, and how fast it is, without a GPU",
    "longest": "find the longest sequence that trains on this machine",
    "place": "place the buffers of a recorded step",
    "export": "write a checkpoint in the format of Hugging Face",
}


def main() -> None:
    """Run a command in place of this process, so that it starts other processes and ends as it does by itself."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        listed = "\n".join(f"  {name:9} {what}" for name, what in COMMANDS.items())
        print(f"usage: lightning-memo COMMAND [arguments]\n\n{listed}\n\nCOMMAND --help explains a command.")  # noqa: T201
        return
    if command not in COMMANDS:
        print(f"lightning-memo: {command!r} is no command: give {', '.join(COMMANDS)}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"lightning_memo.{command}", *arguments])


if __name__ == "__main__":
    main()
