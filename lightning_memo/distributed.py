"""The processes of a run: the device mesh, and what each process gets of the model and of the data."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    ReduceOp,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo.callbacks.end_on_sigterm import SIGTERM_STATUS, EndOnSigterm
from lightning_memo.checkpointing import CheckpointingStrategy
from lightning_memo.config import PRECISIONS, MemoConfig
from lightning_memo.data.resumable_loader import seed_workers, shield_workers
from lightning_memo.engine import Engine
from lightning_memo.engine.fp8_modules import keep_quantized_weights
from lightning_memo.engine.modules.layer_forward import replace_forward, warn_of_uncompiled
from lightning_memo.engine.recurrence import may_hand_states
from lightning_memo.parallel.batches.same_batches import check_even
from lightning_memo.parallel.fsdp_units import accumulating
from lightning_memo.parallel.mesh_precision import MeshPrecision
from lightning_memo.parallel.parallel_sizes import resolve_sizes
from lightning_memo.parallel.processes import Processes
from lightning_memo.parallel.sharded_checkpoint import check_groups
from lightning_memo.runtime.stage_layers import StageLayers
from lightning_memo.runtime.start_engine import (
    refuse_engine_shards,
    refuse_fp8_at_calls,
    refuse_fp8_weights,
    refuse_liger_shards,
)
from lightning_memo.runtime.training_runtime import TrainingRuntime
from lightning_memo.utils.find_layers import NoLayersError, select_layers

T = TypeVar("T")


class DistributedStrategy(CheckpointingStrategy):
    """Divides the model, the batches and the data loaders among the processes of a run, if there are several.

    Args:
        config: The settings of the strategy.
        timeout: How long a process waits for the others in a collective.
        process_group_backend: Backend of `torch.distributed`; `None` is NCCL on GPUs and gloo on CPUs, or both if the
            state is offloaded.
    """

    def __init__(self, config: MemoConfig, timeout: timedelta, process_group_backend: str | None) -> None:
        super().__init__()
        # A name of its own, because with `_accelerator` set, Lightning's refusal of this strategy names devices only.
        self._given_accelerator: Accelerator | None = None
        self.config = config
        self.num_nodes = 1
        self._timeout, self._process_group_backend = timeout, process_group_backend
        self._processes: Processes | None = None
        self._divided = contextlib.ExitStack()
        self._in_training_step = False
        self._sigterm: EndOnSigterm | None = None

    @abstractmethod
    def _slice_bounds(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Where the slices of a training batch end.

        Args:
            batch: Number of sequences.
            tokens: Number of tokens of each that this process holds between the blocks of a layer.
        """

    @abstractmethod
    def _may_need_padding(self) -> bool:
        """Whether a module may relate tokens to those of the padding, or none has run yet."""

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
        for name in ("weights_dtype", "fallback_compute_dtype"):
            if getattr(plugin, name, None) is torch.float16:
                raise ValueError(
                    f"{type(plugin).__name__} with {name}=torch.float16 is not supported: give torch.bfloat16"
                )
        self._precision_plugin = plugin

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._given_module

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        # The Trainer sets it before it asks whether the module is compiled, which it refuses beside most strategies.
        if module is not None and module._compiler_ctx is not None:
            warn_of_uncompiled([type(to_uncompiled(module)).__name__])
        self._given_module = module

    # ---- the processes

    @property
    def num_processes(self) -> int:
        """Number of processes of this node."""
        return len(self.parallel_devices or ())

    @property
    def _alone(self) -> bool:
        return self.num_processes * self.num_nodes <= 1

    @property
    @override
    def distributed(self) -> bool:
        """Whether the run takes part in a process group; a single process without ZeRO needs none."""
        return not self._alone or self.config.zero_stage > 0 or self.config.offload_state

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes, which Lightning asks before it divides, and shuffles, the data."""
        return not self._alone

    # A single process is the first of one, as without this strategy, also where a launcher has started others.

    @property
    @override
    def global_rank(self) -> int:
        return 0 if self._alone else super().global_rank

    @property
    @override
    def local_rank(self) -> int:
        return 0 if self._alone else super().local_rank

    @property
    @override
    def node_rank(self) -> int:
        return 0 if self._alone else super().node_rank

    @property
    @override
    def world_size(self) -> int:
        return 1 if self._alone else super().world_size

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices
        return self.parallel_devices[self.local_rank]

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's messages the rank of this process."""
        if self._alone or self.cluster_environment is None:
            return
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank

    @property
    def _communicates(self) -> bool:
        """Whether there are other processes, and they can be reached by now."""
        return self.distributed and dist.is_initialized()

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._communicates:
            on_gpu = dist.get_backend() == "nccl"
            dist.barrier(device_ids=[self.root_device.index] if on_gpu else None)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if not self._communicates:
            return obj
        sent = [obj]
        dist.broadcast_object_list(sent, src)
        return sent[0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        if not (self._communicates and isinstance(tensor, Tensor)):
            return tensor
        return _sync_ddp_if_available(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, group, sync_grads) if self._communicates else tensor

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of processes that get different data."""
        return 1 if self._processes is None else self._processes.sizes.data

    @property
    def data_parallel_rank(self) -> int:
        """Index of the data that this process gets. Datasets that divide their data themselves use it."""
        return 0 if self._processes is None else self._processes.data_rank

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.distributed and self.precision_plugin.precision == "64-true":  # the processes are known only now
            raise ValueError(
                'precision="64-true" is for one process without zero_stage and offload_state: others reduce gradients '
                f"in 32 bits; give one of {', '.join(p for p in PRECISIONS if p != '64-true')}"
            )
        if not (self._alone or self.cluster_environment.creates_processes_externally):
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @property
    def _backend(self) -> str:
        if self._process_group_backend is not None:
            return self._process_group_backend
        if self.config.offload_state and self.root_device.type == "cuda":
            return "cpu:gloo,cuda:nccl"  # weights and gradients on the host may be gathered there
        return _get_default_process_group_backend_for_device(self.root_device)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if not self.distributed:
            resolve_sizes(self.config, 1)
            return
        assert self.lightning_module is not None and self.cluster_environment is not None
        _refuse_averaging(self.lightning_module.trainer.callbacks)
        reset_seed()
        self.set_world_ranks()
        self._warn_of_unused_io()
        several = self.num_processes * self.num_nodes > 1
        self._sigterm = EndOnSigterm(self.lightning_module.trainer) if several else None
        _init_dist_connection(
            self.cluster_environment,
            self._backend,
            self.global_rank,
            self.world_size,
            timeout=self._timeout,
            device_id=None if self.root_device.type == "cpu" else self.root_device,
        )
        if self._sigterm is not None:
            self._sigterm.together.join(dist.distributed_c10d._get_default_store(), self.global_rank, self.world_size)
        if self._processes is None:
            self._processes = Processes(self.config, self.root_device, self._timeout)
        self.lightning_module._device_mesh = self._processes.mesh
        if not isinstance(self.precision_plugin, MeshPrecision):
            self.precision_plugin = MeshPrecision(self.precision_plugin, self.root_device, self.config.zero_stage)

    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:  # type: ignore[override]
        if self.config.offload_state:
            return self.precision_plugin.tensor_init_context()
        return super().tensor_init_context(empty_init)

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
        shield_workers(dataloader)
        return self._processes.shard_loader(dataloader, split, self.lightning_module.trainer.predicting)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        assert self.lightning_module is not None
        training = self.lightning_module.trainer.training
        if self.config.stream_from_host == "model" and self._processes is None and training:
            return batch  # each slice of the batch goes to the device when its turn comes
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._processes is not None:
            batch = self._processes.shard_batch(batch, training, self.lightning_module.trainer.predicting)
        return batch

    @override
    def on_validation_start(self) -> None:
        self._check_even("validate", lambda trainer: trainer.num_val_batches)

    @override
    def on_test_start(self) -> None:
        self._check_even("test", lambda trainer: trainer.num_test_batches)

    def _check_even(self, loop: str, batches: Callable[[Trainer], Sequence[float]]) -> None:
        """Refuse loops whose loaders, divided by the user, have other numbers of batches in other processes.

        Raises:
            ValueError: They have: all processes compute the loss of a batch together.
        """
        if self._processes is not None and self.lightning_module is not None:
            check_even(loop, sum(batches(self.lightning_module.trainer)), self._processes.ranks)

    @contextlib.contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        assert self.model is not None
        with accumulating(self.model, self.config.zero_stage):
            yield

    def _divide_model(self, model: nn.Module) -> None:
        """Shard the model among the processes; does nothing if there is only one.

        Raises:
            ValueError: The model cannot be sharded as the settings demand.
        """
        processes = self._processes
        if processes is None:
            return
        steps = ("training_step", "validation_step", "test_step", "predict_step")
        assert isinstance(self.precision_plugin, MeshPrecision) and self.lightning_module is not None
        trainer = self.lightning_module.trainer
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # weights that FSDP2 gathers in inference mode could not be trained afterwards
        refuse_fp8_weights(model)
        if processes.sizes.tensor > 1:
            refuse_liger_shards(model)
            refuse_engine_shards(model)

        def layers() -> list[nn.Module]:
            try:
                return select_layers(model, self.config.layers, self.config.one_stack)
            except NoLayersError:
                if self.config.needs_layers:
                    raise
                return []

        if max(self.config.context_parallel_size, self.config.pipeline_parallel_size) > 1:
            refuse_fp8_at_calls(model, layers, self.config.why_not_fp8, self._divided)
        processes.shard_model(
            model,
            layers=layers,
            mixed=self.precision_plugin.mixed,
            forwards=[name for name in steps if is_overridden(name, self.lightning_module)],
        )
        if self.config.zero_stage == 0:
            keep_quantized_weights(model)
        processes.attach(model, layers, self._divided)
        if processes.pipeline is not None:
            self.precision_plugin.holders = processes.pipeline.holders
            self._divided.callback(replace_forward(*processes.pipeline.run_of(model)))
        outside = self.config.context_parallel_size > 1 and self.config.streams
        states = may_hand_states(model)
        processes.prepare_batches(model, self._slice_bounds, outside, states, self._may_need_padding)
        self._model_is_divided = True
        self._read_weights()

    def _train_pipeline(self, processes: Processes, engine: Engine, runtime: TrainingRuntime) -> None:
        """Prepare the pipeline for training; does nothing if there is none.

        Raises:
            ValueError: The training loop uses gradients between the training step and the backward, or those of all
                stages.
        """
        pipeline = processes.pipeline
        if pipeline is None:
            return
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        _refuse_early_gradients(trainer)
        _refuse_joint_optimizers(trainer)
        for optimizer in trainer.optimizers:
            check_groups(optimizer)

        def drops_gradients() -> bool:
            """Whether Lightning calls `zero_grad` between this call of the model and its backward."""
            if not self._in_training_step:
                return False
            _refuse_early_gradients(trainer)  # hooks may be new
            return trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0

        layers = StageLayers(engine, pipeline.in_flight, pipeline.waiting)
        pipeline.train(layers, lambda: runtime.before_backward(None), drops_gradients)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._sigterm is not None:
            if isinstance(exception, SIGTERMException):
                exception.code = SIGTERM_STATUS
            self._sigterm.close()
            self._sigterm = None
        super().on_exception(exception)

    def _release_model(self) -> None:
        """Undo what `_divide_model` attached to the model, and forget the checkpoint from which it was restored."""
        self._divided.close()
        self._opened, self._model_is_divided = None, False

    @override
    def teardown(self) -> None:
        if not self.distributed:
            super().teardown()
            return
        sigterm, self._sigterm = self._sigterm, None
        ends = sigterm is not None and sigterm.together.ends_here()
        if sigterm is not None:
            sigterm.close()
        # Weights and states stay where the processes can gather them.
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if ends:
            raise SIGTERMException(SIGTERM_STATUS)


def _refuse_averaging(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks that average weights, which several processes cannot do.

    Raises:
        ValueError: There is such a callback.
    """
    for callback in callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} averages whole weights, and several processes have parts of them: leave "
                "the callback out, or train in one process"
            )


def _refuse_early_gradients(trainer: Trainer) -> None:
    """Refuse what a pipeline cannot do: it computes gradients in the training step, and gives them in the backward.

    Args:
        trainer: The trainer of the fit.

    Raises:
        ValueError: The module optimizes manually, or something looks at gradients between the two.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ValueError(
            "pipeline_parallel_size: manual optimization may drop gradients that a pipeline computes in the forward: "
            "set automatic_optimization=True, or pipeline_parallel_size=1"
        )
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    found = [f"{type(module).__name__}.{name}" for name in hooks if is_overridden(name, module)]
    for callback in trainer.callbacks:
        if is_overridden(hooks[0], callback, parent=Callback):
            found.append(f"{type(callback).__name__}.{hooks[0]}")
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters()):
        found.append("a hook on the gradient of a parameter")
    if found:
        raise ValueError(
            f"pipeline_parallel_size: {found[0]} would see gradients before the backward of the loss: leave it out, or "
            "set pipeline_parallel_size=1"
        )


def _refuse_joint_optimizers(trainer: Trainer) -> None:
    """Refuse optimizers whose step depends on all weights together.

    Args:
        trainer: The trainer of the fit.

    Raises:
        ValueError: An optimizer is LBFGS.
    """
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
        raise ValueError(
            "pipeline_parallel_size: LBFGS computes a step from the gradients of all weights, and each stage has its "
            "own: take another optimizer, or set pipeline_parallel_size=1"
        )
