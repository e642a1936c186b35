"""Finds what comes back to the device otherwise than it left, where `check_restored` asks for it.

When a tensor leaves, the device sums its bytes and counts its NaN and Inf; the host does not wait for that. When it is
back, both are done again and compared, for which the host waits. Sums are of integers, so they are exact: any change
within one aligned group of eight bytes is found, a single bit above all, and of others all but one in about 2^64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_memo.engine.memory.slot import Slot, Stored

_PIECE_BYTES = 4096  # pieces that changed places, as blocks of a file may, give another sum
_VALUES_AT_ONCE = 2**24  # of which NaN and Inf are counted
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class RestoredError(RuntimeError):
    """A tensor came back to the device with other bytes than it left with."""


class What(NamedTuple):
    """A tensor: what it is to its layer, and the tokens `[start, stop)` that it is of."""

    kind: str
    layer: int | None
    start: int
    stop: int

    def __str__(self) -> str:
        owner = "" if self.layer is None else f" of layer {self.layer}"
        return f'"{self.kind}"{owner}, tokens {self.start} to {self.stop - 1}'


class Check:
    """What a tensor was when it left.

    Args:
        what: The tensor.
        data: Its bytes on the device, uint8 `[size_bytes]`.
        dtype: What they are.
    """

    def __init__(self, what: What, data: Tensor, dtype: torch.dtype) -> None:
        self._what, self._dtype = what, dtype
        self._left = self._look(data)

    def compare(self, data: Tensor, where: str = "the host") -> None:
        """Make sure that the same bytes are back.

        Args:
            data: As they are on the device now, before anything may overwrite them.
            where: From where they came.

        Raises:
            RestoredError: They are others.
        """
        now = self._look(data)
        if not torch.equal(now, self._left):
            raise _error(str(self._what), where, self._left[1], now[1])

    def _look(self, data: Tensor) -> Tensor:
        """The sum of the bytes, each piece with an odd weight of its own, and how many NaN and Inf there are."""
        data = _aligned(data)
        whole = data.numel() // _PIECE_BYTES * _PIECE_BYTES
        rest = F.pad(data[whole:], (0, _PIECE_BYTES - data.numel() + whole))
        sums = torch.cat([_sums(data[:whole], _PIECE_BYTES), _sums(rest, _PIECE_BYTES)])
        weights = torch.arange(1, 2 * len(sums), 2, device=data.device)
        return torch.stack([(sums * weights).sum(), _count_odd(data.view(1, -1), self._dtype)[0]])


class SlotChecks:
    """The checks of what lies in a slot.

    Each tensor is compared when the backward takes it for the first time: kernels may overwrite what they took.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._checks: dict[int, Check] = {}
        self._compared: set[int] = set()

    def note(self, handle: object, what: What) -> None:
        """A tensor was put, if it found room."""
        if isinstance(handle, Stored):
            self._checks[handle.offset_bytes] = Check(what, self._bytes(handle), handle.dtype)

    def of(self, stored: Stored) -> Check:
        """The check of a tensor that was put, whole or seen as another one."""
        return self._checks[stored.offset_bytes]

    def compare(self, stored: Stored) -> None:
        """A tensor is on the device again.

        Raises:
            RestoredError: It has other bytes.
        """
        if stored.offset_bytes not in self._compared:
            self._compared.add(stored.offset_bytes)
            self.of(stored).compare(self._bytes(stored), self._where(stored))

    def _where(self, stored: Stored) -> str:
        spilled = stored.offset_bytes >= self._slot.to_disk.start
        place = self._slot.disk if spilled else self._slot.host
        return "the device" if place is None else "the disk" if spilled else "the host"

    def _bytes(self, stored: Stored) -> Tensor:
        assert self._slot.buffer is not None
        return self._slot.buffer[stored.offset_bytes : stored.offset_bytes + stored.size_bytes]


class RowChecks:
    """What the rows of a matrix were when they left.

    Args:
        what: The matrix.
        rows: How many.
        features: Entries of each.
        dtype: Of an entry.
        device: Where they come from.
    """

    def __init__(self, what: str, rows: int, features: int, dtype: torch.dtype, device: torch.device) -> None:
        self._what, self._features, self._dtype = what, features, dtype
        self._left = torch.zeros(rows, 2, dtype=torch.int64, device=device)

    def note(self, first: int, data: Tensor) -> None:
        """Rows leave, from `first` on; `data` is their bytes, uint8."""
        left = self._look(data)
        self._left[first : first + len(left)] = left

    def compare(self, ranges: Sequence[range], data: Tensor) -> None:
        """Make sure that rows are back as they left.

        Args:
            ranges: Which rows.
            data: Their bytes on the device, uint8, one range behind the other.

        Raises:
            RestoredError: Some have other bytes.
        """
        now, left = self._look(data), torch.cat([self._left[rows.start : rows.stop] for rows in ranges])
        if not torch.equal(now, left):
            changed = (now != left).any(1).nonzero().flatten().tolist()
            numbers = [row for rows in ranges for row in rows]
            what = f"{self._what}, rows {numbers[changed[0]]} to {numbers[changed[-1]]}"
            raise _error(what, "the host", left[:, 1].sum(), now[:, 1].sum())

    def _look(self, data: Tensor) -> Tensor:
        """Of each row the sum of its bytes, and how many NaN and Inf there are, `[rows, 2]`."""
        data, row_bytes = _aligned(data), self._features * self._dtype.itemsize
        return torch.stack([_sums(data, row_bytes), _count_odd(data.view(-1, row_bytes), self._dtype)], 1)


def _aligned(data: Tensor) -> Tensor:
    """The same bytes, where they can be seen as words of eight."""
    return data.clone() if data.storage_offset() % 8 else data


def _sums(data: Tensor, each: int) -> Tensor:
    """Of every `each` bytes their sum modulo 2^64, int64, in the largest words that divide them."""
    word = next(word for word in _WORDS if each % word.itemsize == 0)
    return data.view(word).view(-1, each // word.itemsize).sum(1, dtype=torch.int64)


def _count_odd(data: Tensor, dtype: torch.dtype) -> Tensor:
    """How many NaN and Inf are in each row of `data`, uint8 `[rows, bytes]`; none in types that have no name for it."""
    total = torch.zeros(len(data), dtype=torch.int64, device=data.device)
    if dtype.is_floating_point and dtype.itemsize > 1:
        for part in data.view(dtype).split(max(_VALUES_AT_ONCE // max(len(data), 1), 1), 1):
            total += part.isfinite().logical_not().sum(1)
    return total


def _error(what: str, where: str, left: Tensor, now: Tensor) -> RestoredError:
    return RestoredError(
        f"{what}, came back from {where} changed: {int(now)} NaN or Inf, {int(left)} when it left. Memory, a disk or a "
        "copy is at fault, and gradients would be wrong from here on: go on from the last checkpoint, look for memory "
        "errors of this machine (dmesg; nvidia-smi -q -d ECC), and report it if it happens on another one too"
    )
