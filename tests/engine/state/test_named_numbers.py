"""Numbers in global variables that users change between a forward and its backward, as schedules do."""

from __future__ import annotations

from typing import Any

import pytest
from support.architectures import counters
from support.attention.recorded_training import Recording, blocks, compare
from support.families import PlainBlock
from support.markers.slow import slow_if
from torch import Tensor
from typing_extensions import override

pytestmark = pytest.mark.usefixtures("own_folder")

SCALE, BOTH, MODE = 1.0, True, "plain"


def scaled(x: Tensor) -> Tensor:
    return x * (SCALE + counters.COUNT / 10) if BOTH and MODE == "plain" else x * 3


class Scaled(PlainBlock):
    """Calls a function that reads variables of two modules."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(scaled(x))


class Scheduled(Recording):
    """Changes the variables before each backward, and some of them back before the next forward."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        global BOTH, MODE
        BOTH, MODE = True, "plain"

    @override
    def on_before_backward(self, loss: Tensor) -> None:
        global SCALE, BOTH, MODE
        SCALE, BOTH, MODE = SCALE + 0.5, False, "other"
        counters.COUNT += 1

    @override
    def on_train_end(self) -> None:
        assert (SCALE, counters.COUNT) == (2.5, 3)


@slow_if(lambda settings: settings["alpha"] != 0.5)
@pytest.mark.parametrize(
    "settings",
    [*({"alpha": alpha} for alpha in (0.0, 0.5, 1.0)), {"alpha": 0.5, "slice_tokens": 8, "host_backed": "all"}],
    ids=str,
)
@pytest.mark.filterwarnings("error:.*as one slice")
def test_recomputations_read_what_the_forward_read(settings: dict[str, Any]) -> None:
    def build() -> Any:
        global SCALE
        SCALE, counters.COUNT = 1.0, 0
        return blocks(Scaled)()

    compare(build, settings, Scheduled)
