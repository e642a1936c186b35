"""Command line `python -m lightning_memo.export CHECKPOINT FOLDER`: exports a checkpoint to Hugging Face."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that take seconds
    from lightning_memo.cli.processes import finish_imports, prepare_process

    prepare_process()

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_memo.cli.hydra_command import USER_ERROR_EXIT, command_error_message
from lightning_memo.data.tokenizer import has_tokenizer
from lightning_memo.models import CausalLM
from lightning_memo.models.export_hugging_face import check_free, create_repository, export_huggingface, upload_model
from lightning_memo.parallel.open_checkpoint import CheckpointSource, open_checkpoint
from lightning_memo.parallel.sharded_checkpoint import existing_checkpoint, load_sharded
from lightning_memo.utils.units import format_bytes

_NO_TOKENIZER = "without a tokenizer: save it to the same folder with tokenizer.save_pretrained"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see python -m lightning_memo.export --help)")


def main(arguments: list[str] | None = None) -> int:
    """Writes the model of a checkpoint as a Hugging Face folder.

    Args:
        arguments: Arguments of the command line, or None for those in `sys.argv`.

    Returns:
        The exit status: 0, or 2 after bad input, which is reported in one line on stderr.
    """
    try:
        options = _parser().parse_args(arguments)
        check_free(options.folder)  # fails before the work if the folder is in use
        if options.private and options.push_to_hub is None:
            raise ValueError("--private: nothing is uploaded: give --push-to-hub as well, or leave --private out")
        if options.push_to_hub is not None:
            create_repository(options.push_to_hub, private=options.private or None)
        _export(options.checkpoint, options.folder, options.merge)
        if options.push_to_hub is not None:
            print(f"uploaded to {upload_model(options.folder, options.push_to_hub)}")  # noqa: T201
    except Exception as error:
        message = command_error_message(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)  # noqa: T201
        return USER_ERROR_EXIT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m lightning_memo.export",
        description="Writes the model of a checkpoint to a folder that Hugging Face's from_pretrained can load.",
    )
    parser.add_argument(
        "checkpoint", type=Path, help="checkpoint file or folder written by training, with any parallelism"
    )
    parser.add_argument("folder", type=Path, help="folder to write, which must be new or empty")
    parser.add_argument(
        "--merge", action="store_true", help="merge the LoRA adapter into the weights and write the full model"
    )
    parser.add_argument("--push-to-hub", metavar="ORG/NAME", help="also upload the folder to the Hugging Face Hub")
    parser.add_argument("--private", action="store_true", help="make a new repository on the Hub private")
    return parser


def _export(checkpoint: Path, folder: Path, merge: bool) -> None:
    with Console(stderr=True).status("reading ...") as status:
        path = existing_checkpoint(checkpoint)
        source = open_checkpoint(path)
        module = _build(source, merge)
        load_sharded(path, module)
        assert module.model is not None
        status.update("writing ...")
        export_huggingface(module.model, folder, merge=merge)
    size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    tokenizer = "with the tokenizer of the model's folder" if has_tokenizer(str(folder)) else _NO_TOKENIZER
    dtype = str(_dtype(source)).removeprefix("torch.")
    print(f"{folder}: {format_bytes(size_bytes)} in {dtype}; {tokenizer}")  # noqa: T201


def _build(source: CheckpointSource, merge: bool) -> CausalLM:
    """Builds the model of a checkpoint with the data type of its weights.

    Raises:
        ValueError: The checkpoint is not of :class:`CausalLM`, `merge` is set without an adapter, or the adapter is
            useless without its base model.
    """
    settings = source.rest.get("hyper_parameters")
    if not isinstance(settings, dict) or "model" not in settings:
        raise ValueError(
            f"{source.path}: not a checkpoint of lightning_memo.models.CausalLM, because "
            "it has no hyper_parameters of a model"
        )
    _check_merge(settings["model"], merge)
    module = CausalLM(**settings)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(_dtype(source))
        module.configure_model()
    finally:
        torch.set_default_dtype(default)
    return module


def _check_merge(model: dict[str, Any], merge: bool) -> None:
    adapter = bool(model.get("lora", {}).get("r"))
    if merge and not adapter:
        raise ValueError("--merge: the checkpoint has no LoRA adapter; leave --merge out")
    if adapter and not merge and model.get("path") is None:
        raise ValueError(
            "the base model of the adapter had random weights, which exist only in this checkpoint: "
            "use --merge to write the full model"
        )


def _dtype(source: CheckpointSource) -> torch.dtype:
    types = [e.properties.dtype for e in source.entries("state_dict").values() if isinstance(e, TensorStorageMetadata)]
    floating = [dtype for dtype in types if dtype.is_floating_point]
    return max(floating, key=floating.count) if floating else torch.get_default_dtype()


if __name__ == "__main__":
    finish_imports()
    sys.exit(main())
