"""Trains in a loop of the user's own, whose run, processes and batches it shows to the runtime."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from lightning_memo.artifacts.plan import Plan
from lightning_memo.config import MemoConfig, checking_names
from lightning_memo.engine import Engine, TestMode
from lightning_memo.engine.modules.layer_forward import replace_forward, untraced
from lightning_memo.engine.recurrence import may_hand_states
from lightning_memo.loss.lazy_logits import LazyLogits
from lightning_memo.parallel.parallel_sizes import resolve_sizes
from lightning_memo.parallel.processes import Processes
from lightning_memo.runtime.memory_planner import MemoryPlanner
from lightning_memo.runtime.start_engine import check_machine, refuse_float16, refuse_fp8_at_calls, start_engine
from lightning_memo.runtime.training_runtime import TrainingRuntime
from lightning_memo.utils.around_forward import is_in_backward, why_without_hooks
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import select_layers


class MemoLoop(contextlib.AbstractContextManager["MemoLoop"]):
    """Trains on sequences whose activations do not fit in GPU memory, in a PyTorch loop without Lightning.

    Inside the context, the loop stays as it is: call the model, call `backward`, step the optimizer.

        with MemoLoop(model, optimizer) as memo:
            for batch in loader:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    The first batch is profiled, and a plan is made from it, as by :class:`~lightning_memo.MemoStrategy`, whose settings
    these are. The model has to be on its device already. Gradient accumulation, autocast, several forwards before a
    backward, several optimizers and forwards under `torch.no_grad()` need nothing more. `memo.step(...)` in place of
    forward and backward can also run a batch again whose backward ran out of memory.

    Args:
        model: The model that the loop calls.
        optimizer: Its optimizer, or a list of them.
        output_dir: Folder for `memo_plan.json`. `None` writes no file.
        context_parallel_size: Number of neighbouring processes that share the tokens of a row. They give the model the
            same rows, get its outputs of whole rows, and compute the same loss; gradients have to be averaged over all
            processes (`DistributedDataParallel`, FSDP2). Forwards without gradients in evaluation mode, and those with
            a key-value cache, are not divided.
        ulysses_size: As for `MemoStrategy`, like all that follows.

    Raises:
        ValueError: A setting is wrong, or contradicts another one.
    """

    @checking_names
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        output_dir: str | Path | None = None,
        # parallelism
        context_parallel_size: int = 1,
        ulysses_size: int | str = 1,
        # memory
        alpha: float | str = "auto",
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        disk_path: str | Path | None = None,
        disk_memory: str | int | None = None,
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
    ) -> None:
        self.config = self.check(locals())
        if not isinstance(model, nn.Module):
            raise ValueError(f"model: got {type(model).__name__}; give the torch.nn.Module that the loop calls")
        self._model = model._modules.get("_original_module") or model  # Fabric's wrapper passes attributes on to it
        given: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        # Those of Accelerate and Fabric are wrapped around PyTorch's.
        self._optimizers: list[Optimizer] = [getattr(each, "optimizer", each) for each in given]
        if not self._optimizers or not all(isinstance(each, Optimizer) for each in self._optimizers):
            kinds = ", ".join(type(each).__name__ for each in given) or "none"
            raise ValueError(f"optimizer: got {kinds}; give the torch.optim.Optimizer of the model, or a list of them")
        self._output_dir, self._test_mode = output_dir, test_mode
        self._runtime: TrainingRuntime | None = None
        self._batches: _LoopBatches | None = None
        self._divided = contextlib.ExitStack()
        self._ended = False

    @staticmethod
    def check(given: Mapping[str, Any]) -> MemoConfig:
        """Check settings before there is a model.

        Args:
            given: Values by name. Names that are no settings of `MemoStrategy` are ignored.

        Returns:
            The settings, with defaults for those that are not given.

        Raises:
            ValueError: A setting is wrong, contradicts another one, or needs what this machine lacks.
        """
        if given.get("stream_from_host") == "model":
            raise ValueError(
                'stream_from_host="model" runs whole training steps, which are the loop\'s here: use "hidden", or use '
                "MemoStrategy"
            )
        config = MemoConfig.of(given)
        check_machine(config)
        return config

    @property
    def is_active(self) -> bool:
        """Whether the context has been entered, and has not been left."""
        return self._runtime is not None and not self._ended

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of processes that get different rows."""
        return resolve_sizes(self.config, dist.get_world_size() if dist.is_initialized() else 1).data

    @property
    def data_parallel_rank(self) -> int:
        """Index of the rows that this process gets, for example as the rank of a `DistributedSampler`."""
        return dist.get_rank() // self.config.context_parallel_size if dist.is_initialized() else 0

    @property
    def plan(self) -> Plan | None:
        """The plan in force; `None` until the first batch is over."""
        return None if self._runtime is None else self._runtime.plan

    @property
    def follows_plan(self) -> bool:
        """Whether steps run by `plan`, which the first one does not, nor those until its host memory is locked."""
        return self._runtime is not None and self._runtime.follows_plan

    @property
    def memory(self) -> MemoryPlanner | None:
        """The memory plan and its counters; `None` without `plan_memory`."""
        return None if self._runtime is None else self._runtime.memory

    def __enter__(self) -> Self:
        if self._runtime is not None:
            raise ValueError("a MemoLoop is entered once: make a new one for the next loop")
        # Lightning sets it when it is imported, from the environment of the process.
        if not hasattr(rank_zero_only, "rank"):
            rank_zero_only.rank = dist.get_rank() if dist.is_initialized() else 0  # type: ignore[attr-defined]
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        processes = _processes_of(self.config, device)
        with contextlib.ExitStack() as divided:
            if processes is not None and processes.sizes.context > 1:
                self._divide(processes, divided)
            engine = start_engine(self._model, self.config, device, processes, True, self._test_mode)
            self._divided = divided.pop_all()
        run = _LoopRun(self._model, self._optimizers, self._output_dir)
        self._runtime = TrainingRuntime(engine, self._model, self.config, processes, run)
        self._batches = _LoopBatches(self._model, engine, self._optimizers, self._runtime, run)
        try:
            self._runtime.start()
            self._batches.attach()
        except BaseException:
            self._stop()
            raise
        return self

    def _divide(self, processes: Processes, until: contextlib.ExitStack) -> None:
        """Divide the tokens of the model's forwards among the processes.

        Raises:
            ValueError: They cannot be divided.
        """
        model, config = self._model, self.config
        layers = functools.partial(select_layers, model, config.layers, config.one_stack)
        refuse_fp8_at_calls(model, layers, config.why_not_fp8, until)

        def bounds_of(batch: int, tokens: int) -> tuple[int, ...]:
            assert self._runtime is not None and self._batches is not None
            if not torch.is_grad_enabled():
                return ()
            self._batches.end_finished()  # before the plan is read: hooks run before the forward that does it
            return self._runtime.engine.bounds_for(batch, tokens)

        def may_need_padding() -> bool:
            assert self._runtime is not None
            return self._runtime.engine.sharing.gathered.may_need_padding

        states = may_hand_states(model)
        processes.attach_rows(model, layers, bounds_of, config.streams, states, may_need_padding, until)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._runtime is not None and self._batches is not None
        try:
            if error is None:
                self._batches.end()
            else:
                self._runtime.fail()
        finally:
            self._stop()
        advised = self._runtime.advise(error) if isinstance(error, torch.OutOfMemoryError) else None
        if advised is not None:
            raise advised from error

    def _stop(self) -> None:
        assert self._runtime is not None and self._batches is not None
        self._ended = True
        self._batches.detach()
        self._runtime.close(self._model)
        self._divided.close()

    def step(self, forward: Callable[[], Tensor], backward: Callable[[Tensor], object] = Tensor.backward) -> Tensor:
        """Run the forward and the backward of a batch. If the device runs out of memory, they run again with less.

        Args:
            forward: Computes the loss, a scalar. It is called again after a lack of memory.
            backward: Runs the backward of the loss, for example `accelerator.backward`.

        Returns:
            The loss.

        Raises:
            ValueError: The context has not been entered.
            torch.OutOfMemoryError: The device has too little memory, even with every layer recomputed.
        """
        if self._batches is None or self._ended:
            raise ValueError("MemoLoop.step is called inside of `with MemoLoop(model, optimizer) as memo:`")
        return self._batches.retried(forward, backward)


_BITS: Final = {torch.float64: "64", torch.float32: "32", torch.bfloat16: "bf16"}


class _LoopRun:
    """Implements :class:`~lightning_memo.runtime.training_run.TrainingRun` for a loop.

    Args:
        model: The model that is trained.
        optimizers: Its optimizers.
        output_dir: Folder for the plan; `None` to write none.

    Attributes:
        step: Number of optimizer steps done so far.
        batch: Number of batches begun so far.
        precision: The precision of the layers, known once the first layer has run.
    """

    framework_module = None
    gradient_clip = None
    automatic_optimization = True
    logs_now = False

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], output_dir: str | Path | None) -> None:
        self.model, self.optimizers = model, optimizers
        self._folder = None if output_dir is None else Path(output_dir)
        self.step = self.batch = 0
        self.precision = ""
        self._since_step, self._stepped = 0, False

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def processes(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def accumulated_batches(self) -> int:
        # A batch without an optimizer step tells that there will be another one before it.
        return self._since_step if self._stepped else self._since_step + 1

    def begin_batch(self) -> None:
        """Count a batch."""
        self.batch += 1
        self._since_step = 1 if self._stepped else self._since_step + 1
        self._stepped = False

    def count_step(self) -> None:
        """Count an optimizer step."""
        self.step += 1
        self._stepped = True

    def note_precision(self, dtype: torch.dtype, device_type: str) -> None:
        """Note in which precision a layer runs.

        Args:
            dtype: Type of the weights.
            device_type: Type of the device.

        Raises:
            ValueError: The precision is float16.
        """
        mixed = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if mixed else dtype
        refuse_float16(dtype)
        self.precision = f"{_BITS.get(dtype, str(dtype))}-{'mixed' if mixed else 'true'}"

    def folder(self) -> Path | None:
        return self._folder

    def note_logged(self) -> Callable[[], None]:
        return lambda: None

    def log(self, metrics: Mapping[str, float]) -> None:
        raise AssertionError("a loop has no loggers")


def _processes_of(config: MemoConfig, device: torch.device) -> Processes | None:
    """Return the processes of the default group; `None` if there is only this one. All processes call it.

    Raises:
        ValueError: The context-parallel size does not divide their number.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        resolve_sizes(config, 1)
        return None
    processes = Processes(config, device, default_pg_timeout)
    # Whether the loop shards its state is not known; bytes are measured.
    processes.ranks = replace(processes.ranks, parallel=f"{processes.ranks.parallel} of a loop")
    return processes


class _LoopBatches:
    """Drives the runtime by what a loop calls: the model, a backward, and the optimizers.

    A batch begins with a forward of the model that builds a graph. It ends when all optimizers have stepped after its
    backward, or before the next forward after a backward. A batch may have several forwards, for example of chosen and
    of rejected answers. Forwards under `torch.no_grad()` belong to no batch.

    Args:
        model: The model, to which the engine is attached.
        engine: The engine.
        optimizers: Its optimizers.
        runtime: The runtime of the run.
        run: The run.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        optimizers: Sequence[Optimizer],
        runtime: TrainingRuntime,
        run: _LoopRun,
    ) -> None:
        self._model, self._engine, self._optimizers, self._runtime, self._run = model, engine, optimizers, runtime, run
        self._attached = contextlib.ExitStack()
        self._is_open = False
        self._forwards = 0  # of this batch
        self._backwards = 0
        self._in_backward = self._had_backward = False
        self._retried_outside = False  # inside of `retried`, which runs all forwards of a batch again
        self._have_stepped: set[int] = set()

    def attach(self) -> None:
        """Begin to watch the model and the optimizers."""
        forward = untraced(self._forward, self._engine.tell_of_compiled)
        self._attached.callback(replace_forward(self._model, forward))
        self._attached.callback(self._engine.layers[0].register_forward_pre_hook(_OwnHook(self._note_precision)).remove)
        for optimizer in self._optimizers:
            self._attached.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            self._attached.callback(optimizer.register_step_post_hook(self._after_step).remove)

    def detach(self) -> None:
        """Stop watching."""
        self._attached.close()

    def retried(self, forward: Callable[[], Tensor], backward: Callable[[Tensor], object]) -> Tensor:
        """Run the forward and the backward of a batch, again if they run out of device memory.

        Args:
            forward: Computes the loss.
            backward: Runs the backward of the loss.
        """
        self._begin()

        def attempt() -> Tensor:
            self._forwards, self._in_backward, self._had_backward = 0, False, False
            loss = self._runtime.forward(forward)
            self._runtime.backward(lambda: backward(loss))
            return loss

        self._retried_outside = True
        try:
            return self._runtime.step(attempt)
        except BaseException:
            self._runtime.fail()
            raise
        finally:
            self._retried_outside = False

    def end_finished(self) -> None:
        """End the present batch if its backward is over. The plan may be another one then."""
        if self._had_backward and not is_in_backward():
            self.end()

    def end(self) -> None:
        """End the present batch, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        self._end_backward()
        self._runtime.end_batch()

    # ---- what the loop calls

    def _forward(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or is_in_backward() or why_without_hooks():
            return forward(*args, **kwargs)
        if not self._retried_outside:
            self._begin()
        self._forwards += 1
        if self._retried_outside or self._forwards > 1:  # the graphs of earlier forwards stay as they are
            output = forward(*args, **kwargs)
        else:
            try:
                output = self._runtime.forward(lambda: forward(*args, **kwargs))
            except BaseException:  # the loop may catch it, and nobody tells of the end of a Trainer's training then
                self._runtime.fail()
                raise
        begin = weakref.WeakMethod(self._begin_backward)  # a graph may outlive the loop

        def begins(gradients: tuple[Tensor, ...]) -> None:
            if (call := begin()) is not None:
                call()

        for t in tree_leaves(output):
            t = t.hidden_states if isinstance(t, LazyLogits) else t
            if isinstance(t, Tensor) and t.grad_fn is not None:
                t.grad_fn.register_prehook(begins)
        return output

    def _note_precision(self, layer: nn.Module, inputs: Any) -> None:
        weight = next(layer.parameters(), None)
        if weight is not None:
            self._run.note_precision(weight.dtype, weight.device.type)

    def _begin(self) -> None:
        self.end_finished()
        if not self._is_open:
            self._is_open, self._forwards = True, 0
            self._in_backward = self._had_backward = False
            self._have_stepped.clear()
            self._run.begin_batch()
            self._runtime.begin_batch()

    def _begin_backward(self) -> None:
        """Gradients have reached an output of the model."""
        if self._is_open and not self._in_backward:
            self._in_backward = self._had_backward = True
            self._runtime.before_backward(None)
            self._backwards += 1
            end = _EndOfBackward(weakref.WeakMethod(self._fail_backward), self._backwards)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _fail_backward(self, number: int) -> None:
        """A backward has ended with an exception, which the loop may catch."""
        if self._in_backward and number == self._backwards:  # on a GPU, autograd's thread may tell late
            self._runtime.fail()

    def _end_backward(self) -> None:
        if self._in_backward:
            self._in_backward = False
            self._runtime.after_backward()

    def _before_step(self, *_: Any) -> None:
        if not is_in_backward():  # some optimizers step while gradients are computed
            self._end_backward()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._run.count_step()
        if self._run.step == 1 and self._run.batch == 0:
            rank_zero_warn(
                "lightning_memo: all layers are recomputed, because an optimizer has stepped, and "
                f"{class_name(self._model)}, which MemoLoop was given, has not been called with gradients: give it the "
                "module that the loop calls"
            )
        self._have_stepped.add(id(optimizer))
        stepped = len(self._have_stepped) == len(self._optimizers)
        if stepped and not is_in_backward():
            self.end()


class _EndOfBackward:
    """A callback for the end of a backward. PyTorch drops it without a call if the backward fails.

    Args:
        failed: Called with the number then.
        number: Number of the backward.
    """

    def __init__(self, failed: weakref.WeakMethod[Callable[[int], None]], number: int) -> None:
        self._failed, self._number, self._has_ended = failed, number, False

    def __call__(self) -> None:
        self._has_ended = True

    def __del__(self) -> None:
        if not self._has_ended and (failed := self._failed()) is not None:
            failed(self._number)


class _OwnHook:
    """A hook on a module that its copies, saved ones too, have without an effect."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., None]]]:
        return _OwnHook, (_ignored,)


def _ignored(*_: Any) -> None:
    """Does nothing."""
