"""Programs drawn at random do around the layers what users do there, and train as in plain PyTorch or are refused.

A program has one to three steps with writes in place, views, hooks, modes, losses, partial backwards, evaluations and
interruptions at random moments. Its verdict is "equal", "both raise", "refused" (by one clear line of this package) or
"different", which fails. Writes that autograd does not notice (`.data`, NumPy) may be "untracked".

`DRAWS=25 pytest tests/engine/test_random_surroundings.py` draws 25 times as many.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.draws import draws
from support.markers.slow import slow_if
from support.surroundings.programs import Session
from support.surroundings.training import drawn, outcome, shortest

from lightning_memo.loss.logits_recipe import Recipe

CHUNKS, SESSIONS = 6, draws(12)  # of about 17 programs
MOST_REFUSED = 0.25


@slow_if(lambda chunk: chunk >= 1)
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_trains_as_plain_training_or_refuses(chunk: int) -> None:
    counts, failures = Counter[str](), list[str]()
    for seed in range(chunk, SESSIONS, CHUNKS):
        session = drawn(seed)
        for number, verdict in enumerate(outcome(session)):
            counts[verdict.kind] += 1
            if verdict.kind == "different":
                short = shortest(session, number, verdict.why)
                failures.append(f"seed {seed}, program {number}: {verdict.why}\n{short}")
    assert not failures, f"{dict(counts)}\n" + "\n\n".join(failures)
    assert counts["refused"] <= MOST_REFUSED * counts.total(), counts  # refusing is no way out


WRITTEN = """ids = tokens(2, 12, 1)
out = model(input_ids=ids, output_hidden_states=True)
with torch.no_grad():
    out.hidden_states[-1].mul_(2)
backward(out.logits.logsumexp(-1).square().mean())"""


def of_program(text: str, **settings: Any) -> Session:
    return Session("llama", "head", "loop", {"loss_chunk_tokens": 4} | settings, (((text,),),), (frozenset(),))


@pytest.mark.usefixtures("own_folder")
def test_a_lost_write_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = outcome(of_program(WRITTEN))
    assert found.kind == "refused"
    monkeypatch.setattr(Recipe, "x", property(lambda recipe: recipe.hidden.tensor))
    (found,) = outcome(of_program(WRITTEN))
    assert found.kind == "different" and "relative error" in found.why


@pytest.mark.usefixtures("own_folder")
def test_an_exception_of_pytorch_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Recipe, "x", property(fail))
    (found,) = outcome(of_program(WRITTEN))
    assert found.kind == "different" and found.why.startswith("raises AssertionError")
