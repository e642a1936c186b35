"""Configurations drawn at random either train as plain training does, or are refused in one clear line.

`DRAWS=50 pytest tests/strategy/test_random_configurations.py` draws 50 times as many, other ones each time.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from support.draws import REPEATABLE, draws
from support.families import FAMILIES
from support.modes import BY_ALPHA, BY_KIND, JOINT
from support.random_training import PARTS, STEPS, Configuration, assert_as_plain, train, train_with_memo


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


ALPHAS = st.one_of(one_of("auto", 0.0, 0.5, 1.0), st.floats(0.0, 1.0))
# Ways of running the layers that go together; what does not is drawn by `WILD`.
SLICES = st.integers(1, 70)
WAYS = {
    "alpha": {
        "alpha": ALPHAS,
        "slice_tokens": st.one_of(one_of("auto"), SLICES),
        "stream_from_host": one_of("none"),
        "test_mode": one_of(None, JOINT),
    },
    "kinds": {"test_mode": one_of(BY_KIND)},
    "streamed": {"alpha": ALPHAS, "slice_tokens": SLICES, "stream_from_host": one_of("auto", "attention", "hidden")},
    "slice": {"alpha": ALPHAS, "slice_tokens": SLICES, "stream_from_host": one_of("model")},
}
WILD = {
    "alpha": st.one_of(ALPHAS, one_of(-1, 2.0, "half", None)),
    "test_mode": one_of(None, BY_ALPHA, BY_KIND, JOINT),
    "slice_tokens": st.one_of(one_of("auto", 0), SLICES),
    "stream_from_host": one_of("auto", "none", "attention", "hidden", "model"),
}
COMMON = {
    "loss_chunk_tokens": one_of("auto", None, 1, 7, 30, 64),
    "plan_memory": one_of(False, False, False, True),
    "host_memory": one_of(None, None, "1MiB", "100KiB", "1KiB"),
    "device_memory": one_of(None, "1MiB", "100KiB", "10KiB", "1GiB"),
    "disk_path": one_of(None, None, True),
}


@st.composite
def strategies(draw: st.DrawFn, slices_of_models: bool) -> dict[str, Any]:
    ways = [way for way in WAYS.values() if slices_of_models or way is not WAYS["slice"]]
    way = draw(st.sampled_from([*ways, *ways, WILD]))
    drawn = {name: draw(values) for name, values in (way | COMMON).items()}
    if way in (WAYS["streamed"], WAYS["slice"]):  # these refuse a disk
        drawn["disk_path"] = None
    return {name: value for name, value in drawn.items() if value is not None or name == "loss_chunk_tokens"}


@st.composite
def shapes(draw: st.DrawFn, hugging_face: bool) -> dict[str, Any]:
    heads = draw(one_of(1, 2, 4))
    shape: dict[str, Any] = {"num_hidden_layers": draw(st.integers(2, 5)), "num_attention_heads": heads}
    if hugging_face:
        shape["num_key_value_heads"] = draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]))
        shape["tie_word_embeddings"] = draw(st.booleans())
        shape["attention_dropout"] = draw(one_of(0.0, 0.0, 0.0, 0.2))
    return shape


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    family = draw(st.sampled_from(list(FAMILIES)))
    hugging_face = not family.startswith(("block", "encoder"))
    shape = draw(shapes(hugging_face))
    if family.startswith("gpt"):
        for name in ("num_key_value_heads", "attention_dropout"):
            shape.pop(name)
    # Half precision may send a token to another expert, or cross the kink of a ReLU: no small difference any more.
    jumps = family in ("mixtral", "qwen3_moe", "encoder_layer")
    tokens = st.integers(2, 70)
    manual = draw(st.booleans())
    trainer: dict[str, Any] = {
        "precision": draw(one_of("32-true", "bf16-true", "bf16-mixed")) if not jumps else "32-true"
    }
    if not manual:
        trainer["accumulate_grad_batches"] = draw(one_of(1, 1, 2, 3))
        trainer |= draw(
            one_of({}, {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"})
        )
    unlabelled = draw(one_of(0.0, 0.0, 0.3, 0.3, 0.3, 1.0))
    steps = [step for step in STEPS if unlabelled < 1.0 or step != "reference"]  # a gradient of NaN times nothing
    return Configuration(
        family=family,
        shape=shape,
        part=draw(st.sampled_from(PARTS)) if hugging_face else "all",
        lengths=tuple(draw(st.lists(tokens, min_size=2, max_size=3))),
        rows=draw(st.integers(1, 3)),
        kind=draw(st.sampled_from(KINDS)) if hugging_face else "full",
        unlabelled=unlabelled,
        step=draw(st.sampled_from(steps)),
        manual=manual,
        validation=draw(st.booleans()),
        trainer=trainer,
        # GPT-2's forward and plain models have no losses of slices.
        strategy=draw(strategies(slices_of_models=hugging_face and not family.startswith("gpt2"))),
    )


KINDS = ("full",) * 4 + ("padded",) * 3 + ("packed",) * 3 + ("left padded",)


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("count", [3, pytest.param(63, marks=pytest.mark.slow)])
def test_trains_as_plain_training_or_refuses(count: int) -> None:
    trained: list[bool] = []

    @settings(
        max_examples=draws(count), derandomize=REPEATABLE, database=None, print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(configuration=configurations())
    def each(configuration: Configuration) -> None:
        note(repr(configuration))
        answer = train_with_memo(configuration)
        trained.append(not isinstance(answer, str))
        if not isinstance(answer, str):
            assert_as_plain(configuration, answer, train(configuration, "auto"))

    each()
    assert sum(trained) >= len(trained) // 3  # refusing is no way out; half of the draws train on average
