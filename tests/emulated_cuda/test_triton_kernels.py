"""The stand-ins for liger-kernel's kernels: numbers, and what they overwrite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

ops = pytest.importorskip("liger_kernel.ops")

Function = Callable[..., Tensor | tuple[Tensor, ...]]
TOKENS, WIDTH = 24, 64
GATED, NORMED = [(1, TOKENS, WIDTH)] * 2, [(1, TOKENS, WIDTH), (WIDTH,)]
HEADS = [(1, TOKENS, 4, 16), (1, TOKENS, 2, 16)]  # before the dimensions are exchanged
ANGLES = torch.outer(torch.arange(TOKENS), 0.5 ** torch.arange(8)).repeat(1, 2)[None]


def liger_rope(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (t.to(q) for t in (ANGLES.cos(), ANGLES.sin()))
    rotated: tuple[Tensor, Tensor] = ops.LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return rotated


def rope(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(
        q.transpose(1, 2), k.transpose(1, 2), ANGLES.cos(), ANGLES.sin()
    )
    return rotated


def liger_norm(offset: float = 0.0, casting: str = "llama", in_place: bool = True) -> Function:
    return lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-6, offset, casting, in_place)


CASES: dict[str, tuple[Function, Function, list[tuple[int, ...]]]] = {
    "rope": (liger_rope, rope, HEADS),
    "swiglu": (ops.LigerSiLUMulFunction.apply, lambda a, b: functional.silu(a) * b, GATED),
    "scaled swiglu": (
        lambda a, b: ops.LigerSiLUMulFunction.apply(a, b, 0.7),
        lambda a, b: functional.silu(0.7 * a) * b,
        GATED,
    ),
    "geglu": (ops.LigerGELUMulFunction.apply, lambda a, b: functional.gelu(a, approximate="tanh") * b, GATED),
    "norm": (liger_norm(), lambda x, w: functional.rms_norm(x, (WIDTH,), w, 1e-6), NORMED),
    "norm without a weight": (
        lambda x: liger_norm()(x, None),
        lambda x: functional.rms_norm(x, (WIDTH,), None, 1e-6),
        NORMED[:1],
    ),
    "gemma's norm": (
        liger_norm(1.0, "gemma", in_place=False),
        lambda x, w: functional.rms_norm(x, (WIDTH,), w + 1, 1e-6),
        NORMED,
    ),
}


def outputs_and_gradients(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    made = function(*(t.clone() for t in leaves))
    outputs = made if isinstance(made, tuple) else (made,)
    kept = [t.detach().clone() for t in outputs]
    torch.manual_seed(2)
    torch.autograd.backward(outputs, [torch.randn(t.shape).to(t) for t in outputs])
    return [*kept, *(t.grad for t in leaves if t.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_formula(name, dtype):
    liger, plain, shapes = CASES[name]
    torch.manual_seed(1)
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    found = outputs_and_gradients(liger, [t.cuda() for t in inputs])
    expected = outputs_and_gradients(plain, [t.float() for t in inputs])
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        assert float((mine.cpu() - theirs).norm() / theirs.norm()) < (1e-6 if dtype == torch.float32 else 2**-7)


def test_kernels_overwrite_what_they_do_on_a_gpu():
    q, k = (torch.randn(shape, device="cuda") for shape in HEADS)
    rotated = liger_rope(q, k)
    assert [t.data_ptr() for t in rotated] == [q.data_ptr(), k.data_ptr()]
    assert torch.equal(rotated[0].transpose(1, 2), q)

    a, b, x, dy = (torch.randn(2, WIDTH, device="cuda") for _ in range(4))
    leaves = [t.detach().requires_grad_() for t in (a, b, x)]
    gradients = torch.autograd.grad(ops.LigerSiLUMulFunction.apply(*leaves[:2]), leaves[:2], torch.ones_like(a))
    assert [t.data_ptr() for t in gradients] == [a.data_ptr(), b.data_ptr()]
    (dx,) = torch.autograd.grad(liger_norm()(leaves[2], None), leaves[2], dy)
    assert dx.data_ptr() == dy.data_ptr()


def test_other_kernels_are_refused():
    logits = torch.zeros(2, 8, device="cuda")
    with pytest.raises(AttributeError, match="liger_cross_entropy_kernel"):
        ops.LigerCrossEntropyFunction.apply(logits, torch.zeros(2, dtype=torch.long, device="cuda"), None)
