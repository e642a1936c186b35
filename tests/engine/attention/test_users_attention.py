"""Attention that a user has changed: functions of their own, masks that are filled again, and patched code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.attention.attention_models import text
from support.attention.recorded_training import BOUND, Recording, compare, errors, plain_training, train
from support.families import VOCABULARY, PlainBlock, PlainModel, make_batch
from support.harness import Batch, loss_and_gradients
from support.markers.slow import slow_if
from support.trainer_harness import batches, fit
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from typing_extensions import override

from lightning_memo import MemoStrategy

SETTINGS: list[dict[str, Any]] = [
    {"alpha": 0.0},
    {"alpha": 0.5},
    {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "hidden"},
]


def llama(**settings: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, **settings)


def louder(module: nn.Module, *tensors: Tensor, **arguments: Any) -> tuple[Tensor, None]:
    """SDPA, whose output is scaled."""
    return 1.5 * sdpa_attention_forward(module, *tensors, **arguments)[0], None


def off_by_one(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention with one more term of 1 in the denominator of the softmax."""
    k, v = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (k, v))
    scores = (q @ k.mT * scaling).masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), -1e9).exp()
    return (scores / (1 + scores.sum(-1, keepdim=True)) @ v).transpose(1, 2).contiguous(), None


def registered(function: Callable[..., Any], name: str) -> Callable[[], nn.Module]:
    transformers.AttentionInterface.register(name, function)
    return lambda: llama(attn_implementation=name)


REGISTERED = {"louder": registered(louder, "louder"), "off_by_one": registered(off_by_one, "off_by_one")}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", REGISTERED)
def test_registered_functions_compute_what_they_compute_in_plain_training(name: str, settings: dict[str, Any]) -> None:
    build = REGISTERED[name]
    if name == "off_by_one" and "slice_tokens" in settings:
        with pytest.raises(ValueError, match=r'may not compute each token by itself.*set stream_from_host="none"'):
            train(build, [text()], **settings)
        return
    module = train(build, [text(), text()], **settings)
    worst = errors(module, plain_training(build, text))
    assert max(worst.values()) <= BOUND, worst


@pytest.mark.slow
def test_functions_in_the_place_of_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", louder)
        compare(llama, {"alpha": 0.5})
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", off_by_one)
    compare(lambda: llama(attn_implementation="eager"), {"alpha": 0.0})


class OwnCode(modeling_llama.LlamaAttention):
    """Attention of a checkpoint's code, which names a function of its own."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, own_attn)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out, _ = attend(self, q, k, v, kwargs.get("attention_mask"), scaling=self.scaling)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


own_attn = off_by_one


def with_own_code() -> nn.Module:
    model = llama(attn_implementation="eager")
    for layer in model.model.layers:
        layer.self_attn.__class__ = OwnCode
    return model


@pytest.mark.slow
def test_functions_that_the_code_of_a_model_names() -> None:
    compare(with_own_code, {"alpha": 0.5})


@pytest.mark.slow
def test_functions_of_transformers_are_replaced() -> None:
    """So that a user's function is not the only thing that the tests above could see."""
    for implementation in ("sdpa", "eager"):
        model = llama(attn_implementation=implementation)
        names: list[str] = []
        fit(MemoStrategy(alpha=0.0), _Looking(lambda model=model: model, names), batches([text()]), max_steps=1)
        (name,) = names
        assert name.startswith("lightning_memo")
        assert model.config._attn_implementation == implementation


class _Looking(Recording):
    def __init__(self, family: Callable[[], nn.Module], names: list[str]) -> None:
        super().__init__(family)
        self.names = names

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.names.append(self.model.config._attn_implementation)


# ---- masks that are filled again


class Refilled(nn.Module):
    """A layer whose boolean mask is a buffer, which its user fills again after the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 12, 8).transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(attended.transpose(1, 2).reshape(x.shape))


class RefilledModel(PlainModel):
    def __init__(self) -> None:
        super().__init__([Refilled() for _ in range(3)])
        self.mask = torch.ones(48, 48, dtype=torch.bool).tril()

    @override
    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> object:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, self.mask)
        logits = self.head(x)[:, :-1].reshape(-1, VOCABULARY)
        loss = F.cross_entropy(logits, labels[:, 1:].reshape(-1))
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


class Refilling(Recording):
    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.model.mask.tril_()
        loss = super().training_step(batch, batch_idx)
        self.model.mask.fill_(True)
        return loss


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_mask_that_changes_before_the_backward_is_refused(alpha: float) -> None:
    with pytest.raises(RuntimeError, match="the attention mask of Refilled was changed in place"):
        compare(RefilledModel, {"alpha": alpha}, Refilling)
    compare(RefilledModel, {"alpha": alpha})


# ---- code that is patched


class Patching(Recording):
    """Changes the forward of a class after the strategy has attached, as `mock.patch.object` does."""

    @override
    def on_train_start(self) -> None:
        for kind in (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRMSNorm):
            self._patch(kind)

    def _patch(self, kind: type[nn.Module]) -> None:
        before = kind.forward

        def forward(layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return before(layer, 1.1 * x, *args, **kwargs)

        kind.forward = forward
        self.undo.append(lambda: setattr(kind, "forward", before))

    def __init__(self, family: Callable[[], nn.Module]) -> None:
        super().__init__(family)
        self.undo: list[Callable[[], None]] = []

    @override
    def on_train_end(self) -> None:
        while self.undo:
            self.undo.pop()()


@pytest.mark.parametrize("settings", [{"alpha": 0.0}, {"alpha": 0.5, "loss_chunk_tokens": 16}], ids=str)
def test_a_class_whose_forward_changes(settings: dict[str, Any]) -> None:
    compare(llama, settings, Patching)


class Scaling(Recording):
    """Scales rotary positions in the forward only, which changes queries and keys and nothing that is saved."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        rotate = modeling_llama.apply_rotary_pos_emb
        modeling_llama.apply_rotary_pos_emb = lambda *args: [2.0 * t for t in rotate(*args)]
        try:
            return super().training_step(batch, batch_idx)
        finally:
            modeling_llama.apply_rotary_pos_emb = rotate


def test_recomputed_queries_and_keys_are_compared() -> None:
    with pytest.raises(RuntimeError, match="LlamaDecoderLayer was recomputed with other values than in its forward"):
        fit(MemoStrategy(alpha=0.0), Scaling(llama), batches([make_batch(2, 48)] * 3), max_steps=3)


class Replacing(Recording):
    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        weight = self.model.model.norm.weight
        weight.data = weight.data * 1.1
        return loss


def test_a_weight_of_the_last_norm_that_is_replaced() -> None:
    settings = {"alpha": 0.5, "loss_chunk_tokens": 16}
    with pytest.raises(RuntimeError, match=r"a weight of LlamaRMSNorm, .* was changed between"):
        fit(MemoStrategy(**settings), Replacing(llama), batches([make_batch(2, 48)]), max_steps=1)


def _louder_everywhere(*tensors: Tensor, **arguments: Any) -> Tensor:
    return 1.5 * torch._C._nn.scaled_dot_product_attention(*tensors, **arguments)


@pytest.mark.filterwarnings("ignore:.*layers run as one slice")
@pytest.mark.parametrize("settings", SETTINGS[:2])
@pytest.mark.parametrize("build", [llama, lambda: PlainModel([PlainBlock() for _ in range(3)])], ids=["llama", "block"])
def test_a_function_in_the_place_of_pytorchs(
    build: Callable[[], nn.Module], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As packages of attention kernels advise their users to put it there."""
    torch.manual_seed(0)
    model = build()
    before = loss_and_gradients(model, make_batch(2, 48)).loss
    monkeypatch.setattr(F, "scaled_dot_product_attention", _louder_everywhere)
    assert loss_and_gradients(model, make_batch(2, 48)).loss != before
    compare(lambda: copy.deepcopy(model), settings)
    assert F.scaled_dot_product_attention is _louder_everywhere
