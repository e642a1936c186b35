"""Functions of logits whose vocabulary two processes share have the values and the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.processes import run_in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_memo.parallel.tensor.sharded_logits import ShardedLogits, sharded_logits

ROWS, TOKENS, VOCABULARY = 2, 6, 11  # parts of six and of five token ids


def _labels() -> Tensor:
    labels = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    labels[0, :2], labels[1, 0], labels[1, 1] = -100, 0, VOCABULARY - 1
    return labels


LABELS, KNOWN = _labels(), _labels().clamp_min(0)
VALID = LABELS != -100
REFERENCE = torch.randn(ROWS, TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(2))
WEIGHTS = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(3)) + 0.1


def _cross_entropy(**settings: Any) -> Callable[[Tensor], Tensor]:
    return lambda z: F.cross_entropy(z.float().view(-1, VOCABULARY), LABELS.view(-1), **settings)


def _entropy(z: Tensor) -> Tensor:
    logarithms = z.log_softmax(-1)
    return -(logarithms.exp() * logarithms).sum(-1).mean()


def _smoothed_by_hand(z: Tensor) -> Tensor:
    logarithms = F.log_softmax(z, dim=-1)
    of_label = -logarithms.gather(-1, KNOWN[..., None]).squeeze(-1)
    return ((0.9 * of_label - 0.1 * logarithms.mean(-1)) * VALID).sum() / VALID.sum()


def _preference(z: Tensor) -> Tensor:
    def of_rows(t: Tensor) -> Tensor:
        return (t.log_softmax(-1).gather(-1, KNOWN.unsqueeze(-1)).squeeze(-1) * VALID).sum(-1)

    margins = of_rows(z) - of_rows(REFERENCE)
    return -F.logsigmoid(0.1 * (margins[0] - margins[1]))


def _in_place(z: Tensor) -> Tensor:
    z = z.clone()
    z.div_(2.0)
    z.masked_fill_(torch.arange(VOCABULARY) == 3, -5.0)
    z[0, 0] = 0.0
    return z.softmax(-1).pow(2).sum()


def _z_loss_in_place(z: Tensor) -> Tensor:
    loss = F.cross_entropy(z.flatten(0, 1), LABELS.flatten())
    loss += 1e-2 * torch.logsumexp(z, dim=-1).square().mean()
    return loss


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"cross-entropy {reduction}": _cross_entropy(reduction=reduction) for reduction in ("mean", "sum")},
    "cross-entropy of each token": lambda z: (_cross_entropy(reduction="none")(z) * torch.arange(12.0)).sum(),
    "weights": _cross_entropy(weight=WEIGHTS),
    "weights sum": _cross_entropy(weight=WEIGHTS, reduction="sum"),
    "weights none": lambda z: (_cross_entropy(weight=WEIGHTS, reduction="none")(z) ** 2).sum(),
    "smoothing": _cross_entropy(label_smoothing=0.1),
    "smoothing, weights": _cross_entropy(label_smoothing=0.1, weight=WEIGHTS),
    "smoothing, weights none": lambda z: _cross_entropy(label_smoothing=0.2, weight=WEIGHTS, reduction="none")(z).sum(),
    "another ignored label": lambda z: F.cross_entropy(z.flatten(0, 1), KNOWN.flatten(), ignore_index=0),
    "module": lambda z: nn.CrossEntropyLoss(weight=WEIGHTS)(z.view(-1, VOCABULARY), LABELS.view(-1)),
    "vocabulary in the middle": lambda z: F.cross_entropy(z.transpose(1, 2), LABELS, label_smoothing=0.1),
    "a single token": lambda z: F.cross_entropy(z[1, 2], LABELS[1, 2]),
    "probabilities": lambda z: F.cross_entropy(z.flatten(0, 1), REFERENCE.softmax(-1).flatten(0, 1)),
    "legacy arguments": lambda z: F.cross_entropy(z.flatten(0, 1), LABELS.flatten(), size_average=False),
    "nll_loss": lambda z: F.nll_loss(F.log_softmax(z, -1).flatten(0, 1), LABELS.flatten(), weight=WEIGHTS),
    "entropy": _entropy,
    "entropy of softmax": lambda z: torch.special.entr(z.softmax(dim=-1)).sum(-1).mean(),
    "smoothed by hand": _smoothed_by_hand,
    "mean log-probability": lambda z: torch.log_softmax(z, 2).mean(),
    "log_softmax over tokens": lambda z: z.log_softmax(1)[..., 3].sum(),
    "z-loss": lambda z: z.logsumexp(-1).pow(2).mean(),
    "cross-entropy and z-loss": _z_loss_in_place,
    "divergence": lambda z: F.kl_div(z.log_softmax(-1), REFERENCE.softmax(-1), reduction="batchmean"),
    "divergence by hand": lambda z: (REFERENCE.softmax(-1) * (REFERENCE.log_softmax(-1) - z.log_softmax(-1))).sum(),
    "preference": _preference,
    "in place": _in_place,
    "soft cap": lambda z: F.cross_entropy((torch.tanh(z / 2) * 2)[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten()),
    "chosen tokens": lambda z: F.cross_entropy(z[VALID], LABELS[VALID]),
    "a margin": lambda z: (z.topk(2, -1).values.diff(dim=-1)).sum(),
    "a temperature": lambda z: F.cross_entropy((z / z.detach().amax(-1, True)).flatten(0, 1), KNOWN.flatten()),
    "a bias": lambda z: F.cross_entropy((z + WEIGHTS).flatten(0, 1), LABELS.flatten()),
    "stacked": lambda z: torch.stack([z.sum(), z.square().sum(), torch.ones(())]).sum(),
    "in half precision": lambda z: F.cross_entropy(z.bfloat16().flatten(0, 1), LABELS.flatten()).float(),
    "plain terms": lambda z: z.square().mean() + REFERENCE.mean() + (REFERENCE * z.sigmoid()).mean(),
}  # fmt: skip
METRICS: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda z: ((z.argmax(-1) == LABELS) & VALID).sum().item(),
    "argmax of the log-probabilities": lambda z: z.log_softmax(-1).max(-1).indices.tolist(),
    "perplexity": lambda z: round(float(_cross_entropy()(z).exp()), 4),
    "text": lambda z: f"{_cross_entropy()(z):.3f}",
    "truth": lambda z: bool((z.softmax(-1).sum(-1) - 1 < 1e-5).all()),
    "types": lambda z: (z.dtype, z.shape, z.log_softmax(-1).dtype, z.bfloat16().softmax(-1).dtype, len(z), z.dim()),
    "forms": lambda z: [z.mT.shape, z[..., None].shape, z[:, None].shape, z[0, :2].shape, z.flatten().shape],
}


def _with_gradient(
    loss: Callable[[Tensor], Tensor], z: Tensor, leaf: Tensor, amp: bool = False
) -> tuple[Tensor, Tensor]:
    leaf.grad = None
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        value = loss(z)
    value.backward()
    assert leaf.grad is not None
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach(), leaf.grad


def _worst_errors() -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(ROWS, TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0)).requires_grad_()
    first = 6 * mesh.get_local_rank()
    part = whole.detach()[..., first : first + 6].clone().requires_grad_()
    errors = {}
    for name, loss in LOSSES.items():
        for amp in (False, True):
            value, gradient = _with_gradient(loss, whole, whole, amp)
            got, got_gradient = _with_gradient(loss, sharded_logits(part, mesh, VOCABULARY), part, amp)
            assert got.dtype == value.dtype, name
            bound = gradient.abs().max()
            errors[f"{name} {amp}"] = max(
                float((got - value).abs() / value.abs().clamp_min(1e-3)),
                float((got_gradient - gradient[..., first : first + 6]).abs().max() / bound),
            )
    for name, metric in METRICS.items():
        assert metric(sharded_logits(part, mesh, VOCABULARY)) == metric(whole), name
    return errors


@pytest.mark.slow
def test_functions_of_logits() -> None:
    for errors in run_in_processes(2, _worst_errors):
        # Gradients of half precision are rounded to 8 bits, at other places for a part of the logits.
        bounds = {name: 1e-2 if "half" in name or name.endswith("True") else 1e-5 for name in errors}
        assert all(error <= bounds[name] for name, error in errors.items()), errors


def _unknown_label() -> str:
    mesh = init_device_mesh("cpu", (2,))
    z = sharded_logits(torch.zeros(3, 6 - mesh.get_local_rank()), mesh, VOCABULARY)
    with pytest.raises(RuntimeError, match="out of bounds"):
        F.cross_entropy(z, torch.tensor([0, VOCABULARY, 1]))
    return type(z * 2).__name__


def test_a_label_outside_of_the_vocabulary_is_refused() -> None:
    assert run_in_processes(2, _unknown_label) == [ShardedLogits.__name__] * 2
