"""Trains with the Trainer of Hugging Face, and with those that are derived from it."""

from __future__ import annotations

import inspect
from typing import Any, Final

import accelerate
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from lightning_memo.artifacts.plan import Plan
from lightning_memo.config import check_names
from lightning_memo.memo_loop import MemoLoop


class MemoCallback(TrainerCallback):
    """Trains with swapped and recomputed activations in a `transformers.Trainer`, TRL's trainers included.

        trainer = Trainer(model, args, train_dataset=dataset, callbacks=[MemoCallback()])
        trainer.train()

    The plan is written to the `output_dir` of the trainer. A forward that runs out of device memory is run again with
    less; a backward is not. With `context_parallel_size`, neighbouring processes get the same rows for training, and
    share their tokens; evaluation is not divided. The callback is then one of those that `Trainer(...)` is given.

    Args:
        settings: As for :class:`~lightning_memo.MemoLoop`.

    Attributes:
        loop: The loop of the present training, or of the last one; `None` before.

    Raises:
        TypeError: A setting is not known.
        ValueError: A setting is wrong, or contradicts another one.
    """

    def __init__(self, **settings: Any) -> None:
        parameters = inspect.signature(MemoLoop).parameters.values()
        known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "output_dir"]  # the trainer's
        check_names("MemoCallback", settings, known)
        self._sharing = _SharedRows(MemoLoop.check(settings).context_parallel_size)
        self._settings = settings
        self.loop: MemoLoop | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan in force, also after training; `None` until the first batch is over."""
        return None if self.loop is None else self.loop.plan

    @override
    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        _refuse(args)  # before data is read, and at the beginning of training if the callback was added later
        self._sharing.begin(args)

    @override
    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._sharing.refuse_evaluation()

    @override
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        self.close()
        _refuse(args)
        self._sharing.end(train_dataloader)
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


# The first version with which trainers pass a configuration of its mesh on.
_WITH_MESHES: Final = Version("1.12.0")


class _SharedRows:
    """Lets Accelerate give the processes that share the tokens of a row the same rows of the data for training.

    Accelerate gives the same batch to processes that differ in the dimension "cp" of its mesh only. It has such a mesh
    from the construction of a trainer, in which callbacks are told for the first time, until the loader of the training
    data is made. Loaders for evaluation divide the data among all processes, as without the callback.

    Args:
        size: Context-parallel size.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._before: tuple[Any, Any] | None = None

    def begin(self, args: TrainingArguments) -> None:
        """Set the mesh.

        Raises:
            ValueError: The processes or the arguments of the trainer do not allow it.
        """
        if self._size == 1:
            return
        if Version(accelerate.__version__) < _WITH_MESHES:
            raise ValueError(
                f"context_parallel_size={self._size} needs accelerate {_WITH_MESHES} or later, and "
                f"{accelerate.__version__} is installed: pip install --upgrade accelerate"
            )
        if getattr(args, "precompute_ref_log_probs", False):
            raise ValueError(
                f"precompute_ref_log_probs=True contradicts context_parallel_size={self._size}: each row would be "
                "counted more than once; set precompute_ref_log_probs=False"
            )
        if hasattr(args, "num_generations"):
            raise ValueError(
                f"context_parallel_size={self._size}: each process generates its own completions, and processes that "
                f"share rows would train on others ({type(args).__name__}): leave context_parallel_size out"
            )
        state = AcceleratorState()
        config, processes = state.parallelism_config, state.num_processes
        if config is not None and config.non_data_parallel_size > 1:
            raise ValueError(
                f"parallelism_config divides rows or weights already, and context_parallel_size={self._size} divides "
                "tokens: leave cp_size, sp_size and tp_size out of it"
            )
        replicas = 1 if config is None or config.dp_shard_size == 1 else config.dp_replicate_size
        if processes // replicas % self._size:
            among = "" if replicas == 1 else f" in each of {replicas} replicas"
            raise ValueError(
                f"context_parallel_size={self._size} does not divide the {processes // replicas} processes{among}: "
                f"start a multiple of {self._size}, or lower it"
            )
        shape = (replicas, processes // replicas // self._size, self._size)
        mesh = init_device_mesh(state.device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
        mesh["dp_shard", "cp"]._flatten("dp_shard_cp")  # over which FSDP2 shards
        self._before = state.device_mesh, config
        state.device_mesh = mesh
        state.parallelism_config = config or accelerate.ParallelismConfig(dp_shard_size=processes)

    def end(self, loader: Any) -> None:
        """Set the mesh that was there before.

        Args:
            loader: The loader of the training data.

        Raises:
            ValueError: The loader gives each process rows of its own.
        """
        if self._size == 1:
            return
        if self._before is None:
            raise ValueError(
                f"MemoCallback(context_parallel_size={self._size}) shares out the rows of one training: make a new "
                "Trainer with callbacks=[MemoCallback(...)] for each call of train(), without auto_find_batch_size"
            )
        state = AcceleratorState()
        (state.device_mesh, state.parallelism_config), self._before = self._before, None
        if isinstance(loader, DataLoaderDispatcher):
            raise ValueError(
                f"the first process divides the rows of an iterable dataset, and context_parallel_size={self._size} "
                'needs whole ones: set accelerator_config={"dispatch_batches": False} in the trainer\'s arguments'
            )

    def refuse_evaluation(self) -> None:
        """Refuse an evaluation before the training.

        Raises:
            ValueError: The loader of the training data has not been made yet.
        """
        if self._before is not None:
            raise ValueError(
                f"context_parallel_size={self._size}: an evaluation before train() would count rows more than once: "
                "evaluate after it, or set eval_on_start=True"
            )


def _refuse(args: TrainingArguments) -> None:
    """Refuse arguments of the trainer that contradict swapping.

    Raises:
        ValueError: An argument does.
    """
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # of newer and older versions
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
