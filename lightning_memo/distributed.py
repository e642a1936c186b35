"""The processes of a run: the device mesh, and what each process gets of the model and of the data."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo.callbacks.refused_loops import refuse_early_gradients, refuse_joint_optimizers
from lightning_memo.checkpointing import CheckpointingStrategy
from lightning_memo.config import PRECISIONS, MemoConfig
from lightning_memo.data.seed_workers import seed_workers
from lightning_memo.engine import Engine
from lightning_memo.engine.fp8_modules.replicated_weights import keep_quantized_weights
from lightning_memo.engine.modules.layer_forward import replace_forward
from lightning_memo.engine.recurrence.intercept_states import may_hand_states
from lightning_memo.parallel.batches.divide_loader import check_even
from lightning_memo.parallel.checkpoints.parameter_names import check_groups
from lightning_memo.parallel.mesh_precision import MeshPrecision
from lightning_memo.parallel.parallel_sizes import resolve_sizes
from lightning_memo.parallel.processes import Processes
from lightning_memo.parallel.zero.fsdp_units import accumulating
from lightning_memo.runtime.model_checks import (
    refuse_engine_shards,
    refuse_fp8_at_calls,
    refuse_fp8_weights,
    refuse_liger_shards,
)
from lightning_memo.runtime.stage_layers import StageLayers
from lightning_memo.runtime.training_runtime import TrainingRuntime
from lightning_memo.utils.find_layers import select_layers


class DistributedStrategy(CheckpointingStrategy):
    """Divides the model, the batches and the data loaders among the processes of a run, if there are several.

    Args:
        config: The settings of the strategy.
        timeout: How long a process waits for the others in a collective.
        process_group_backend: Backend of `torch.distributed`; `None` is NCCL on GPUs and gloo on CPUs, or both if the
            state is offloaded.
    """

    def __init__(self, config: MemoConfig, timeout: timedelta, process_group_backend: str | None) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.config = config
        # A name of its own, because with `_accelerator` set, Lightning's refusal of this strategy names devices only.
        self._given_accelerator: Accelerator | None = None
        self._processes: Processes | None = None
        self._divided = contextlib.ExitStack()
        self._in_training_step = False

    @abstractmethod
    def _slice_bounds(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Where the slices of a training batch end.

        Args:
            batch: Number of sequences.
            tokens: Number of tokens of each that this process holds between the blocks of a layer.
        """

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
    @override
    def distributed(self) -> bool:
        """Whether the run takes part in a process group; a single process without ZeRO needs none."""
        return self.num_processes * self.num_nodes > 1 or self.config.zero_stage > 0 or self.config.offload_state

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
        if self.num_processes * self.num_nodes > 1:
            super()._configure_launcher()

    @override
    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is None and self.config.offload_state and self.root_device.type == "cuda":
            return "cpu:gloo,cuda:nccl"  # weights and gradients on the host may be gathered there
        return super()._get_process_group_backend()

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        if not self.distributed:
            resolve_sizes(self.config, 1)
            self.accelerator.setup_device(self.root_device)
            self.set_world_ranks()
            # A single process reads all data in the user's own order, as it would without this strategy.
            self.lightning_module.trainer._accelerator_connector.use_distributed_sampler = False
            return
        _refuse_averaging(self.lightning_module.trainer.callbacks)
        self._setup_distributed()
        if self._processes is None:
            self._processes = Processes(self.config, self.root_device, self._timeout or default_pg_timeout)
        self._device_mesh = self.lightning_module._device_mesh = self._processes.mesh
        if not isinstance(self.precision_plugin, MeshPrecision):
            self.precision_plugin = MeshPrecision(self.precision_plugin, self.root_device, self.config.zero_stage)

    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:  # type: ignore[override]
        if self.config.offload_state:
            return self.precision_plugin.tensor_init_context()
        # The weights are made on the device. The parent class would make them on "meta", and fill them with random
        # numbers in setup.
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
            return batch  # each slice of the batch goes to the device when its turn comes
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._processes is not None:
            batch = self._processes.divide_batch(batch, training, self.lightning_module.trainer.predicting)
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
            return select_layers(model, self.config.layers, self.config.one_stack)

        if max(self.config.context_parallel_size, self.config.pipeline_parallel_size) > 1:
            refuse_fp8_at_calls(model, layers, self.config.why_not_fp8, self._divided)
        processes.divide_model(
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
        outside = self.config.context_parallel_size > 1 and self.config.host_backed in ("attention", "all")
        processes.prepare_batches(model, self._slice_bounds, outside, hands_states=may_hand_states(model))

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
        refuse_early_gradients(trainer)
        refuse_joint_optimizers(trainer)
        for optimizer in trainer.optimizers:
            check_groups(optimizer)

        def drops_gradients() -> bool:
            """Whether Lightning calls `zero_grad` between this call of the model and its backward."""
            if not self._in_training_step:
                return False
            refuse_early_gradients(trainer)  # hooks may be new
            return trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0

        layers = StageLayers(engine, pipeline.in_flight, pipeline.waiting)
        pipeline.train(layers, lambda: runtime.before_backward(None), drops_gradients)

    def _release_model(self) -> None:
        """Undo what `_divide_model` attached to the model."""
        self._divided.close()


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
