import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memo.trials.longest_sequence import LengthSearch
from lightning_memo.trials.training_trial import Attempt


def attempt(tokens, limit, growth, base):
    needed = base + int(growth(tokens))
    return Attempt(tokens=tokens, fits=needed <= limit, planned_device_bytes=needed, device_limit_bytes=limit)


GROWTHS = [lambda n: 10 * n, lambda n: n**2, lambda n: 1000 * n**0.5, lambda n: 7 * max(n - 4000, 0), lambda n: 0]


@settings(max_examples=60)
@given(
    growth=st.sampled_from(GROWTHS),
    base=st.integers(0, 10**5),
    limit=st.integers(0, 10**6),
    low=st.integers(1, 3000),
    span=st.integers(0, 20000),
    multiple_of=st.integers(1, 700),
)
def test_the_search_finds_what_a_scan_finds(growth, base, limit, low, span, multiple_of):
    lengths = [n for n in range(low, low + span + 1) if n % multiple_of == 0]
    if not lengths:
        with pytest.raises(ValueError, match="no multiple of"):
            LengthSearch(low, low + span, multiple_of)
        return
    scan = [n for n in lengths if attempt(n, limit, growth, base).fits]
    search, tried = LengthSearch(low, low + span, multiple_of), []
    while (tokens := search.next_tokens()) is not None:
        tried.append(tokens)
        # An interrupted search resumes from its attempts.
        search = LengthSearch(low, low + span, multiple_of, search.attempts)
        search.add(attempt(tokens, limit, growth, base))
    assert (None if search.longest is None else search.longest.tokens) == max(scan, default=None)
    assert len(set(tried)) == len(tried)
    assert len(tried) <= 2 * len(lengths).bit_length() + 4


def test_a_prediction_that_holds_is_confirmed_and_no_more():
    search = LengthSearch(1024, 2**20, 1024)
    while (tokens := search.next_tokens()) is not None:
        search.add(attempt(tokens, 10**9, lambda n: 9000 * n, 10**8))
    longest = (10**9 - 10**8) // 9000 // 1024 * 1024
    assert [a.tokens for a in search.attempts] == [1024, 2048, longest, longest + 1024]


def test_attempts_of_another_range_are_taken_where_they_help():
    earlier = [Attempt(tokens=1024, fits=False), Attempt(tokens=512, fits=True), Attempt(tokens=700, fits=True)]
    assert LengthSearch(256, 600, 128, earlier).next_tokens() is None
    assert LengthSearch(512, 4096, 512, earlier).next_tokens() is None
    assert LengthSearch(256, 4096, 256, earlier[:1]).next_tokens() == 256
    assert LengthSearch(1024, 4096, 256, earlier[:1]).next_tokens() is None


def test_lengths_may_have_units():
    search = LengthSearch("1K", "1M", "4k")
    assert (search.low, search.high, search.multiple_of) == (4096, 2**20, 4096)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2048, 1024, 1), "high=1024 is below low=2048"),
        ((0, 1024, 1), "low=0 is not a number of tokens"),
        ((1, 1.5, 1), "high=1.5 is not a number of tokens"),
        ((1025, 2047, 1024), "no multiple of 1024 lies between low=1025 and high=2047"),
    ],
)
def test_lengths_that_cannot_be_searched_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LengthSearch(*arguments)
