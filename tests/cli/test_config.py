from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memo.config import MemoConfig
from lightning_memo.utils.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [
        (1, 1),
        ("7", 7),
        ("512 B", 512),
        ("300MiB", 300 * 2**20),
        ("120GiB", 120 * 2**30),
        ("120gib", 120 * 2**30),
        (" 1.5 GB ", 1_500_000_000),
        ("0.1TB", 100_000_000_000),
        ("1.5KiB", 1536),
    ],
)
def test_sizes_are_read_exactly(size, size_bytes):
    assert parse_bytes(size) == size_bytes


@pytest.mark.parametrize(
    "size",
    [0, -1, True, 1.5, None, "", "GiB", "12 parsecs", "120G", "-1GiB", "1e9", "0.1B", "nan", "1.2.3GB", "9" * 40],
)
def test_what_is_no_size_is_refused(size):
    with pytest.raises(ValueError, match=r"is not a size: give bytes as a positive integer, or text like") as caught:
        parse_bytes(size)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.2 * 2**30, "1.2 GiB"),
        (2**30 - 1, "1.0 GiB"),
        (1500 * 2**50, "1500.0 PiB"),
    ],
)
def test_sizes_are_written_with_one_decimal(size_bytes, text):
    assert format_bytes(size_bytes) == text


@given(st.integers(1, 2**60))
def test_a_written_size_reads_back_within_its_rounding(size_bytes):
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.051)


def test_defaults_are_the_documented_ones():
    config = MemoConfig()
    assert (config.alpha, config.slice_tokens) == ("auto", "auto")
    assert config.loss_chunk_tokens == "auto" and MemoConfig(loss_chunk_tokens=None).loss_chunk_tokens is None
    assert (config.attention, config.stream_from_host, config.ulysses_size) == ("auto", "auto", 1)
    assert config.plan_memory is False
    assert config.check_slices is True
    assert config.device_memory_bytes is None
    assert config.host_memory_bytes is None


def test_budgets_are_kept_as_given_and_read_as_bytes():
    config = MemoConfig(device_memory="80GiB", host_memory=10**9)
    assert config.device_memory == "80GiB"
    assert config.device_memory_bytes == 80 * 2**30
    assert config.host_memory_bytes == 10**9


@pytest.mark.parametrize("alpha", [0, 0.0, 0.25, 1, 1.0, "auto"])
def test_fractions_are_accepted(alpha):
    assert MemoConfig(alpha=alpha).alpha == alpha


REFUSED = [
    ({"alpha": 1.5}, 'alpha=1.5 is not a fraction of the tokens: give a number from 0.0 to 1.0, or "auto"'),
    ({"alpha": -0.1}, "alpha=-0.1 is not a fraction"),
    ({"alpha": float("nan")}, "alpha=nan is not a fraction"),
    ({"alpha": True}, "alpha=True is not a fraction"),
    ({"alpha": "half"}, "alpha='half' is not a fraction"),
    ({"alpha": None}, "alpha=None is not a fraction"),
    (
        {"context_parallel_size": 0},
        "context_parallel_size=0 is not a number of processes: give an integer of at least 1",
    ),
    ({"context_parallel_size": True}, "context_parallel_size=True is not a number of processes"),
    (
        {"context_parallel_size": -1},
        "context_parallel_size=-1 is not a number of processes: give an integer of at least 1",
    ),
    ({"tensor_parallel_size": "auto"}, "tensor_parallel_size='auto' is not a number of processes"),
    ({"zero_stage": 4}, "zero_stage=4 is not known: give 0, 1, 2 or 3"),
    ({"zero_stage": False}, "zero_stage=False is not known"),
    ({"ulysses_size": 2}, "ulysses_size=2 does not divide context_parallel_size=1"),
    ({"ulysses_size": "ring"}, "ulysses_size='ring' is not a number of processes"),
    ({"offload_state": "yes"}, "offload_state='yes' is not a switch: give True or False"),
    (
        {"attention": "xformers"},
        '"auto", "sdpa", "cudnn", "flash_attn", "flash_attn_3", "flash_attn_4", "transformer_engine"',
    ),
    ({"stream_from_host": ["none"]}, '"auto", "none", "attention"'),
    ({"check_slices": 1}, "check_slices=1 is not a switch: give True or False"),
    ({"plan_memory": "yes"}, "plan_memory='yes' is not a switch: give True or False"),
    ({"slice_tokens": 0}, "slice_tokens=0 is not a number of tokens"),
    ({"slice_tokens": 1.0}, "slice_tokens=1.0 is not a number of tokens"),
    ({"slice_tokens": True}, "slice_tokens=True is not a number of tokens"),
    ({"loss_chunk_tokens": 0}, '128K or 1M, "auto", or None for all of them'),
    ({"loss_chunk_tokens": "all"}, "loss_chunk_tokens='all' is not a number of tokens"),
    ({"device_memory": "lots"}, "device_memory='lots' is not a size"),
    ({"host_memory": 0}, "host_memory=0 is not a size"),
    ({"layers": ""}, "layers='' is not usable: give the dotted name"),
    ({"layers": 3}, "layers=3 is not usable"),
    ({"plan": " "}, "plan=' ' is not usable: give the path"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_wrong_settings_are_refused_in_one_line(settings, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        MemoConfig(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokens_are_read_as_numbers():
    config = MemoConfig(slice_tokens="64K", loss_chunk_tokens="1k")
    assert (config.slice_tokens, config.loss_chunk_tokens) == (65536, 1024)
    assert MemoConfig(loss_chunk_tokens=None).loss_chunk_tokens is None


def test_a_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        MemoConfig().alpha = 0.5
