"""The state of a model's forward on one stage: what it received, and whether the stage's layers have begun.

Note: [How a stage runs the model's own forward]
Each stage calls the forward of the whole model. Modules of other stages have lost their weights, and have forwards of
this file. Layers before those of the stage return their input, in a tuple if the layers of the model return one, which
the stage before says, and embeddings return NaN of the right shape. The first
layer of the stage gets what the stage before has sent in place of its input. The first layer behind those of the stage
ends the forward: its input is sent to the next stage. Masks and positions are thus computed on each stage by the model.
If a stage has several blocks of layers, a forward runs one of them. Own modules before this block are replaced for as
long as the forward runs, by stand-ins that do what those of other stages do. A forward that does anything else with
what other stages compute is refused, or gives NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memo.utils.class_names import class_name


class StageEndError(Exception):
    """Ends the forward of a model behind the last layer of a stage.

    Attributes:
        hidden: The input of the first layer of the next stage.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the forward of the stage is over")
        self.hidden = hidden


class StageForward:
    """The forward of a micro-batch on one stage.

    Args:
        model: Name of the model, for messages.
        starts: Number of the first layer of each block of layers of the stage.

    Attributes:
        returned: Number of values in the tuple that the layers of the model return; 0 if they return hidden states
            alone.
    """

    def __init__(self, model: str, starts: Sequence[int]) -> None:
        self._model, self._starts = model, starts
        self._start = starts[0]
        self._runs = self._in_layers = False
        self._stand_ins: list[tuple[int, nn.Module, str, nn.Module]] = []
        self._received: Tensor | None = None
        self.returned = 0

    @property
    def blocks(self) -> int:
        """Number of blocks of layers of the stage."""
        return len(self._starts)

    def add_stand_in(self, number: int, parent: nn.Module, name: str, stand_in: nn.Module) -> None:
        """Add what replaces a child of a module in forwards of blocks behind it.

        Args:
            number: Number of the child among the layers; -1 for a module before them.
            parent: The module.
            name: Name of the child in it.
            stand_in: What replaces it.
        """
        self._stand_ins.append((number, parent, name, stand_in))

    @contextlib.contextmanager
    def running(self, received: Tensor | None, block: int) -> Iterator[None]:
        """Within this context the model's forward runs.

        Args:
            received: What the stage before has sent; `None` for the first block of all.
            block: Number of the block of layers that runs.
        """
        self._runs, self._in_layers, self._received = True, False, received
        self._start = self._starts[block]
        replaced: list[tuple[nn.Module, str, nn.Module]] = []
        try:
            for number, parent, name, stand_in in self._stand_ins if block > 0 else ():
                if number < self._start:
                    replaced.append((parent, name, parent.get_submodule(name)))
                    parent._modules[name] = stand_in
            yield
        finally:
            for parent, name, module in replaced:
                parent._modules[name] = module
            self._runs, self._received = False, None

    def is_behind(self, number: int) -> bool:
        """Return whether a layer, by its number, comes behind the first one of the block that runs."""
        return number > self._start

    def before_layers(self, module: nn.Module) -> Tensor:
        """Return what the stage before has sent, where a module of an earlier stage is called.

        Raises:
            ValueError: The module is called by itself, or behind the layers of this stage.
        """
        self._check_runs(module)
        if self._in_layers or self._received is None:
            raise ValueError(
                f"pipeline_parallel_size: {class_name(module)} of an earlier stage is called behind the layers of this "
                f"stage, as {self._model} calls it more than once, or runs its layers in another order: set "
                "pipeline_parallel_size=1"
            )
        return self._received

    def end(self, module: nn.Module, hidden: Any) -> None:
        """End the forward, where the first layer of the next stage is called.

        Raises:
            StageEndError: Always, unless something is wrong.
            ValueError: The layer is called by itself, or before the layers of this stage, or with no hidden states.
        """
        self._check_runs(module)
        if not self._in_layers or not isinstance(hidden, Tensor) or hidden.dim() != 3:
            given = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise ValueError(
                f"pipeline_parallel_size: {class_name(module)} of a later stage got {given} in place of the hidden "
                f"states [batch, tokens, hidden] of this stage's layers, as {self._model} computes something else "
                "before or between its layers: set pipeline_parallel_size=1"
            )
        raise StageEndError(hidden)

    def enter_layers(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the first layer of the stage what the stage before has sent: a hook before its forward.

        Raises:
            ValueError: The layer is called by itself or twice, or gets other tensors that are computed from weights.
        """
        self._check_runs(layer)
        (given, *others), rest = args or (kwargs.get("hidden_states"),), kwargs
        if self._in_layers or not isinstance(given, Tensor) or (args == () and "hidden_states" not in kwargs):
            raise ValueError(
                f"pipeline_parallel_size: {class_name(layer)} is called more than once in a forward of {self._model}, "
                "or gets no hidden states: set pipeline_parallel_size=1"
            )
        self._in_layers = True
        beside = tree_leaves((others, {name: value for name, value in rest.items() if name != "hidden_states"}))
        if any(isinstance(t, Tensor) and t.requires_grad for t in beside):
            raise ValueError(
                f"pipeline_parallel_size: {class_name(layer)} gets tensors beside its hidden states that are computed "
                f"from weights of {self._model}, and stages send hidden states only: set pipeline_parallel_size=1"
            )
        if self._received is None:
            return None
        if given.shape != self._received.shape:
            raise ValueError(
                f"pipeline_parallel_size: {class_name(layer)} would get {list(given.shape)} in place of the "
                f"{list(self._received.shape)} that the stage before has sent, as layers of {self._model} return more "
                "than hidden states: set pipeline_parallel_size=1"
            )
        if args:
            return (self._received, *others), kwargs
        return args, {**kwargs, "hidden_states": self._received}

    def leave_layer(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note what layers return: a hook behind the first one of the stage.

        Raises:
            ValueError: They return other tensors than hidden states, too, or neither a tensor nor a tuple.
        """
        if not isinstance(output, (Tensor, tuple)):
            raise ValueError(
                f"pipeline_parallel_size: {class_name(layer)} returns a {type(output).__name__}, and layers of other "
                "stages return hidden states alone or in a tuple: set pipeline_parallel_size=1"
            )
        others = output[1:] if isinstance(output, tuple) else ()
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(others)):
            raise ValueError(
                f"pipeline_parallel_size: {class_name(layer)} returns other tensors beside its hidden states, and "
                "stages send hidden states only: set pipeline_parallel_size=1"
            )
        self.returned = len(output) if isinstance(output, tuple) else 0

    def as_returned(self, hidden: Any) -> Any:
        """Return hidden states as the layers of the model do."""
        return (hidden, *[None] * (self.returned - 1)) if self.returned else hidden

    def _check_runs(self, module: nn.Module) -> None:
        if not self._runs:
            raise ValueError(
                f"pipeline_parallel_size: {class_name(module)} is called by itself, or in a copy of the model, and "
                f"stages have parts of {self._model} only: call the model that is trained with labels, and take its "
                "loss"
            )


class AbsentModule:
    """The forward of a module of an earlier stage that is no layer: NaN for an embedding, the input for others.

    Args:
        forward: The forward of the stage.
        module: The module.
        dtype: Type in which the module computes.
        embeds: Whether it is an embedding.
    """

    def __init__(self, forward: StageForward, module: nn.Module, dtype: torch.dtype, embeds: bool) -> None:
        self._forward, self._module, self._dtype, self._embeds = forward, module, dtype, embeds

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        received = self._forward.before_layers(self._module)
        if not self._embeds:
            return x
        # Gradients tell what is computed from an embedding and is no hidden state.
        nan = torch.full((), torch.nan, dtype=self._dtype, device=received.device)
        return nan.requires_grad_(torch.is_grad_enabled()).expand(received.shape)


class AbsentLayer:
    """The forward of a layer of another stage. It returns its input, or ends the forward behind the layers of this one.

    Args:
        forward: The forward of the stage.
        module: The layer, or a module behind all layers.
        number: Its number among the layers.
    """

    def __init__(self, forward: StageForward, module: nn.Module, number: int) -> None:
        self._forward, self._module, self._number = forward, module, number

    def __call__(self, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self._forward.is_behind(self._number):
            self._forward.end(self._module, hidden_states)
        self._forward.before_layers(self._module)
        return self._forward.as_returned(hidden_states)
