"""Layers that compute each token by itself are told from layers that do not, whatever their weights and inputs are."""

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.families import FAMILIES, make_batch
from support.harness import EngineUnderTest
from support.parallel_training import Run, train
from support.processes import run_in_processes
from torch import nn

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.token_locality.prove_locality import LocalityProofs, prove_locality

NAME = "lightning_memo.engine.token_locality.prove_locality.prove_locality"
TOKENS, HIDDEN, HEADS = 24, 16, 4


class Layer(nn.Module):
    """A pre-norm layer, into which a function of [batch, tokens, hidden] is inserted before the output."""

    def __init__(self, inserted):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, HIDDEN))
        self.gate = nn.Parameter(torch.zeros(HIDDEN))
        self.table = nn.Parameter(torch.zeros(64, HIDDEN))
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=2, groups=HIDDEN)
        self.router = nn.Linear(HIDDEN, 4)
        self.register_buffer("mask", torch.ones(64, 64).tril().bool())
        self.inserted = inserted

    def forward(self, x, scale=None):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, HIDDEN))
        x = x + self.mlp(self.norm(x))
        return self.inserted(self, x)


def why(inserted, train=True, **kwargs):
    layer = Layer(inserted).train(train)
    return prove_locality(
        LayerCall(layer, layer.forward, (), kwargs, TOKENS, 2), torch.randn(2, TOKENS, HIDDEN)
    ).why_not


def route(layer, x):
    scores, chosen = layer.router(x).softmax(-1).topk(2)
    return x, scores, F.one_hot(chosen, 4)


def experts(layer, x):
    flat = x.view(-1, HIDDEN)
    scores = layer.router(flat).softmax(-1)
    return (torch.stack([flat * n for n in range(4)], 1) * scores[..., None]).sum(1).view_as(x)


def in_place(layer, x):
    y = torch.zeros_like(x)
    y[..., : HIDDEN // 2] = x[..., HIDDEN // 2 :]
    return y.add_(x).mul_(2.0)


class ByAddress(torch.autograd.Function):
    """Computes from an address, as kernels of Triton and of C++ extensions do. The address 0 would end the process."""

    @staticmethod
    def forward(ctx, x):
        address = x.data_ptr()
        assert address
        return x * 2

    @staticmethod
    def backward(ctx, dx):
        return dx * 2


LOCAL = {
    "nothing": lambda layer, x: x,
    "elementwise": lambda layer, x: torch.where(x > 0, x, x.exp() - 1) * layer.gate,
    "sum over hidden": lambda layer, x: x * x.pow(2).mean(-1, keepdim=True).rsqrt(),
    "norms": lambda layer, x: F.rms_norm(F.layer_norm(x, (HIDDEN,)), (HIDDEN,)) / x.norm(dim=-1, keepdim=True),
    "matrix products": lambda layer, x: torch.einsum("btd,de->bte", x, layer.qkv.weight[:HIDDEN]),
    "tokens and batch in one dimension": lambda layer, x: layer.out(x.reshape(-1, HIDDEN)).view_as(x),
    "heads": lambda layer, x: (
        x.view(2, -1, 4, 4).transpose(1, 2).flatten(0, 1).view(2, 4, -1, 4).transpose(1, 2).flatten(2)
    ),
    "softmax, sort and cumulative sum over hidden": lambda layer, x: x.softmax(-1).sort(-1).values.cumsum(-1),
    "flip and roll of hidden": lambda layer, x: x.flip(-1).roll(1, -1),
    "rotation": lambda layer, x: torch.cat([-x[..., 8:], x[..., :8]], -1) * x.chunk(2, -1)[0].repeat(1, 1, 2),
    "complex numbers": lambda layer, x: torch.view_as_real(torch.view_as_complex(x.view(2, -1, 8, 2)) * 1j).flatten(2),
    "look-up by token": lambda layer, x: x + layer.table[x.argmax(-1)] + F.embedding(x.argmin(-1), layer.table),
    "gather": lambda layer, x: x + x.gather(-1, x.topk(2).indices).sum(-1, keepdim=True),
    "gather from a table": lambda layer, x: (
        x + layer.table.expand(2, -1, -1).gather(1, x.argmax(-1, keepdim=True).expand(-1, -1, HIDDEN))
    ),
    "router": route,
    "experts": experts,
    "in place": in_place,
    "new tensors of one value": lambda layer, x: x + x.new_zeros(2, x.shape[1], HIDDEN) + torch.ones(x.shape[1], 1),
    "dropout": lambda layer, x: F.dropout(x, 0.5) + layer.mlp(x),
}

MIXING = {
    "convolution": lambda layer, x: x + layer.conv(x.transpose(1, 2))[..., :-2].transpose(1, 2),
    "gate at zero": lambda layer, x: x + layer.gate * x.mean(1, keepdim=True),
    "closed tanh gate": lambda layer, x: x + layer.gate.tanh() * F.pad(x, (0, 0, 1, 0))[:, :-1],
    "shift": lambda layer, x: x + torch.cat([x[:, :1], x[:, :-1]], 1),
    "roll": lambda layer, x: x + x.roll(1, 1),
    "roll of the flattened tensor": lambda layer, x: x + x.roll(1),
    "flip": lambda layer, x: x + x.flip(1),
    "cumulative sum": lambda layer, x: x + x.cumsum(1),
    "maximum": lambda layer, x: x - x.amax(1, keepdim=True),
    "softmax over tokens": lambda layer, x: x + x.softmax(1),
    "sort by tokens": lambda layer, x: x.sort(1).values,
    "batch statistics": lambda layer, x: F.batch_norm(x.flatten(0, 1), None, None, training=True).view_as(x),
    "norm over tokens": lambda layer, x: F.layer_norm(x.transpose(1, 2), (x.shape[1],)).transpose(1, 2),
    "group norm": lambda layer, x: F.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "product of tokens": lambda layer, x: x + (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "product over tokens": lambda layer, x: x @ (x.transpose(1, 2) @ x),
    "outer difference": lambda layer, x: x + (x[:, :, None] - x[:, None]).sum((1, 2), keepdim=True)[:, 0],
    "scrambled view": lambda layer, x: x.transpose(1, 2).reshape(2, -1, HIDDEN),
    "pairs of tokens": lambda layer, x: x.view(2, -1, 2, HIDDEN).flip(2).flatten(1, 2),
    "first token": lambda layer, x: x + x[:, :1],
    "last token": lambda layer, x: x + x[:, -1:],
    "edit of a token": lambda layer, x: torch.cat([x[:, :-1], x[:, -1:] * 2], 1),
    "edit of a token in place": lambda layer, x: x.clone().index_fill_(1, torch.tensor([0]), 0.0),
    "sum into all": lambda layer, x: torch.zeros_like(x).index_add_(1, torch.zeros(x.shape[1], dtype=torch.long), x),
    "token chosen by token": lambda layer, x: x.gather(1, x.argmax(1, keepdim=True).expand_as(x)),
    "order of arrival": lambda layer, x: x * (F.one_hot(x.argmax(-1), HIDDEN).cumsum(1) < 4),
    "unfolded": lambda layer, x: x + F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1),
    "fourier": lambda layer, x: torch.fft.fft(x, dim=1).real,
    "interpolation": lambda layer, x: (
        F.interpolate(x.transpose(1, 2), scale_factor=1.0).transpose(1, 2) + x.mean(1, True)
    ),
    "position": lambda layer, x: x + torch.arange(x.shape[1])[None, :, None],
    "position in a table": lambda layer, x: x + layer.table[: x.shape[1]],
    "position by look-up": lambda layer, x: x + F.embedding(torch.arange(x.shape[1]), layer.table),
    "mask made inside": lambda layer, x: x * torch.ones(x.shape[1], x.shape[1]).tril().sum(1)[None, :, None],
    "mask in a buffer": lambda layer, x: x * layer.mask[: x.shape[1], 0, None],
    "line of numbers": lambda layer, x: x * torch.linspace(0, 1, x.shape[1])[:, None],
    "number of tokens": lambda layer, x: x / x.shape[1],
    "logarithm of their number": lambda layer, x: x * math.log(x.shape[1]),
    "number in a tensor": lambda layer, x: x * torch.tensor(x.shape[1]).rsqrt(),
    "number of elements": lambda layer, x: x / x.numel(),
    "other computation for more tokens": lambda layer, x: x.relu() if x.shape[1] > 16 else x,
    "odd number": lambda layer, x: x[:, : x.shape[1] // 2 * 2].repeat(1, 1, 1),
    "data": lambda layer, x: x * 2 if x.sum() > 0 else x,
    "chosen rows": lambda layer, x: x + x[x > 0].sum(),
    "noise": lambda layer, x: x + torch.randn_like(x),
    "alpha dropout": lambda layer, x: F.alpha_dropout(x, 0.5, training=True),
    "a statistic besides": lambda layer, x: (x, layer.router(x).softmax(-1).mean((0, 1))),
    "no hidden states": lambda layer, x: {"mean": x.mean(-1)},
}


@pytest.mark.parametrize("name", LOCAL)
def test_local(name):
    assert why(LOCAL[name]) == ""


@pytest.mark.parametrize("name", MIXING)
def test_mixing(name):
    assert why(MIXING[name]) != ""


def test_a_tensor_that_is_kept():
    def keep(layer, x):
        layer.kept = x
        return x

    assert "writes to Layer.kept" in why(keep)


@pytest.mark.parametrize(
    ("family", "forms"), [("llama", 1), ("gemma3_mixed_windows", 2), ("gpt2", 1), ("mixtral", 1), ("block", 1)]
)
def test_layers_that_are_alike_are_proven_once(family, forms, monkeypatch):
    """Their positions, windows and activation functions are other objects in each layer."""
    proofs = []

    def counted(*args):
        proofs.append(args)
        return prove_locality(*args)

    monkeypatch.setattr(NAME, counted)
    with EngineUnderTest(FAMILIES[family].build()) as under_test:
        under_test.profile_step(make_batch(2, 24))
        assert not under_test.engine.layer_classes.unsliceable
    assert len(proofs) == forms


def proofs_of_training(settings):
    """Train in this process, one of a group, and return the number of proofs."""
    with mock.patch(NAME, wraps=prove_locality) as proofs:
        train(Run(steps=1), {"alpha": 0.5} | settings)
    return proofs.call_count


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"zero_stage": 3}, {"zero_stage": 1}, {"tensor_parallel_size": 2}], ids=str)
def test_layers_that_are_divided_over_processes_are_proven_once(settings):
    """FSDP2 and the styles of tensor parallelism give each layer objects of its own."""
    assert run_in_processes(2, proofs_of_training, settings) == [1, 1]


def mixes_unless(same):
    return lambda layer, x: x if same(layer.mode) else x.cumsum(1)


@pytest.mark.parametrize(
    ("modes", "inserted"),
    [
        ((3, None), mixes_unless(lambda mode: mode is not None)),
        ((False, True), mixes_unless(lambda mode: mode is not True)),
        ((F.relu, F.gelu), mixes_unless(lambda mode: mode is not F.gelu)),
        ((3, 3.0), mixes_unless(lambda mode: not isinstance(mode, float))),
        (("full", "sliding"), mixes_unless(lambda mode: mode != "sliding")),
        ([torch.Generator() for _ in range(2)], lambda layer, x: x + torch.empty_like(x).normal_(generator=layer.mode)),
    ],
    ids=["none", "flag", "function", "type", "value", "generator"],
)
@pytest.mark.parametrize("first", [0, 1])
def test_layers_that_differ_in_what_they_use_are_proven_each(modes, inserted, first):
    layers = [Layer(inserted) for _ in modes]
    for layer, mode in zip(layers, modes, strict=True):
        layer.mode = mode
    proofs, x = LocalityProofs(layers), torch.randn(2, TOKENS, HIDDEN)
    for layer in (layers[first], layers[1 - first]):
        call = LayerCall(layer, layer.forward, (), {}, TOKENS, 2)
        assert proofs.of(call, x, "the same class and call").why_not == prove_locality(call, x).why_not


def test_a_kernel_that_nobody_knows_gets_no_address_of_a_tensor_without_values():
    assert why(lambda layer, x: ByAddress.apply(x)).endswith(
        "it runs a kernel of its own, of Triton or of an extension, which may relate any tokens"
    )
