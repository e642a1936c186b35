"""The Lightning strategy: settings in, hooks wired, no algorithms."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.swap_plan import Attention, HostBacked
from lightning_memo.callbacks import OutOfMemoryRetry, PlanAfterFirstStep, PlanMemory, Together, WatchDevice, WatchHost
from lightning_memo.checkpointing import CheckpointingStrategy
from lightning_memo.config import PRECISIONS, MemoConfig
from lightning_memo.data.seed_workers import seed_workers
from lightning_memo.engine import Engine, TestMode
from lightning_memo.engine.forward.intercept import set_layout
from lightning_memo.engine.memory.spill_file import open_unnamed
from lightning_memo.kernels.select_kernel import check_available
from lightning_memo.loss.attach_loss import attach_chunked_loss
from lightning_memo.parallel.mesh_precision import MeshPrecision
from lightning_memo.parallel.parallel_sizes import resolve_sizes
from lightning_memo.parallel.processes import Processes
from lightning_memo.parallel.rank_groups import explain_lost_process
from lightning_memo.parallel.zero_sharding import accumulating
from lightning_memo.refusals import (
    refuse_averaging,
    refuse_gradient_checkpointing,
    refuse_liger_shards,
    tell_fused_loss,
    tell_resting,
)
from lightning_memo.utils.find_layers import find_layers


class MemoStrategy(CheckpointingStrategy):
    """Trains sequences that do not fit, by swapping a share of each layer's activations and recomputing the others.

    `Trainer(strategy=MemoStrategy(...))`, or `Trainer(strategy="memo")` after `import lightning_memo`. The first batch
    is profiled; then a share alpha of the tokens has its activations swapped to host memory while later layers compute,
    and the others have theirs recomputed in the backward, attention excepted (MEMO). Gradients are those of plain
    training. Nothing else changes in the LightningModule, whose model may be built in `__init__` or `configure_model`.

    With several processes (`Trainer(devices=8)`, torchrun, SLURM) their number is data x context x tensor parallel
    size. Batches are whole when the loader gives them; every process keeps its part of the tokens, and the loss that a
    Hugging Face model returns is weighted by the tokens of all of them.

    Args:
        data_parallel_size: Groups of processes that get different data; "auto" is what the other sizes leave.
        context_parallel_size: Processes that share the tokens of a sequence.
        tensor_parallel_size: Processes that share the weights of each layer.
        zero_stage: What processes with the same weights shard: 0 nothing, 1 optimizer state, 2 gradients too, 3
            parameters too (ZeRO, by FSDP2).
        context_parallel_method: How attention crosses processes: "ring", "ulysses" (all-to-all), or "usp" (both).
        ulysses_size: With "usp", processes of each all-to-all; "auto" is as many as the heads allow.
        sequence_parallel: Tensor-parallel processes share the tokens between the blocks of a layer too (Megatron SP).
        loss_parallel: Tensor-parallel processes share the vocabulary of the logits, which are then a DTensor.
        tensor_parallel_plan: Style of each weight by dotted name with `*`, like Hugging Face's `tp_plan`; `None` takes
            the model's.
        offload_state: Parameters, gradients and optimizer state live on the host, where the optimizer runs.
        alpha: Share of the tokens whose activations are swapped, 0.0 to 1.0; "auto" solves for it.
        plan_memory: Place every buffer of a step ahead, and serve the places by a planned allocator: nothing fragments.
        device_memory: Device memory to plan with, like "40GiB" or bytes; `None` measures what is free.
        host_memory: Host memory of a node for swapped activations, shared by its processes; `None` takes 90 % of what
            is free, cgroup limits respected.
        spill_path: Folder on a local disk (NVMe) for the activations of layers that the host has no room for; they pass
            through a file there that has no name and is gone with the process.
        spill_memory: Disk space of a node for it, shared by its processes; `None` takes 90 % of what is free.
        slice_tokens: Longest slice of tokens that runs through a layer at once; "auto" cuts at alpha only.
        host_backed: What lives on the host beside swapped activations: "attention": slices swap for themselves, and
            attention gets the keys and values of earlier ones from there, block by block, so that a layer touches
            no more than `slice_tokens` at once (FPDT); "all": gradients of keys and values too, and hidden states
            between layers; "none"; "auto" is "attention" where `slice_tokens` are given and attention is causal.
        storage: What says which activations are swapped: "alpha", a fraction of the tokens; or "kinds", a linear
            program over kinds of tensors, which also stores single matrix products, keeps some on the device, or runs
            attention again instead of storing its output.
        loss_chunk_tokens: Tokens whose logits exist at once: the loss of a Hugging Face model is computed in chunks of
            them, and so is one of `F.cross_entropy(logits, ...)` in a step. "auto" is what makes 512 MiB of fp32 logits
            (1024 tokens with 128K words; shorter batches are as without chunks); `None` is all tokens.
        layers: Dotted name of the `nn.ModuleList` of repeated layers; `None` finds it.
        attention: Attention kernel: "auto", "sdpa", "cudnn", "flash_attn" or "transformer_engine". "auto" tries
            those that compute the model's calls, for some milliseconds of the first step, and takes the fastest; plans
            keep it.
        schedule: "auto"; "layer" or "nest" to force the order of slices; "slice" runs the whole model on one slice
            after the other, so that nothing of the sequence's length stays on the device (data parallelism only, and
            ZeRO 0 to 2).
        plan: A saved plan to use instead of profiling.
        check_restored: Compare what comes back from the host and the disk with what left the device, and end the run in
            one line (`RestoredError`) where bytes differ: layer, tensor, tokens, how many NaN and Inf came. It covers
            all that the engine moves, not weights and optimizer state. Numbers are as without; steps take longer. For
            debugging.
        test_mode: Random delays and poisoned buffers, to bring out copy races. Slow; for tests.
        timeout: How long a process waits for the others in a collective before it gives up.
        process_group_backend: Of `torch.distributed`; `None` is NCCL on GPUs and gloo on CPUs.

    Raises:
        ValueError: A setting is wrong, or contradicts another.
    """

    strategy_name = "memo"

    def __init__(
        self,
        data_parallel_size: int | str = "auto",
        context_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        zero_stage: int = 0,
        context_parallel_method: str = "ring",
        ulysses_size: int | str = "auto",
        sequence_parallel: bool = True,
        loss_parallel: bool = True,
        tensor_parallel_plan: Mapping[str, str] | None = None,
        offload_state: bool = False,
        alpha: float | str = "auto",
        plan_memory: bool = True,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        spill_path: str | Path | None = None,
        spill_memory: str | int | None = None,
        slice_tokens: int | str = "auto",
        host_backed: str = "auto",
        storage: str = "alpha",
        loss_chunk_tokens: int | str | None = "auto",
        layers: str | None = None,
        attention: str = "auto",
        schedule: str = "auto",
        plan: str | Path | None = None,
        check_restored: bool = False,
        test_mode: TestMode | None = None,
        timeout: timedelta = default_pg_timeout,
        process_group_backend: str | None = None,
    ) -> None:
        self.config = MemoConfig(
            data_parallel_size=data_parallel_size,
            context_parallel_size=context_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            zero_stage=zero_stage,
            context_parallel_method=context_parallel_method,
            ulysses_size=ulysses_size,
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
            tensor_parallel_plan=tensor_parallel_plan,
            offload_state=offload_state,
            alpha=alpha,
            plan_memory=plan_memory,
            device_memory=device_memory,
            host_memory=host_memory,
            spill_path=None if spill_path is None else str(spill_path),
            spill_memory=spill_memory,
            slice_tokens=slice_tokens,
            host_backed=host_backed,
            storage=storage,
            loss_chunk_tokens=loss_chunk_tokens,
            layers=layers,
            attention=attention,
            schedule=schedule,
            plan=None if plan is None else str(plan),
            check_restored=check_restored,
        )
        check_available(attention)
        if plan is not None and not Path(plan).is_file():
            raise ValueError(f'plan="{plan}": no such file; give one that Plan.save wrote, or None to profile')
        if spill_path is not None:
            open_unnamed(Path(str(spill_path))).close()
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        # Not `_accelerator`: where that is set, Lightning tells of devices, and not that the strategy is another's.
        self._given_accelerator: Accelerator | None = None
        self.engine: Engine | None = None
        self._test_mode = test_mode
        self._planning: PlanAfterFirstStep | None = None
        self._callback: Callback | None = None
        self.memory: PlanMemory | None = None
        self._retry: OutOfMemoryRetry | None = None
        self._processes: Processes | None = None
        self._active = contextlib.ExitStack()

    def __repr__(self) -> str:
        # Fabric and `pytorch_lightning.Trainer` refuse this strategy and print it: the one place to say what to do.
        hint = "needs lightning.pytorch.Trainer, not Fabric or pytorch_lightning"
        return f"<MemoStrategy alpha={self.config.alpha}; {hint}>"

    @property
    def plan(self) -> Plan | None:
        """The plan in force; `None` until the first batch is over."""
        return None if self._planning is None else self._planning.plan

    def max_sequence_length(
        self,
        module: pl.LightningModule,
        batch_of: Callable[[int], Any] | None = None,
        *,
        low: int = 1024,
        high: int = 2**20,
        multiple_of: int = 1024,
        steps_per_trial: int = 3,
        results: str | Path | None = None,
        resume: bool = False,
        **trainer: Any,
    ) -> int:
        """Find the longest sequence that trains on this machine with these settings: by plan, and then by trying.

        Each length is tried by training steps in another process, on a copy of the module: running out of memory ends
        nothing, and weights, optimizers and random numbers stay as they are. Scripts that call it need the guard
        `if __name__ == "__main__":`. Memory is not planned meanwhile (`plan_memory`).

        Args:
            module: What is going to be trained; it, and `batch_of`, can be pickled.
            batch_of: Makes the batch for `training_step` of a number of tokens; `None`: random tokens, as `input_ids`
                and `labels`, `[1, tokens]`, for a module that holds a Hugging Face model.
            low: The least length of interest.
            high: The longest.
            multiple_of: Lengths are multiples of it.
            steps_per_trial: Optimizer steps at each length.
            results: A JSON file of all attempts, written after each.
            resume: Whether to go on with the attempts that `results` holds.
            trainer: Arguments of `Trainer`, like `accelerator` and `precision`; what is said there of steps, callbacks
                and loggers is not used.

        Returns:
            Tokens of a sequence. Those of all that were tried are printed as a table.

        Raises:
            ValueError: A setting is wrong, or nothing fits.
            RuntimeError: An attempt failed for another reason than memory.
        """
        from lightning_memo.trials.longest_sequence import find_longest  # the search is rarely used

        path = None if results is None else Path(results)
        span = (low, high, multiple_of)
        found = find_longest(
            MemoStrategy, self.config, module, batch_of, span, trainer,
            steps_per_trial=steps_per_trial, results=path, resume=resume,
        )  # fmt: skip
        return found.tokens

    # ---- what a trainer gives

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return self._given_accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        if self._given_accelerator is not None:
            raise ValueError("a MemoStrategy is for one Trainer: make a new MemoStrategy for the next one")
        self._given_accelerator = accelerator

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and str(plugin.precision).startswith("16-"):
            raise ValueError(f'precision="{plugin.precision}": give one of {", ".join(PRECISIONS)}')
        self._precision_plugin = plugin

    # ---- processes

    @property
    @override
    def distributed(self) -> bool:
        """Whether the run takes part in a process group; one process without ZeRO needs none."""
        return self.num_processes * self.num_nodes > 1 or self.config.zero_stage > 0 or self.config.offload_state

    @property
    def data_parallel_size(self) -> int:
        """Groups of processes that get different data."""
        return 1 if self._processes is None else self._processes.sizes.data

    @property
    def data_parallel_rank(self) -> int:
        """Which data this process gets; datasets that divide their data by themselves go by it."""
        return 0 if self._processes is None else self._processes.data_rank

    @override
    def _configure_launcher(self) -> None:
        if self.num_processes * self.num_nodes > 1:
            super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        if not self.distributed:
            resolve_sizes(self.config, 1)
            self.accelerator.setup_device(self.root_device)
            self.set_world_ranks()
            # One process reads all the data in the user's own order, as it would without this strategy.
            self.lightning_module.trainer._accelerator_connector.use_distributed_sampler = False
            return
        refuse_averaging(self.lightning_module.trainer.callbacks)
        self._setup_distributed()
        if self._processes is None:
            self._processes = Processes(self.config, self.root_device)
        self._device_mesh = self.lightning_module._device_mesh = self._processes.mesh
        if not isinstance(self.precision_plugin, MeshPrecision):
            self.precision_plugin = MeshPrecision(self.precision_plugin, self.root_device)

    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:  # type: ignore[override]
        if self.config.offload_state:
            return self.precision_plugin.tensor_init_context()
        # Weights are made on the device. The parent would make them on "meta", and fill them with random ones in setup.
        return Strategy.tensor_init_context(self, empty_init)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._processes is None or not isinstance(dataloader, DataLoader):
            return dataloader
        assert self.lightning_module is not None
        split = self.lightning_module.trainer._accelerator_connector.use_distributed_sampler
        seed_workers(dataloader, self._processes.seeding_rank(dataloader, split))
        return self._processes.divide_loader(dataloader, split, self.lightning_module.trainer.predicting)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        assert self.lightning_module is not None
        training = self.lightning_module.trainer.training
        if self.config.schedule == "slice" and self._processes is None and training:
            return batch  # each slice of it goes to the device when its turn comes
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._processes is not None:
            batch, layout = self._processes.divide_batch(batch, self.lightning_module.trainer.predicting)
            set_layout(layout)
        return batch

    @contextlib.contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        assert self.model is not None
        with accumulating(self.model, self.config.zero_stage):
            yield

    # ---- the model

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.model is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if not self.config.offload_state:
            self.model_to_device()
        if self._processes is not None:
            for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
                loop.inference_mode = False  # weights that FSDP2 gathers in it could not be trained afterwards
            self._divide(self._processes, self.model)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting or (self._processes is not None and self._processes.cuts_tokens):
            self._start_engine(trainer, self.model, fitting)

    def _divide(self, processes: Processes, model: nn.Module) -> None:
        steps = ("training_step", "validation_step", "test_step", "predict_step")
        assert isinstance(self.precision_plugin, MeshPrecision)
        if processes.sizes.tensor > 1:
            refuse_liger_shards(model)
        processes.divide_model(
            model,
            layers=lambda: list(find_layers(model, self.config.layers)[1]),
            mixed=self.precision_plugin.mixed,
            forwards=[name for name in steps if is_overridden(name, self.lightning_module)],
        )
        processes.attach(model, self._active)
        outside = self.config.context_parallel_size > 1 and self.config.host_backed in ("attention", "all")
        processes.prepare_batches(model, self._bounds, slices_outside=outside)

    def _bounds(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Where the slices of a batch's layers are going to end; nothing outside of training, where none are cut."""
        assert self.lightning_module is not None
        if self.engine is None or not self.lightning_module.trainer.training:
            return ()
        return self.engine.bounds_for(batch, tokens)

    def _start_engine(self, trainer: pl.Trainer, model: nn.Module, fitting: bool) -> None:
        _, layers = find_layers(model, self.config.layers)
        refuse_gradient_checkpointing(model, layers)
        if fitting and self.config.loss_chunk_tokens is not None:
            tell_fused_loss(model)
        processes = self._processes
        self.engine = engine = Engine(
            model,
            list(layers),
            self.root_device,
            cast(Attention | Literal["auto"], self.config.attention),
            self.config.schedule,
            self._test_mode,
            context=None if processes is None else processes.context_groups,
            shards=1 if processes is None else processes.sizes.shards,
            slice_tokens=None if self.config.slice_tokens == "auto" else int(self.config.slice_tokens),
            host_backed=cast(HostBacked, "all" if self.config.schedule == "slice" else self.config.host_backed),
            by_kind=self.config.storage == "kinds",
            spill_path=None if self.config.spill_path is None else Path(self.config.spill_path),
            ranks=None if processes is None else processes.ranks,
            check_restored=self.config.check_restored,
        )
        engine.attach()
        tell_resting(engine.resting)
        if not fitting:
            return
        self._chunk_loss(model)
        self._planning = PlanAfterFirstStep(engine, self.config, None if processes is None else processes.ranks)
        self.memory = PlanMemory(engine, self._planning) if self.config.plan_memory else None
        self._retry = OutOfMemoryRetry(engine, self._planning, self.memory, alone=processes is None)
        # Several processes would have to agree each time.
        host = WatchHost(engine, self._planning) if processes is None else None
        device = WatchDevice(engine, self._planning) if self.config.device_memory is not None else None
        if processes is None and trainer.lightning_module.automatic_optimization:
            engine.before_layer = functools.partial(self._end_on_sigterm, trainer, self._retry)
        # First of all callbacks, so that what the others do after a step lies outside of it.
        self._callback = Together([each for each in (host, self._planning, self.memory, device) if each is not None])
        trainer.callbacks.insert(0, self._callback)

    @staticmethod
    def _end_on_sigterm(trainer: pl.Trainer, retry: OutOfMemoryRetry) -> None:
        """End a training step that Lightning, which looks at signals between batches, would let go on for minutes.

        Raises:
            SIGTERMException: As Lightning raises after the batch.
        """
        if trainer.received_sigterm and trainer.training:
            retry.rewind()
            raise SIGTERMException

    def _chunk_loss(self, model: nn.Module) -> None:
        if self.config.loss_chunk_tokens is None:
            return
        sizes = None if self._processes is None else self._processes.sizes
        for undo in attach_chunked_loss(
            model,
            self.config.loss_chunk_tokens,
            shards=1 if sizes is None else sizes.shards,
            vocabulary_parts=sizes.tensor if sizes is not None and self.config.loss_parallel else 1,
            warn=rank_zero_warn,
        ):
            self._active.callback(undo)

    # ---- a step

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = functools.partial(super().training_step, *args, **kwargs)
        assert self.lightning_module is not None
        return step() if self._retry is None else self._retry.forward(self.lightning_module.trainer, step)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        backward = functools.partial(super().backward, closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        return backward() if self._retry is None else self._retry.backward(self.lightning_module.trainer, backward)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if self._retry is not None:
            assert self.lightning_module is not None
            closure = functools.partial(self._retry.step, self.lightning_module.trainer, closure)
        return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def _stop_engine(self) -> None:
        if self.memory is not None:
            self.memory.close(self.lightning_module)
        if self.engine is not None:
            self.engine.detach()
        if self.lightning_module is not None:
            callbacks = self.lightning_module.trainer.callbacks
            callbacks[:] = [callback for callback in callbacks if callback is not self._callback]
        set_layout(None)
        self._active.close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._stop_engine()
        explain_lost_process(exception, self.global_rank)
        if isinstance(exception, KeyboardInterrupt):
            # A notebook keeps it, and the frames that it went through would keep the activations of a step.
            exception.__traceback__ = None
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._stop_engine()
        super().teardown()
