"""Divides a model, its data and its batches among the processes of a run."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_memo.config import MemoConfig
from lightning_memo.kernels import RngState
from lightning_memo.parallel.batches.loss_arguments import (
    LossArguments,
    RouterLosses,
    takes_loss_arguments,
    why_loss_unfit,
)
from lightning_memo.parallel.batches.packed_documents import (
    find_mixed_documents,
    has_axes,
    has_recurrences,
    separate_documents,
)
from lightning_memo.parallel.batches.place_documents import pairs_of_a_token
from lightning_memo.parallel.batches.same_batches import (
    check_even,
    check_same_batch,
    check_same_images,
    check_same_size,
)
from lightning_memo.parallel.batches.shard_batch import (
    Batch,
    BatchSharder,
    TextModelInputs,
    check_layers,
    rows_of,
    trains_beside,
)
from lightning_memo.parallel.batches.split_loader import seeding_rank, split_iterable
from lightning_memo.parallel.batches.token_layout import (
    CurrentLayout,
    TokenLayout,
    takes_attention_functions,
    why_positions_unknown,
)
from lightning_memo.parallel.batches.whole_rows import WholeRows
from lightning_memo.parallel.context_parallel import ContextGroups
from lightning_memo.parallel.device_mesh import (
    CONTEXT,
    DATA,
    TENSOR,
    across_stages,
    build_mesh,
    context_groups,
    expert_meshes,
    neighbours,
    readers_group,
    replicas,
    sequence_group,
    stage_group,
)
from lightning_memo.parallel.fsdp_units import forget_gathered, forget_unfinished
from lightning_memo.parallel.parallel_sizes import resolve_sizes, ulysses_size
from lightning_memo.parallel.pipeline.pipelined_model import Pipeline
from lightning_memo.parallel.pipeline.stage_modules import is_stage
from lightning_memo.parallel.ranks import Ranks, gather, processes_on_this_node
from lightning_memo.parallel.tensor.experts import check_experts, find_experts, shard_experts
from lightning_memo.parallel.tensor.shard_weights import TensorPlan, find_plan, shard_tensors
from lightning_memo.parallel.zero_sharding import ZeroSettings, shard_state
from lightning_memo.utils.find_layers import find_hugging_face, find_text_model
from lightning_memo.utils.messages import tell
from lightning_memo.utils.quantized_weights import parts_of

# Batches are compared often at first and then from time to time, because most mistakes in the data show at once.
_FIRST_CHECKS = 16
_CHECK_EVERY = 64

# Attribute of a module that describes how it is divided.
_DIVISION = "_lightning_memo_division"


class Processes:
    """The processes of a run, seen from one of them. `torch.distributed` has to be initialized.

    Args:
        config: The user's settings.
        device: Device of this process.
        timeout: How long a process waits for the others in a collective.

    Attributes:
        sizes: Data, context, tensor and expert parallel sizes.
        mesh: Device mesh `(data_parallel, context_parallel, tensor_parallel)`, behind `pipeline_parallel` if there is a
            pipeline.
        pipeline: The pipeline; `None` if all processes have all layers.
        ranks: Ranks that must use the same plan.
        data_rank: Data-parallel rank of this process, below `sizes.data`.
        context_groups: Process groups of context-parallel attention; `None` without context parallelism and before
            :meth:`prepare_batches`.
        current_layout: Holds the layout of the last batch that was divided.

    Raises:
        ValueError: The sizes do not fit the number of processes.
    """

    def __init__(self, config: MemoConfig, device: torch.device, timeout: timedelta) -> None:
        self._config, self._device, self._timeout = config, device, timeout
        self.sizes = resolve_sizes(config, dist.get_world_size())
        self.mesh = build_mesh(self.sizes, device, timeout)
        self._replicas, self._sequence = replicas(self.mesh, timeout), sequence_group(self.mesh, timeout)
        self._zero = ZeroSettings(
            config.zero_stage, neighbours(self.mesh, config.zero_shard_size, timeout), config.zero_communication
        )
        shared_experts = (self.mesh, self.sizes.expert, config.zero_shard_size, timeout)
        self._experts = expert_meshes(*shared_experts) if self.sizes.expert > 1 else None
        staged = self.sizes.pipeline > 1
        self.current_layout = CurrentLayout()
        staging = (config, self.sizes, self.mesh, device, self.current_layout, timeout)
        self.pipeline = Pipeline(*staging) if staged else None
        slice_group = self._experts.homes if self._experts is not None and self.sizes.shares_experts else self._sequence
        self.data_rank: int = self.mesh[DATA].get_local_rank()
        self.ranks = Ranks(
            parallel=self.sizes.describe(config.zero_stage, config.zero_communication, config.zero_shard_size),
            on_this_node=processes_on_this_node(),
            plan_group=stage_group(self.mesh, timeout).get_group() if staged else None,
            stages=across_stages(self.mesh) if staged and self.sizes.shards > 1 else None,
            slice_group=slice_group.get_group() if slice_group.size() > 1 else None,
            shares_experts=self.sizes.shares_experts,
            world=dist.get_world_size() > 1,
        )
        shared = self._sequence.get_group() if self._sequence.size() > 1 else None
        self._readers = readers_group(self.mesh, timeout) if staged else shared  # which get the same batches
        self.context_groups: ContextGroups | None = None
        self._sharder = BatchSharder()
        self._loss_arguments = LossArguments(self.current_layout)
        self._router_losses = RouterLosses(self.current_layout)
        self._outside: list[FSDPModule] = []
        self._trains_tower = False
        self._batches = 0
        self._told: set[str] = set()
        self._given: Any = None  # the last batch, until a step has shown how batches can be divided
        self._divides = False

    # ---- the model

    def shard_model(
        self, module: nn.Module, layers: Callable[[], Sequence[nn.Module]], mixed: bool, forwards: Sequence[str]
    ) -> None:
        """Give each process its part of a module's weights. A module that is already divided is not changed.

        Args:
            module: Module of the same architecture on all processes. The weights of rank 0 are used.
            layers: Returns the repeated layers of the module.
            mixed: Whether to compute in bf16 with fp32 weights.
            forwards: Names of methods of the module that compute with its weights.

        Raises:
            ValueError: The model cannot be divided by the settings, or was divided by other settings.
        """
        forget_unfinished(module)
        self._share_random_state()
        config = self._config
        if _was_divided(module, self._division(mixed), is_stage(module)):
            return
        tensor_plan = self._check_divisible(module)
        if tensor_plan is not None and (line := tensor_plan.describe_derived()) is not None:
            tell(f"{line}.")
        if self.ranks.world:
            _share_weights(module, self._device)
        if self.sizes.tensor > 1:
            shard_tensors(
                module,
                self.mesh[TENSOR],
                sequence_parallel=config.sequence_parallel,
                plan=tensor_plan,
                experts=self._experts,
            )
        elif self._experts is not None:
            shard_experts(find_experts(module).values(), self._experts)
        if self.pipeline is not None:
            self.pipeline.divide(module, mixed)
        if self.sizes.replicas > 1 or mixed or config.zero_stage > 0 or config.offload_state:
            shard_state(
                module,
                layers(),
                self._replicas,
                self._zero,
                mixed,
                config.offload_state,
                forwards,
                self._experts,
            )

    def _check_divisible(self, module: nn.Module) -> TensorPlan | None:
        """Check that a module can be divided, before anything is sent.

        Returns:
            How tensor-parallel ranks divide it; `None` without them.

        Raises:
            ValueError: It cannot.
        """
        tensor_plan = None
        if self.sizes.tensor > 1:
            tensor_plan = find_plan(module, self.sizes.tensor, self._config.tensor_parallel_plan)
        if self._experts is not None:
            check_experts(module, self.sizes.expert, self.sizes.tensor)
        if self.pipeline is not None:
            self.pipeline.prepare(module)
        return tensor_plan

    def _division(self, mixed: bool) -> str:
        """Describe how a module is divided."""
        offload = "offload" if self._config.offload_state else ""
        return " ".join(filter(None, (self.ranks.parallel, "bf16-mixed" if mixed else "", offload)))

    def _share_random_state(self) -> None:
        """Give tensor-parallel ranks the same random state, so that dropout on replicated tensors is the same."""
        if self.sizes.tensor > 1:
            states = gather(RngState.capture(self._device))
            first = states[dist.get_rank() // self.sizes.tensor * self.sizes.tensor]
            replace(first, device=self._device).restore()

    def attach(self, module: nn.Module, layers: Callable[[], Sequence[nn.Module]], stack: contextlib.ExitStack) -> None:
        """Activate what forwards and backwards need, until `stack` is closed.

        Args:
            module: Divided module.
            layers: Returns the repeated layers of the module.
            stack: Undoes everything when it is closed.

        Raises:
            ValueError: The layers are beside the text model, whose tokens are divided.
        """
        for model in find_hugging_face(module):
            stack.callback(self._loss_arguments.attach(model))
            stack.callback(self._router_losses.attach(model))
        text_model = find_text_model(module)
        self._trains_tower = text_model is not None and trains_beside(module, text_model)
        # Sequence parallelism divides the embeddings, to which features of images could not be added.
        if text_model is not None and self.sizes.context > 1 and self.sizes.shards == 1:
            check_layers(module, text_model, layers())
            stack.callback(TextModelInputs(self.current_layout).attach(text_model))
        stack.callback(self._loss_arguments.use, None)
        stack.callback(self._router_losses.use, None)
        stack.callback(self.current_layout.clear)
        self._outside = [unit for unit in module.children() if isinstance(unit, FSDPModule)]

    def attach_rows(
        self,
        model: nn.Module,
        layers: Callable[[], Sequence[nn.Module]],
        bounds_of: Callable[[int, int], tuple[int, ...]],
        global_slices: bool,
        hands_states: bool,
        may_need_padding: Callable[[], bool],
        stack: contextlib.ExitStack,
    ) -> None:
        """Divide the tokens of each forward of a model that gets and returns whole rows, until `stack` is closed.

        Args:
            model: Model that is trained.
            layers: Returns its repeated layers.
            bounds_of: As for :meth:`prepare_batches`.
            global_slices: As for :meth:`prepare_batches`.
            hands_states: As for :meth:`prepare_batches`.
            may_need_padding: As for :meth:`prepare_batches`.
            stack: Undoes everything when it is closed.

        Raises:
            ValueError: The tokens of the model cannot be divided.
        """
        group, repeated = self.mesh[CONTEXT].get_group(), layers()
        rows = WholeRows(model, repeated, self.current_layout, self._router_losses, group)
        check_layers(model, rows.text_model, repeated)

        def layout_of(batch: Batch, targets: Tensor | None, may_place: bool) -> TokenLayout:
            self._check_readers(batch)
            return self._sharder.layout_of(batch, targets, may_place)

        rows.attach(layout_of, stack)
        self.prepare_batches(model, bounds_of, global_slices, hands_states, may_need_padding)

    def after_step(self, module: nn.Module) -> None:
        """Forget copies of weights that a step of an optimizer has changed. All processes of a pipeline call this."""
        forget_gathered(module)
        if self.pipeline is not None:
            self.pipeline.after_step()

    # ---- batches

    @property
    def cuts_tokens(self) -> bool:
        """Whether each process computes only some of the tokens of its sequences."""
        return self.sizes.context * self.sizes.shards > 1

    def prepare_batches(
        self,
        model: nn.Module,
        bounds_of: Callable[[int, int], tuple[int, ...]],
        global_slices: bool,
        hands_states: bool,
        may_need_padding: Callable[[], bool],
    ) -> None:
        """Prepare to divide batches.

        Args:
            model: Model that is trained.
            bounds_of: Returns the slice bounds of a training batch from its rows and the tokens of a shard.
            global_slices: As `global_slices` of :class:`~lightning_memo.parallel.batches.token_layout.TokenLayout`.
            hands_states: Whether layers hand states from token to token, so that processes need contiguous ranges.
            may_need_padding: Returns whether a module may relate tokens to those of the padding.

        Raises:
            ValueError: The settings cannot divide the model's heads over the processes, or experts are divided beside
                recurrences.
        """
        if hands_states and self.sizes.context > 1 and self._experts is not None:
            # The first slice of a process waits for the last one of another, which waits for tokens of that slice.
            raise ValueError(
                f"expert_parallel_size={self.sizes.expert} beside context_parallel_size={self.sizes.context}: layers "
                "of this model hand states from process to process, and would wait for each other's tokens: use one "
                "of them"
            )
        hosts = find_hugging_face(model)
        heads, kv_heads = _heads(model)
        ulysses = ulysses_size(self._config, heads // self.sizes.tensor, kv_heads // self.sizes.tensor)
        self.context_groups = context_groups(self.mesh, ulysses, hands_states, self._timeout)
        context_rank = self.mesh[CONTEXT].get_local_rank()
        self._sharder = BatchSharder(
            ring=self.sizes.context // ulysses,
            ring_rank=context_rank // ulysses,
            ulysses=ulysses,
            ulysses_rank=context_rank % ulysses,
            shards=self.sizes.shards,
            ranks=self.sizes.replicas,
            data_group=self.mesh[DATA].get_group() if self.sizes.data > 1 else None,
            takes_loss_arguments=takes_loss_arguments(model),
            why_loss_unfit=why_loss_unfit(model),
            bounds_of=bounds_of,
            global_slices=global_slices,
            contiguous=hands_states,
            documents_of=functools.partial(separate_documents, model),
            in_model=self.current_layout.text_model is not None,
            divides_layers=bool(hosts) and self.sizes.shards == 1 and self.pipeline is None and not global_slices,
            why_layers=_why_layers(hosts, self.current_layout.text_model),
            row_positions=has_axes(model) or any(hasattr(module, "mrope_section") for module in model.modules()),
            places=self._may_place(model, hands_states),
            joins_rows=bool(hosts) and find_mixed_documents(model, makes_cache=False) is None,
            may_need_padding=may_need_padding,
            pairs=pairs_of_a_token(_hidden_size(model)),
            has_recurrences=has_recurrences(model),
        )

    def _may_place(self, model: nn.Module, hands_states: bool) -> bool:
        """Returns whether a process may have short documents whole: there is nothing but attention between tokens.

        Micro-batches of a pipeline are rows, and processes that share experts need equally many tokens.
        """
        text_model, alike = find_text_model(model), self.pipeline is None and self.sizes.expert <= self.sizes.context
        return self.sizes.context > 1 and text_model is None and alike and not hands_states

    def shard_loader(self, loader: DataLoader[Any], split: bool, predicting: bool) -> Iterable[Any]:
        """Returns a loader of this process's data.

        Args:
            loader: The user's loader. Lightning's sampler has already divided it if its dataset has a length.
            split: Whether to divide datasets without a length, which samplers cannot divide.
            predicting: Whether the loader is for prediction, in which Lightning's sampler repeats no samples.

        Raises:
            ValueError: Processes would get different numbers of batches and wait for each other forever.
        """
        if predicting and (self._config.zero_stage > 0 or self._experts is not None):
            with contextlib.suppress(TypeError):  # datasets without a length
                check_even("predict", len(loader), self.ranks)
        if split and self.sizes.data > 1:
            return split_iterable(loader, self.data_rank, self.sizes.data, self.mesh[DATA].get_group())
        return loader

    @property
    def may_begin_again(self) -> bool:
        """Whether the model has not been trained yet on parts of batches, which could be divided in another way."""
        return self._given is not None

    @property
    def may_divide_layers(self) -> bool:
        """Whether its layers could be divided instead."""
        return self.may_begin_again and self._sharder.divides_layers and not self._sharder.why_layers

    def divide_layers(self) -> Any:
        """Divide the layers of the model from now on, because the rest needs all tokens.

        Returns:
            The last batch, whole; `None` if its layers cannot be divided.
        """
        if not self.may_divide_layers:
            return None
        batch, self._given = self._given, None
        self._sharder = replace(self._sharder, why_layers="needs all tokens outside of what can be divided")
        return self.shard_batch(batch, training=True)

    def divide_slices(self) -> Any:
        """Divide each slice of a batch from now on, as layers run in slices whose keys and values are on the host.

        Returns:
            This process's part of the last batch.
        """
        batch, self._given = self._given, None
        if self.sizes.context > 1:
            self._sharder = replace(self._sharder, global_slices=True, divides_layers=False)
        return self.shard_batch(batch, training=True)

    def keep_division(self) -> None:
        """Note that the model trains on parts of batches."""
        self._given = None
        self._divides = True

    def _tell_of_layers(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            tell(
                f"the model {why}: its layers are divided, and each process runs the rest, such as the "
                "embedding, the head and the loss, for all tokens, which is slower."
            )

    def seeding_rank(self, loader: DataLoader[Any], split: bool) -> int:
        """Returns the rank that seeds the workers of a loader. Processes that share a batch get the same rank.

        Args:
            loader: The user's loader.
            split: As for :meth:`shard_loader`.
        """
        return seeding_rank(loader, self.data_rank, self.sizes.data if split else 1)

    def shard_batch(self, batch: Any, training: bool, predicting: bool = False) -> Any:
        """Returns this process's part of a batch, whose layout becomes the current one.

        Args:
            batch: Batch from the loader.
            training: Whether to train. Processes that send each other tokens then run the same slices.
            predicting: Whether to predict. Data-parallel processes then do not communicate.

        Raises:
            ValueError: The batch cannot be divided, or ranks that compute the same sequences got different batches.
        """
        self._check_readers(batch)
        if training and self._experts is not None and self.sizes.shares_experts:
            check_same_size(batch, self._experts.homes.get_group(), self.sizes.expert)
        if training and self._trains_tower and self.sizes.data > 1:
            check_same_images(batch, self.mesh[DATA].get_group())
        sharder = self._sharder
        if predicting:
            sharder = replace(sharder, data_group=None, ranks=self.sizes.context)
        if why := sharder.why_in_layers(batch):
            self._tell_of_layers(why)
            batch = sharder.shard_layers(batch)
            self.current_layout.layout = None
            self.current_layout.of_layers = functools.partial(sharder.layout_of_layer, rows_of(batch))
        else:
            self._given = None if self._divides or not training else batch
            batch, self.current_layout.layout = sharder.shard(batch)
            self.current_layout.of_layers = None
        sharing = self.mesh[CONTEXT] if predicting else self._replicas
        group = sharing.get_group() if sharing.size() > 1 else None
        self._loss_arguments.use(batch, group)
        self._router_losses.use(group)
        for unit in self._outside:  # a step may call a part of the model without the root
            unit.unshard()
        return batch

    def _check_readers(self, batch: Any) -> None:
        if self._readers is not None:
            if self._batches < _FIRST_CHECKS or self._batches % _CHECK_EVERY == 0:
                check_same_batch(batch, self._readers, self.data_rank)
            self._batches += 1


def _why_layers(hosts: Sequence[nn.Module], text_model: nn.Module | None) -> str:
    """Returns why only the layers of models of transformers can be divided, as a clause; empty if batches can."""
    why = next(filter(None, map(why_positions_unknown, hosts)), "")
    parts = hosts if text_model is None else [text_model]
    return why or ("" if all(map(takes_attention_functions, parts)) else "makes attention masks of all tokens itself")


def _heads(model: nn.Module) -> tuple[int, int]:
    """Returns the query and key-value heads of a Hugging Face model, or 0, which every size divides, if unknown."""
    hosts: list[Any] = find_hugging_face(model)
    if not hosts:
        return 0, 0
    config = hosts[0].config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0) or 0
    return heads, getattr(config, "num_key_value_heads", heads) or heads


def _hidden_size(model: nn.Module) -> int:
    """Returns the size of the hidden states of a Hugging Face model, or a usual one if it is unknown."""
    hosts: list[Any] = find_hugging_face(model)
    config = hosts[0].config.get_text_config() if hosts else None
    return getattr(config, "hidden_size", 0) or 4096


def _share_weights(module: nn.Module, device: torch.device) -> None:
    """Broadcast the weights of rank 0.

    Args:
        module: Module of the same architecture on all processes.
        device: Device of this process.
    """
    for t in itertools.chain.from_iterable(map(parts_of, [*module.parameters(), *module.buffers()])):
        there = t.data.to(device).contiguous()
        dist.broadcast(there, src=0)
        t.data.copy_(there)


def _was_divided(module: nn.Module, division: str, stage: bool) -> bool:
    """Whether an earlier fit divided a module. If it did not, `division` is noted as how it is going to be divided.

    Args:
        module: The module.
        division: How it is to be divided.
        stage: Whether it has lost the weights of other stages of a pipeline.

    Raises:
        ValueError: It was divided in another way.
    """
    if not stage and not any(isinstance(p, DTensor) for p in module.parameters()):
        setattr(module, _DIVISION, division)
        return False
    before = getattr(module, _DIVISION, division)
    if before != division:
        raise ValueError(
            f"an earlier strategy divided this module as {before}, and it cannot be divided as {division}: save a "
            "checkpoint, and load it into a new module"
        )
    return True
