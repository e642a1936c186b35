"""Trains with the Trainer of Hugging Face, and with those that are derived from it."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from lightning_memo.artifacts.plan import Plan
from lightning_memo.config import refusing_gone
from lightning_memo.memo_loop import MemoLoop


class MemoCallback(TrainerCallback):
    """Trains with swapped and recomputed activations in a `transformers.Trainer`, TRL's trainers included.

        trainer = Trainer(model, args, train_dataset=dataset, callbacks=[MemoCallback()])
        trainer.train()

    The plan is written to the `output_dir` of the trainer. A forward that runs out of device memory is run again with
    less; a backward is not.

    Args:
        settings: As for :class:`~lightning_memo.MemoLoop`.

    Attributes:
        loop: The loop of the present training, or of the last one; `None` before.

    Raises:
        TypeError: A setting is not known.
        ValueError: A setting is wrong, or contradicts another one.
    """

    @refusing_gone
    def __init__(self, **settings: Any) -> None:
        parameters = inspect.signature(MemoLoop).parameters.values()
        known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "output_dir"]  # the trainer's
        if unknown := next((name for name in settings if name not in known), None):
            near = difflib.get_close_matches(unknown, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"give {', '.join(known)}"
            raise TypeError(f"{unknown}={settings[unknown]!r} is no setting of MemoCallback: {remedy}")
        MemoLoop.check(settings)
        self._settings = settings
        self.loop: MemoLoop | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan in force, also after training; `None` until the first batch is over."""
        return None if self.loop is None else self.loop.plan

    @override
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        self.close()
        _refuse(args)
        assert model is not None and optimizer is not None
        self.loop = MemoLoop(model, optimizer, output_dir=args.output_dir, **self._settings)
        self.loop.__enter__()

    @override
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Restore the model, and release all memory. The end of training does it; after an exception nothing does."""
        if self.loop is not None and self.loop.is_active:
            self.loop.__exit__(None, None, None)


def _refuse(args: TrainingArguments) -> None:
    """Refuse arguments of the trainer that contradict swapping.

    Raises:
        ValueError: An argument does.
    """
    for name in ("gradient_checkpointing", "activation_checkpointing"):  # of older and newer versions
        if getattr(args, name, False):
            raise ValueError(
                f"{name}=True contradicts MemoCallback, which recomputes activations itself: set {name}=False in the "
                "trainer's arguments (those of TRL set it by default)"
            )
    if args.deepspeed is not None:
        raise ValueError("DeepSpeed has an engine of its own for steps: leave it out, or train without MemoCallback")
    compilation = AcceleratorState().dynamo_plugin
    if compilation.use_regional_compilation and compilation.backend != DynamoBackend.NO:
        raise ValueError(
            "regional compilation trains a copy of the model's modules, in which MemoCallback does not see the layers: "
            "set ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=0, or leave torch_compile out"
        )
    if args.fp16:
        raise ValueError("fp16=True is not supported by MemoCallback: give bf16=True")
    if args.n_gpu > 1:
        raise ValueError(
            f"one process for {args.n_gpu} GPUs copies the model in each step (nn.DataParallel): start a process for "
            "each (torchrun), or show one GPU only (CUDA_VISIBLE_DEVICES=0)"
        )
