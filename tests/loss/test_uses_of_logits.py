"""Unusual uses of chunked logits, of hidden states on the host, and of the modules around the layers."""

from __future__ import annotations

from typing import Any

import pytest
from support.surroundings.programs import Session
from support.surroundings.training import outcome

HOST = {"slice_tokens": 6, "stream_from_host": "hidden"}
WARM = "backward(model(input_ids=tokens(2, 18, 5)).logits.square().mean())\nstep()"
LOGITS = "z = model(input_ids=tokens(2, 18, 1)).logits\n"
LOSS = "\nbackward(F.cross_entropy(z.flatten(0, 1), tokens(2, 18, 1).flatten()))"
PRUNED = "torch.nn.utils.prune.random_unstructured({}, 'weight', 0.3)\n" + LOGITS + LOSS + "\nkeep({}.weight_orig.grad)"

EQUAL = {
    "pruned head": PRUNED.replace("{}", "head"),
    "pruned norm": PRUNED.replace("{}", "norm"),
    "pruned embeddings": PRUNED.replace("{}", "embed"),
    "head with a norm of weights": "torch.nn.utils.weight_norm(head)\n" + LOGITS + LOSS + "\nkeep(head.weight_v.grad)",
    "two heads on the same states": """h = model.model(input_ids=tokens(2, 18, 1)).last_hidden_state
a = head(h)
b = torch.func.functional_call(head, {"weight": head.weight * 2}, (h,))
backward((b - a).square().mean())""",
    "a head that changes between two calls": """h = model.model(input_ids=tokens(2, 18, 1)).last_hidden_state.detach()
a = head(h)
with torch.autocast("cpu", torch.bfloat16):
    b = head(h)
keep((a - b).abs().amax())
backward((a + a).square().mean())""",
    "a hook on the node": LOGITS + "z.grad_fn.register_prehook(lambda g: (g[0] * 0.5,))" + LOSS,
    "a hook on the node of a view": LOGITS + "z = z * 2\nz.grad_fn.register_prehook(lambda g: (g[0] * 0.5,))" + LOSS,
    "other memory": LOGITS + "with torch.no_grad():\n    z.set_((z * 0.5).clone())" + LOSS,
    "small labels": LOGITS + "backward(F.cross_entropy(z.flatten(0, 1), tokens(2, 18, 1).flatten().to(torch.uint8)))",
    "channels last": LOGITS + "backward(z.view(2, 3, 6, 53).to(memory_format=torch.channels_last).square().mean())",
    "metrics of inference": LOGITS
    + "with torch.inference_mode():\n    keep(z.argmax(-1)); keep(z.softmax(-1).max()); keep(z[:, -1].mean())"
    + LOSS,
    "metrics of hidden states": """out = model(input_ids=tokens(2, 18, 1), output_hidden_states=True)
z = out.logits
with torch.inference_mode():
    h = out.hidden_states[-1]
    keep(h.mean()); keep(h.detach().sum()); keep(h[:, 1:].sum())"""
    + LOSS,
}


def verdicts(text: str, **settings: Any) -> list[str]:
    settings = {"alpha": 0.5, "loss_chunk_tokens": 4} | settings
    session = Session("llama", "nothing", "loop", settings, (((WARM,),), ((text,),)), (frozenset(),) * 2)
    return [f"{found.kind} {found.why}" for found in outcome(session)]


@pytest.mark.usefixtures("own_folder")
def test_logits_after_a_step_that_counts_no_change() -> None:
    """Some optimizers write weights through `data`, or by compiled code."""
    text = """class Steps(torch.optim.SGD):
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(5 * p.grad)
out = model(input_ids=tokens(2, 18, 1))
backward(out.logits.logsumexp(-1).mean())
keep(head.weight.grad)
Steps(model.parameters(), 0.1).step()
keep(out.logits.detach().abs().mean())"""
    found = verdicts(text)[1]
    assert found.startswith("refused") and "logits.detach().clone()" in found, found


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("settings", [{}, HOST], ids=["logits", "host"])
@pytest.mark.parametrize("name", EQUAL)
def test_is_as_in_plain_training(name: str, settings: dict[str, Any]) -> None:
    assert verdicts(EQUAL[name], **settings) == ["equal "] * 2
