"""Layers as users write them: key masks, gates that are scalars, scripted modules, observers, caches."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention.recorded_training import Recording, blocks, compare
from support.families import VOCABULARY, PlainBlock, PlainModel
from support.markers.slow import slow_if
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, enable_observer
from torch.nn.modules.module import register_module_forward_hook
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

pytestmark = pytest.mark.usefixtures("own_folder")

ALPHAS = [0.0, 0.5, 1.0]
HOST = {"alpha": 0.5, "slice_tokens": 8, "stream_from_host": "hidden"}


class KeyMasked(PlainBlock):
    """Makes a mask of keys from an argument `[batch, tokens]`, or from its input."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.scores = nn.Linear(32, 1) if own else None

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mask = keep if self.scores is None else self.scores(x)[..., 0].detach()
        heads = (t.transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(*heads, attn_mask=mask[:, None, None, :])
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class KeyMaskedModel(PlainModel):
    def __init__(self, own: bool = False, bias: bool = False) -> None:
        super().__init__([KeyMasked(own) for _ in range(3)])
        self.bias = bias

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x, keep = self.embed(input_ids), torch.ones(input_ids.shape, dtype=torch.bool)
        keep[1, -9:] = False
        mask = torch.linspace(-2, 2, keep.numel()).view_as(keep) if self.bias else keep
        for block in self.blocks:
            x = block(x, mask)
        return loss_of(self, x, labels)


def loss_of(model: PlainModel, x: Tensor, labels: Tensor) -> CausalLMOutput:
    return CausalLMOutput(loss=F.cross_entropy(model.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].flatten()))


@slow_if(lambda own, bias, alpha: alpha != 0.5 and not (own and bias))
@pytest.mark.parametrize("alpha", [0.0, 0.5, 47 / 48, 1.0])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_masks_of_keys_that_layers_make(own: bool, bias: bool, alpha: float) -> None:
    compare(lambda: KeyMaskedModel(own, bias), {"alpha": alpha})


class TrainedMask(PlainModel):
    """Hands its blocks a mask that is trained."""

    def __init__(self) -> None:
        super().__init__([Masked() for _ in range(3)])
        self.mask = nn.Parameter(torch.randn(48, 48))

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, self.mask)
        return loss_of(self, x, labels)


class Masked(PlainBlock):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_mask_that_is_trained(alpha: float) -> None:
    compare(TrainedMask, {"alpha": alpha})


class ScalarGate(PlainBlock):
    """A gate without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * super().forward(x)


class Recurrent(PlainBlock):
    """Its backward needs a workspace of which some bytes have no meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.lstm(x)[0]


class Scripted(PlainBlock):
    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.GELU()))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.extra(x)


class Observing(PlainBlock):
    """Rounds as quantised inference will, with scales that observers find."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded = FakeQuantize()
        self.rounded.disable_observer()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.rounded(x))


class LateObserving(Recording):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.model.apply(enable_observer)


class Least(OrderedDict):
    """A cache whose class has another constructor."""

    def __init__(self, size: int, name: str) -> None:
        super().__init__()


class Recent(deque):
    def __init__(self, size: int) -> None:
        super().__init__(maxlen=size)


class Holding(PlainBlock):
    """Holds containers of many classes, and writes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.recent, self.last = Least(3, "scales"), Recent(2), BaseModelOutput()
        self.table = dict.fromkeys(range(100_000))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.cache["scale"], self.last["last_hidden_state"] = 1.5, x
        self.recent.append(x.detach())
        return x * self.cache["scale"]


class Accumulating(PlainBlock):
    """Adds to tensors in place: a sum with a history, and a statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.statistic = torch.zeros(())
        self.register_buffer("sum", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.sum += x.square().mean()
        self.statistic.mul_(0.9).add_(x.detach().mean())
        return x


class Summing(Recording):
    """Adds what blocks have summed to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for block in self.model.blocks:
            block.sum = torch.zeros(())
        loss: Tensor = self.model(**batch).loss
        return loss + sum(block.sum for block in self.model.blocks)


@slow_if(lambda kind, alpha: alpha != 0.5 and kind is not Recurrent)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("kind", [ScalarGate, Recurrent, Holding])
def test_blocks(kind: type[nn.Module], alpha: float) -> None:
    compare(blocks(kind), {"alpha": alpha})


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("kind", "module"), [(Accumulating, Summing), (Observing, LateObserving)])
def test_blocks_that_write(kind: type[nn.Module], module: Callable[..., Recording], alpha: float) -> None:
    compare(blocks(kind), {"alpha": alpha}, module)


def test_scripted_modules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^extra of Scripted is scripted .*: use the module that was scripted$"):
        compare(blocks(Scripted), {"alpha": 0.5})


class Annealed(PlainBlock):
    strength = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.strength * super().forward(x)


class Annealing(Recording):
    """Sets a number in each step, whose batches have other lengths."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for block in self.model.blocks:
            block.strength = 0.1 * batch_idx
        for name in ("input_ids", "labels"):
            batch[name] = batch[name][:, : 48 - batch_idx]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"alpha": 0.5}, HOST])
def test_numbers_that_change_in_each_step(settings: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    compare(blocks(Annealed), settings, Annealing, steps=20)
    assert not [w for w in recwarn if "lightning_memo" in str(w.message)]


class Replacing(Recording):
    """Replaces the forward of a part of a layer before the third step, by one that mixes tokens."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        mlp = self.model.blocks[1].mlp
        if batch_idx == 2:
            mlp.forward = lambda x, forward=mlp.forward: forward(x) + x.roll(1, 1)


@pytest.mark.parametrize("settings", [{"alpha": 0.5}, {"alpha": 1.0, "slice_tokens": 8}])
def test_a_forward_that_is_replaced(settings: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="PlainBlock may not compute each token by itself.*It runs as one slice now"):
        compare(blocks(PlainBlock), settings, Replacing, steps=4)


def mixing(t: Tensor) -> Tensor:
    return t + 0.1 * t.cumsum(1)


def separate(t: Tensor) -> Tensor:
    return t + 0.1


of_users: Any = separate
TABLE: dict[str, Any] = {"function": torch.tanh}


def add_hook(model: nn.Module) -> list[Any]:
    return [model.blocks[1].mlp[0].register_forward_hook(lambda module, inputs, output: mixing(output))]


def add_pre_hook(model: nn.Module) -> list[Any]:
    return [model.blocks[1].mlp.register_forward_pre_hook(lambda module, inputs: (mixing(inputs[0]),))]


def add_backward_hook(model: nn.Module) -> list[Any]:
    return [model.blocks[1].mlp.register_full_backward_hook(lambda module, dx, dy: (mixing(dx[0]),))]


def add_global_hook(model: nn.Module) -> list[Any]:
    own = model.blocks[1].mlp[0]
    return [register_module_forward_hook(lambda module, inputs, y: mixing(y) if module is own else None)]


def replace_global_function(model: nn.Module) -> list[Any]:
    globals()["of_users"] = mixing
    return [Restoring(lambda: globals().update(of_users=separate))]


def replace_in_global_dict(model: nn.Module) -> list[Any]:
    TABLE["function"] = mixing
    return [Restoring(lambda: TABLE.update(function=torch.tanh))]


class Restoring:
    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


def add_function(model: nn.Module) -> list[Any]:
    model.blocks[1].functions.append(mixing)
    return []


class CallsFunctions(PlainBlock):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Callable[[Tensor], Tensor]] = [torch.tanh]

    def forward(self, x: Tensor) -> Tensor:
        y = TABLE["function"](of_users(super().forward(x)))
        for function in self.functions:
            y = function(y)
        return y


class Adding(Recording):
    """Adds something that mixes tokens before the third step."""

    def __init__(self, build: Any, add: Callable[[nn.Module], list[Any]]) -> None:
        super().__init__(build)
        self._add = add
        self._handles: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self._handles += self._add(self.model)

    def on_train_end(self) -> None:
        super().on_train_end()
        for handle in self._handles:
            handle.remove()


ADDED = [
    add_hook,
    add_pre_hook,
    add_backward_hook,
    add_global_hook,
    add_function,
    replace_global_function,
    replace_in_global_dict,
]


@pytest.mark.parametrize("add", ADDED)
def test_what_is_added_while_training(add: Callable[[nn.Module], list[Any]]) -> None:
    with pytest.warns(UserWarning, match="CallsFunctions may not compute each token.*It runs as one slice now"):
        compare(blocks(CallsFunctions), {"alpha": 0.5}, lambda build: Adding(build, add), steps=5)


class AttendsPerHead(PlainBlock):
    """Calls attention within torch.vmap."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        x = x + self.out(torch.vmap(attend, 2, 2)(q, k, v).flatten(2))
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_attention_in_vmap(alpha: float) -> None:
    compare(blocks(AttendsPerHead), {"alpha": alpha})


class PerSequence(PlainModel):
    """Calls its blocks within torch.vmap."""

    def __init__(self) -> None:
        super().__init__([PlainBlock() for _ in range(3)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = torch.vmap(block)(x[:, None])[:, 0]
        return loss_of(self, x, labels)


def test_layers_in_vmap_are_refused() -> None:
    with pytest.raises(ValueError, match=r"PlainBlock is called within torch\.vmap or a transform of torch.func"):
        compare(PerSequence, {"alpha": 0.5})


class MainGradients(Recording):
    """Sums gradients in attributes of parameters, for two forwards before two backwards."""

    def __init__(self, family: Callable[[], nn.Module]) -> None:
        super().__init__(family)
        self.automatic_optimization = False

    def configure_model(self) -> None:
        for p in self.model.parameters():
            p.main_grad = torch.zeros_like(p)
            p.register_post_accumulate_grad_hook(self._sum)

    @staticmethod
    def _sum(p: Tensor) -> None:
        p.main_grad.add_(p.grad)
        p.grad = None

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> None:
        losses = [self.model(**batch).loss, self.model(**batch).loss * 2]
        for loss in losses:
            self.manual_backward(loss)
        self.gradients.append({name: p.main_grad.clone() for name, p in self.model.named_parameters()})
        self.optimizers().step()


class LateBias(PlainBlock):
    """Adds a bias last, which an optimizer in the backward changes before the layer is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class OptimizerInBackward(Recording):
    def configure_model(self) -> None:
        for name, p in self.model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._step(name, p))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.gradients.append({})

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    @torch.no_grad()
    def _step(self, name: str, p: Tensor) -> None:
        self.gradients[-1][name] = p.grad.clone()
        p.sub_(p.grad, alpha=1e-2)


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("module", [MainGradients, OptimizerInBackward])
def test_loops(module: Callable[..., Recording], alpha: float) -> None:
    compare(blocks(LateBias), {"alpha": alpha}, module)


class NotContiguous(PlainModel):
    """Hands its blocks a transposed input, and uses it afterwards."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x = self.embed(input_ids.T).transpose(0, 1)
        return loss_of(self, self.blocks[0](x) + x, labels)


class Frozen(PlainModel):
    """Hands its blocks an input without a history, and uses it afterwards."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x = self.embed(input_ids).detach()
        return loss_of(self, self.blocks[0](x) + x, labels)


class InPlace(PlainBlock):
    def forward(self, x: Tensor) -> Tensor:
        x += self.out.bias
        return super().forward(x)


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(
    ("model", "line"), [(NotContiguous, "which is not contiguous"), (Frozen, "and the model uses")]
)
def test_inputs_that_are_changed(model: type[PlainModel], line: str, alpha: float) -> None:
    with pytest.raises(ValueError, match=f"InPlace changes its input in place, {line}"):
        compare(lambda: model([InPlace() for _ in range(3)]), {"alpha": alpha})
