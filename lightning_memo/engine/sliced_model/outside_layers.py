"""Checks that a model can run slice by slice outside of its layers: embeddings, last norm, head, and its own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from lightning_memo.engine.forward.collected_outputs import collecting_nothing
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.sliced_model.prove_model import why_tokens_mixed
from lightning_memo.engine.state.module_attributes import ModuleAttributes
from lightning_memo.engine.token_locality.prove_module import counts_tokens
from lightning_memo.engine.token_locality.user_code import has_hooks

_LABELS = ("labels", "shift_labels", "num_items_in_batch")


class OutsideLayers:
    """The parts of a model outside of its layers, which are proven to keep tokens apart before they run on slices.

    Args:
        layers: The model's layers.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._proven: set[object] = set()

    def check(self, model: nn.Module, forward: Callable[..., Any], inputs: dict[str, Any], tokens: int) -> None:
        """Check that a model computes each token by itself outside of its layers.

        It is proven again after modules, hooks, numbers among the attributes of modules or the form of inputs change.

        Args:
            model: The model.
            forward: Its own forward.
            inputs: Its inputs for a slice, by name.
            tokens: Number of tokens of the sequence.

        Raises:
            ValueError: The model may relate tokens to each other outside of its layers.
        """
        batch, part = inputs["labels"].shape
        call = LayerCall(model, forward, (), {k: v for k, v in inputs.items() if k not in _LABELS}, part, batch)
        state = (call.form(), *self._state(model))
        if part < 2 or state in self._proven:  # a single token looks like anything of size 1
            return
        with collecting_nothing():
            why = self._hooked(model) or self._counting(model) or why_tokens_mixed(call, self._layers, tokens)
        if why:
            raise ValueError(f'schedule="slice" runs the model slice after slice, but {why}: use schedule="layer"')
        self._proven.add(state)

    def _modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the modules whose hooks run for each slice, and that no proof of a layer covers."""
        inside = {m for layer in self._layers for m in layer.modules() if m is not layer}
        return ((name, m) for name, m in model.named_modules() if m is not model and m not in inside)

    def _hooked(self, model: nn.Module) -> str:
        """Return which module has hooks of a user; empty if none has."""
        hooked = next((name for name, m in self._modules(model) if has_hooks(m)), "")
        return hooked and f"hooks on {hooked} would see the tokens of one slice only"

    def _counting(self, model: nn.Module) -> str:
        """Return which embedding relates the tokens of a batch; empty if none does."""
        counting = next((name for name, m in self._modules(model) if counts_tokens(m)), "")
        return counting and f"{counting} relates tokens by scale_grad_by_freq or max_norm"

    def _state(self, model: nn.Module) -> Iterator[object]:
        """Iterate over what may decide what modules compute, apart from the values of tensors."""
        layers = set(self._layers)
        modules = [("", model), *self._modules(model)]
        for _, m in modules:
            yield *m._forward_hooks, *m._forward_pre_hooks, *m._backward_hooks, *m._backward_pre_hooks
        yield ModuleAttributes.of((name, m) for name, m in modules if m not in layers)
