"""The Lightning strategy: takes the settings, and connects the trainer with the engine and the planners."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memo.artifacts.plan import Plan
from lightning_memo.callbacks.lightning_run import LightningRun, RuntimeCallback
from lightning_memo.config import MemoConfig, checking_names
from lightning_memo.distributed import DistributedStrategy
from lightning_memo.engine import Engine, TestMode
from lightning_memo.engine.attention.mask_patterns import AllTokensNeeded
from lightning_memo.engine.modules.packed_rows import attach_documents
from lightning_memo.kernels import RngState
from lightning_memo.parallel.batches.token_layout import CurrentLayout
from lightning_memo.parallel.fsdp_units import forget_unfinished
from lightning_memo.parallel.pipeline.pipelined_model import micro_batch_rows
from lightning_memo.parallel.processes import Processes
from lightning_memo.parallel.ranks import explain_lost_process
from lightning_memo.runtime.memory_planner import MemoryPlanner
from lightning_memo.runtime.planned_slices import PlannedSlices, SlicesNeeded
from lightning_memo.runtime.start_engine import check_machine, refuse_float16, start_engine
from lightning_memo.runtime.training_runtime import TrainingRuntime
from lightning_memo.trials.longest_sequence import find_longest
from lightning_memo.utils.find_layers import NoLayersError
from lightning_memo.utils.messages import tell

_PLAN: Final = "lightning_memo_plan"  # entry of a checkpoint, as JSON


class MemoStrategy(DistributedStrategy):
    """Trains on sequences whose activations do not fit in GPU memory, by swapping and recomputing them.

    Use it as `Trainer(strategy=MemoStrategy(...))`, or with the default settings as `Trainer(strategy="memo")` after
    `import lightning_memo`. The first batch is profiled, and a plan is made from it. For a fraction alpha of the
    tokens, each layer's activations are then copied to host memory while later layers compute, and copied back before
    the backward pass needs them. For the other tokens they are recomputed, except those of attention (MEMO). Gradients
    match those of plain training up to rounding. The LightningModule stays as it is; its model may be built in
    `__init__` or in `configure_model`.

    With several processes (`Trainer(devices=8)`, torchrun, SLURM), the context, tensor and pipeline parallel sizes
    divide them into groups, and each group gets other data (data parallelism). The data loader gives whole batches.
    Each process keeps its part of the tokens, and the loss that a Hugging Face model returns is weighted by the number
    of tokens in all of them.

    The settings come in groups: parallelism, up to `tensor_parallel_plan`; memory, from `alpha` to `plan`; slices, from
    `slice_tokens` to `loss_chunk_tokens`; the model, `layers` and `attention`; debugging, `check_slices` and
    `test_mode`. The last two are for the process group.

    Args:
        context_parallel_size: Number of processes that share the tokens of a sequence.
        tensor_parallel_size: Number of processes that share the weights of each layer, and the vocabulary of the
            logits, which are then a DTensor.
        expert_parallel_size: Number of data- and context-parallel processes that share the experts of each mixture
            layer. Tokens are sent to the processes that hold their experts, and back.
        pipeline_parallel_size: Number of stages of a pipeline, each with some of the layers. The rows of a batch pass
            through them in micro-batches.
        virtual_pipeline_size: Number of blocks of layers of each stage. Micro-batches pass through all stages once for
            each, and stages wait less for each other (Megatron's interleaved pipelines).
        pipeline_schedule: "1f1b", or "zero_bubble" (experimental): stages compute gradients of weights while they would
            wait for each other, and have the memory for those that come later. For `zero_stage` 0 and 1.
        pipeline_layers: Number of layers of each block, in order. `None` divides them by their weights, and the head's.
        micro_batch_size: Number of rows of a batch that a stage of a pipeline computes at once.
        zero_stage: ZeRO stage, by FSDP2: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
        zero_shard_size: With `zero_stage=3`, number of neighbouring processes, such as those of a node, over which
            weights are sharded between forward and backward. `None` is all: that takes least memory.
        zero_communication: Experimental: how ZeRO sends weights and gradients: "none" as they are, "int8" both with 8
            bits, "int4" gradients with 4 bits, in blocks with a scale each (ZeRO++). Results are no longer exact.
        ulysses_size: Number of context-parallel processes that share attention by all-to-all (Ulysses); groups of them
            form a ring. 1 is ring attention, `context_parallel_size` is Ulysses alone, and "auto" is as many as the
            heads allow.
        sequence_parallel: Whether tensor-parallel processes also share the tokens between the blocks of a layer
            (Megatron's sequence parallelism).
        tensor_parallel_plan: Style of each weight by its dotted name, with `*` as a wildcard, like Hugging Face's
            `tp_plan`. `None` takes the model's own plan, or derives one from runs of the layers.
        alpha: Fraction of the tokens whose activations are swapped, from 0.0 to 1.0. "auto" solves a linear program
            over kinds of tensors where the layers of a single stack can be cut and `slice_tokens` is not given: it may
            also store single matrix products, keep tensors on the device, or run attention again instead of storing
            its output. Elsewhere, "auto" takes the fraction with the shortest step among those whose activations fit
            the memory budgets.
        device_memory: Device memory to plan with, as bytes or text like "40GiB". `None` measures the free memory.
        host_memory: Host memory of a node for swapped activations, shared by its processes, as bytes or text like
            "500GiB". `None` takes 90 % of the free memory, within the limits of the cgroup.
        disk_path: Folder on a local disk (NVMe) for the activations of layers that do not fit the host. They are
            written to an unnamed file, which disappears when the process ends.
        disk_memory: Disk space of a node for these activations, shared by its processes. `None` takes 90 % of the
            free space.
        offload_state: Whether parameters, gradients and optimizer state are kept on the host, where the optimizer runs.
        plan_memory: Whether each buffer of a step gets a fixed offset in one arena, in which requests that steps repeat
            do not fragment memory.
        plan: Path of a saved plan, which is used instead of profiling.
        slice_tokens: Largest number of tokens that run through a layer at once, like 65536 or "64K". "auto" cuts a
            layer's input at alpha only, and into more slices if a step in one process does not fit otherwise.
        stream_from_host: What is kept on the host in addition to swapped activations:
            "none": nothing else.
            "attention": keys and values. Slices are swapped one by one, and attention reads the keys and values of
            earlier slices from the host in blocks, so that a layer works on at most `slice_tokens` at once (FPDT).
            "hidden": also the gradients of keys and values, and the hidden states between layers.
            "model": all but one slice. The whole model runs on one slice after the other, so that nothing on the device
            grows with the length of the sequence; it needs data parallelism only, and ZeRO 0 to 2.
            "auto": "none", or "attention" if `slice_tokens` is set, attention is causal, layers can be cut, and the
                device has no room for keys and values (a single process) or is not asked (several processes).
        loss_chunk_tokens: Number of tokens whose logits exist at once. It applies to the loss of a Hugging Face model
            and to `F.cross_entropy(logits, ...)` in a training step. "auto" limits the logits to 512 MiB in fp32 (1024
            tokens with a vocabulary of 128K; shorter batches run without chunks). `None` computes all at once.
        layers: Dotted name of the `nn.ModuleList` (or `nn.ModuleDict`, `nn.Sequential`) of repeated layers, or a list
            of such names. `None` searches the model for all of them, and takes those with a quarter of the parameters
            of the largest, or more; with slices on the host or divided tokens, the largest.
        attention: Attention kernel: "auto", "sdpa", "cudnn", "flash_attn", "flash_attn_3", "flash_attn_4" or
            "transformer_engine". "auto" times the kernels that support the model's calls, for some milliseconds of the
            first step, and takes the fastest one. The plan records the choice.
        fused_kernels: Whether fewer kernels than modules call themselves compute parts of layers, which rounds
            differently: on GPUs, norms of transformers run by `torch.nn.functional.rms_norm`, and gated feed-forwards
            and rotary positions by kernels of Triton, if their class or function agrees with them. A linear module
            that LoRA adapts is one operation: the product with B adds to the output of the base layer, and adapters are
            cast, not activations.
        check_slices: Whether one layer is compared with itself in slices in steps 1, 2, 4, ..., 64, and in every 64th
            step, on an eighth of the tokens, at most 1024. If anything differs (queries, keys, values, outputs,
            gradients), a warning says so, and layers run as one slice from then on; where they cannot, the run ends.
            In the same steps, and without this setting in the first two of each plan, sums of recomputed tensors are
            compared with those of the forward; other values end the run.
        test_mode: Random delays of copies and poisoned buffers (filled with NaN), which reveal races. Slow; for tests.
        timeout: How long a process waits for the others in a collective before it gives up.
        process_group_backend: Backend of `torch.distributed`. `None` is NCCL on GPUs and gloo on CPUs; with
            `offload_state`, gloo serves what is on the host of GPUs.

    Raises:
        ValueError: A setting is wrong, or contradicts another one.
    """

    strategy_name = "memo"

    @checking_names
    def __init__(
        self,
        # parallelism
        context_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        virtual_pipeline_size: int = 1,
        pipeline_schedule: str = "1f1b",
        pipeline_layers: Sequence[int] | None = None,
        micro_batch_size: int = 1,
        zero_stage: int = 0,
        zero_shard_size: int | None = None,
        zero_communication: str = "none",
        ulysses_size: int | str = 1,
        sequence_parallel: bool = True,
        tensor_parallel_plan: Mapping[str, str] | None = None,
        # memory
        alpha: float | str = "auto",
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        disk_path: str | Path | None = None,
        disk_memory: str | int | None = None,
        offload_state: bool = False,
        plan_memory: bool = False,
        plan: str | Path | None = None,
        # slices
        slice_tokens: int | str = "auto",
        stream_from_host: str = "auto",
        loss_chunk_tokens: int | str | None = "auto",
        # model
        layers: str | Sequence[str] | None = None,
        attention: str = "auto",
        fused_kernels: bool = True,
        # debug
        check_slices: bool = True,
        test_mode: TestMode | None = None,
        # processes
        timeout: timedelta = default_pg_timeout,
        process_group_backend: str | None = None,
    ) -> None:
        config = MemoConfig.of(locals())
        check_machine(config)
        super().__init__(config, timeout, process_group_backend)
        self.engine: Engine | None = None
        self._test_mode = test_mode
        self._runtime: TrainingRuntime | None = None
        self._callback: RuntimeCallback | None = None
        self._copied_plan: Plan | None = None
        self._resumed_plan: str | None = None

    resets_states: Final = True
    """Whether states of recurrences begin anew in each document of a packed row, where they can."""

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a Trainer, such as a pickled one, trains anew. The engine holds threads, locks and device memory.
        own = dict.fromkeys(("engine", "_runtime", "_callback", "_processes", "_sigterm"))
        return super().__getstate__() | own | {"_copied_plan": self.plan}

    def __repr__(self) -> str:
        # Fabric and `pytorch_lightning.Trainer` refuse this strategy and print it. This is the place to say what to do.
        hint = "needs lightning.pytorch.Trainer, not Fabric or pytorch_lightning"
        return f"<MemoStrategy alpha={self.config.alpha}; {hint}>"

    @property
    def plan(self) -> Plan | None:
        """The plan in force; `None` until the first batch is over."""
        return self._copied_plan if self._runtime is None else self._runtime.plan

    @property
    def follows_plan(self) -> bool:
        """Whether steps run by `plan`, which the first one does not, nor those until its host memory is locked."""
        return self._runtime is not None and self._runtime.follows_plan

    @property
    def memory(self) -> MemoryPlanner | None:
        """The memory plan of the fit and its counters; `None` without `plan_memory`."""
        return None if self._runtime is None else self._runtime.memory

    def max_sequence_length(
        self,
        module: pl.LightningModule,
        batch_of: Callable[[int], Any] | None = None,
        *,
        low: int | str = 1024,
        high: int | str = "1M",
        multiple_of: int | str = 1024,
        steps_per_trial: int = 3,
        results: str | Path | None = None,
        resume: bool = False,
        **trainer: Any,
    ) -> int:
        """Find the longest sequence that trains on this machine with these settings, by planning and trying.

        Each length is tried by training steps on a copy of the module in another process. Running out of memory is
        therefore harmless, and weights, optimizers and random numbers stay as they are. Scripts that call this method
        need the guard `if __name__ == "__main__":`. Memory is not planned in the trials (`plan_memory`).

        Args:
            module: The module to train. It has to be picklable, and so has `batch_of`.
            batch_of: Function that takes a number of tokens and returns a batch for `training_step`. `None` gives
                random tokens as `input_ids` and `labels`, `[1, tokens]`, to a module that holds a Hugging Face model.
            low: Shortest length to consider, in tokens, like 131072, "128K" or "1M".
            high: Longest length to consider, in tokens.
            multiple_of: Lengths are multiples of this number.
            steps_per_trial: Number of optimizer steps at each length.
            results: JSON file to which all attempts are written, after each of them.
            resume: Whether to continue with the attempts in `results`.
            trainer: Arguments of `Trainer`, for example `accelerator` and `precision`. Arguments for steps, callbacks
                and loggers are ignored.

        Returns:
            The number of tokens of the longest sequence. A table of all attempts is printed.

        Raises:
            ValueError: A setting is wrong, or not even `low` tokens fit.
            RuntimeError: An attempt failed for another reason than a lack of memory.
        """
        path = None if results is None else Path(results)
        span = (low, high, multiple_of)
        found = find_longest(
            MemoStrategy, self.config, module, batch_of, span, trainer,
            steps_per_trial=steps_per_trial, results=path, resume=resume,
        )  # fmt: skip
        return found.tokens

    # ---- the life of the engine

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.model is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if not self.config.offload_state:
            self.model_to_device()
        self._divide_model(self.model)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting and not self.config.offload_state:
            _optimizers_to_device(self.optimizers, self.root_device)
        if fitting:
            self._runtime = None  # that of an earlier fit has another plan
        runs_layers = fitting or (self._processes is not None and self._processes.cuts_tokens)
        if not (runs_layers and self._start_engine(trainer, self.model, fitting)):
            layout = CurrentLayout() if self._processes is None else self._processes.current_layout
            for undo in attach_documents(self.model, layout):  # which an engine does, too
                self._divided.callback(undo)

    def _start_engine(self, trainer: pl.Trainer, model: nn.Module, fitting: bool) -> bool:
        """Start the engine. Returns whether the model has layers for it."""
        try:
            self.engine = start_engine(model, self.config, self.root_device, self._processes, fitting, self._test_mode)
        except NoLayersError as error:
            if self.config.needs_layers:
                raise
            tell(f"trains plainly, as without this strategy: {error.why}.")
            return False
        if fitting:
            if not str(trainer.precision).endswith("-mixed"):
                for dtype in {p.dtype for layer in self.engine.layers for p in layer.parameters()}:
                    refuse_float16(dtype)
            self._start_runtime(trainer, model, self.engine)
        return True

    def _start_runtime(self, trainer: pl.Trainer, model: nn.Module, engine: Engine) -> None:
        run = LightningRun(trainer)
        self._runtime = TrainingRuntime(engine, model, self.config, self._processes, run)
        if (processes := self._processes) is not None:
            slices = PlannedSlices(engine, self.config, processes.ranks, run, lambda: processes.may_begin_again)
            engine.probe = slices.probe
            self._train_pipeline(processes, engine, self._runtime)
        elif run.automatic_optimization:
            engine.before_layer = functools.partial(self._end_on_sigterm, trainer, self._runtime)
        self._callback = RuntimeCallback(self._runtime, lambda: self._resumed_plan)
        trainer.callbacks.insert(0, self._callback)

    @staticmethod
    def _end_on_sigterm(trainer: pl.Trainer, runtime: TrainingRuntime) -> None:
        """End a long training step on SIGTERM. Lightning looks at signals only between batches.

        Raises:
            SIGTERMException: As Lightning raises it after a batch.
        """
        if trainer.received_sigterm and trainer.training:
            runtime.abandon_batch()
            raise SIGTERMException

    @override
    def _may_need_padding(self) -> bool:
        return self.engine is None or self.engine.sharing.gathered.may_need_padding

    @override
    def _slice_bounds(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Where the slices of a batch end; empty outside of training, where nothing is cut into slices."""
        assert self.lightning_module is not None
        if self.engine is None or not self.lightning_module.trainer.training:
            return ()
        if self.config.pipeline_parallel_size > 1:
            batch = micro_batch_rows(batch, self.config.micro_batch_size)
        return self.engine.bounds_for(batch, tokens)

    def _stop_engine(self) -> None:
        if self._runtime is not None:
            self._runtime.close(self.lightning_module)
        if self.engine is not None:  # an evaluation after the fit has an engine of its own
            self.engine.detach()
        if self.lightning_module is not None:
            callbacks = self.lightning_module.trainer.callbacks
            callbacks[:] = [callback for callback in callbacks if callback is not self._callback]
        self._release_model()
        self._resumed_plan = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._stop_engine()
        explain_lost_process(exception, self.global_rank)
        if isinstance(exception, KeyboardInterrupt):
            # A notebook keeps the exception, and the frames in its traceback would keep the activations of a step.
            exception.__traceback__ = None
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._stop_engine()
        super().teardown()

    # ---- the plan in checkpoints

    @property
    def _keeps_plan(self) -> bool:
        """Whether checkpoints contain the plan. The stages of a pipeline have different ones."""
        return self.config.pipeline_parallel_size == 1

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        # A resumed run computes the same numbers only with the same plan: another alpha rounds differently.
        plan = self._resumed_plan if self.plan is None else self.plan.to_json()
        if plan is not None and self._keeps_plan:
            checkpoint = checkpoint | {_PLAN: plan}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._keeps_plan:
            # A search, like that of the batch size, saves and loads a checkpoint before there is a plan.
            self._resumed_plan = checkpoint.get(_PLAN, self._resumed_plan)
        return checkpoint

    # ---- a step

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = super().training_step
        self._in_training_step = True
        try:
            if self._processes is None or not self._processes.may_begin_again:
                return self._forward(functools.partial(step, *args, **kwargs))
            return self._first_forward(self._processes, step, *args, **kwargs)
        finally:
            self._in_training_step = False

    def _forward(self, step: Callable[[], Any]) -> Any:
        return step() if self._runtime is None else self._runtime.forward(step)

    def _first_forward(
        self, processes: Processes, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the first training step; once more, with a batch that is divided in another way, if that is necessary.

        What the user's training step does besides calling the model, it then does twice.
        """
        state = RngState.capture(self.root_device)
        try:
            output = self._forward(functools.partial(step, batch, *args, **kwargs))
        except AllTokensNeeded:
            if not processes.may_divide_layers:
                raise
            self._begin_again(state)
            batch = processes.divide_layers()
        except SlicesNeeded as needed:
            assert self.engine is not None
            self._begin_again(state)
            self.engine.cut(needed.slice_tokens, needed.stream_from_host)
            batch = processes.divide_slices()
        else:
            processes.keep_division()
            return output
        return self._forward(functools.partial(step, batch, *args, **kwargs))

    def _begin_again(self, state: RngState) -> None:
        """Return to the state before the first training step, none of whose layers has run on all its tokens."""
        assert self.model is not None and self.engine is not None
        forget_unfinished(self.model)
        self.engine.unload()
        if self._runtime is not None:
            self._runtime.begin_again()
        state.restore()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        backward = functools.partial(super().backward, closure_loss, optimizer, *args, **kwargs)
        return backward() if self._runtime is None else self._runtime.backward(backward)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if self._runtime is not None:
            closure = functools.partial(self._runtime.step, closure)
        stepped = super().optimizer_step(optimizer, closure, *args, **kwargs)
        if self._processes is not None and self.model is not None:
            self._processes.after_step(self.model)
        return stepped
