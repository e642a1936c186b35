"""Checksums of offloaded tensors, which show that a tensor was changed on its way (`check_restored=True`).

When a tensor leaves the device, its checksum and its numbers of NaN and Inf values are computed on the device, and the
host does not wait for them. When the tensor is back, they are computed again and compared, for which the host waits.
The sums are integers and therefore exact. Any change within one aligned group of eight bytes is found, in particular
every single bit; of all other changes, all but one in about 2^64 are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_memo.engine.memory.slot import Slot, SlotView

_PIECE_BYTES = 4096  # each piece has a weight, so that pieces that changed places give another sum
_VALUES_AT_ONCE = 2**24  # number of values in which NaN and Inf are counted at a time
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class RestoredError(RuntimeError):
    """A tensor came back to the device with other bytes than it left with."""


class TensorLabel(NamedTuple):
    """Description of a saved tensor for error messages.

    Attributes:
        kind: Role of the tensor in its layer, for example "input" or "key".
        layer: Position of the layer, if the tensor belongs to one.
        start: First token.
        stop: End of the tokens.
    """

    kind: str
    layer: int | None
    start: int
    stop: int

    def __str__(self) -> str:
        owner = "" if self.layer is None else f" of layer {self.layer}"
        return f'"{self.kind}"{owner}, tokens {self.start} to {self.stop - 1}'


class Checksum:
    """The checksum of a tensor when it left the device.

    Args:
        label: Description of the tensor.
        data: Its bytes on the device, uint8 `[size_bytes]`.
        dtype: Data type of the tensor.
    """

    def __init__(self, label: TensorLabel, data: Tensor, dtype: torch.dtype) -> None:
        self._label, self._dtype = label, dtype
        self._left = self._compute(data)

    def compare(self, data: Tensor, source: str = "the host") -> None:
        """Compare the bytes that came back with those that left.

        Args:
            data: The bytes on the device, before anything may overwrite them.
            source: Where they were copied from, for the message.

        Raises:
            RestoredError: The bytes have changed.
        """
        now = self._compute(data)
        if not torch.equal(now, self._left):
            raise _error(str(self._label), source, self._left[1], now[1])

    def _compute(self, data: Tensor) -> Tensor:
        """Return the weighted sum of the bytes and the number of NaN and Inf values, int64 `[2]`."""
        data = _aligned(data)
        complete = data.numel() // _PIECE_BYTES * _PIECE_BYTES
        rest = F.pad(data[complete:], (0, _PIECE_BYTES - data.numel() + complete))
        sums = torch.cat([_sums(data[:complete], _PIECE_BYTES), _sums(rest, _PIECE_BYTES)])
        weights = torch.arange(1, 2 * len(sums), 2, device=data.device)
        return torch.stack([(sums * weights).sum(), _count_nonfinite(data.view(1, -1), self._dtype)[0]])


class SlotChecksums:
    """The checksums of the tensors in a slot.

    Each tensor is compared when the backward loads it for the first time, because kernels may overwrite it afterwards.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._checksums: dict[int, Checksum] = {}
        self._compared: set[int] = set()

    def note(self, handle: object, label: TensorLabel) -> None:
        """Compute the checksum of a tensor that was put, if it fitted in the slot."""
        if isinstance(handle, SlotView):
            # A compressed tensor is compared as it left, so its values that are not finite are not counted.
            dtype = handle.dtype if handle.compressed is None else torch.uint8
            self._checksums[handle.offset_bytes] = Checksum(label, self._bytes(handle), dtype)

    def of(self, view: SlotView) -> Checksum:
        """Return the checksum of the tensor that was put at the view's offset."""
        return self._checksums[view.offset_bytes]

    def compare(self, view: SlotView) -> None:
        """Compare a tensor that is on the device again, unless it was compared before.

        Raises:
            RestoredError: The bytes have changed.
        """
        if view.offset_bytes not in self._compared:
            self._compared.add(view.offset_bytes)
            self.of(view).compare(self._bytes(view), self._source(view))

    def _source(self, view: SlotView) -> str:
        spilled = view.offset_bytes >= self._slot.to_disk.start
        source = self._slot.disk if spilled else self._slot.host
        return "the device" if source is None else "the disk" if spilled else "the host"

    def _bytes(self, view: SlotView) -> Tensor:
        assert self._slot.buffer is not None
        return self._slot.buffer[view.offset_bytes : view.offset_bytes + view.size_bytes]


class RowChecksums:
    """The checksums of the rows of a matrix.

    Args:
        name: Name of the matrix, for the message.
        rows: Number of rows.
        features: Number of entries of each row.
        dtype: Data type of the entries.
        device: Device that the rows leave.
    """

    def __init__(self, name: str, rows: int, features: int, dtype: torch.dtype, device: torch.device) -> None:
        self._name, self._features, self._dtype = name, features, dtype
        self._left = torch.zeros(rows, 2, dtype=torch.int64, device=device)

    def note(self, first: int, data: Tensor) -> None:
        """Compute the checksums of rows that leave, from row `first` on; `data` has their bytes, uint8."""
        left = self._compute(data)
        self._left[first : first + len(left)] = left

    def compare(self, ranges: Sequence[range], data: Tensor) -> None:
        """Compare rows that came back with those that left.

        Args:
            ranges: The rows.
            data: Their bytes on the device, uint8, one range after the other.

        Raises:
            RestoredError: The bytes of some rows have changed.
        """
        now, left = self._compute(data), torch.cat([self._left[rows.start : rows.stop] for rows in ranges])
        if not torch.equal(now, left):
            changed = (now != left).any(1).nonzero().flatten().tolist()
            numbers = [row for rows in ranges for row in rows]
            label = f"{self._name}, rows {numbers[changed[0]]} to {numbers[changed[-1]]}"
            raise _error(label, "the host", left[:, 1].sum(), now[:, 1].sum())

    def _compute(self, data: Tensor) -> Tensor:
        """Return the sum of each row's bytes and its number of NaN and Inf values, int64 `[rows, 2]`."""
        data, row_bytes = _aligned(data), self._features * self._dtype.itemsize
        return torch.stack([_sums(data, row_bytes), _count_nonfinite(data.view(-1, row_bytes), self._dtype)], 1)


def _aligned(data: Tensor) -> Tensor:
    """Return the same bytes at an offset at which they can be viewed as words of eight bytes."""
    return data.clone() if data.storage_offset() % 8 else data


def _sums(data: Tensor, each: int) -> Tensor:
    """Sum every `each` bytes modulo 2^64, int64, in the largest words that divide them."""
    word = next(word for word in _WORDS if each % word.itemsize == 0)
    return data.view(word).view(-1, each // word.itemsize).sum(1, dtype=torch.int64)


def _count_nonfinite(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Count NaN and Inf in each row of `data`, uint8 `[rows, bytes]`; 0 for integer and 8-bit floating-point types."""
    total = torch.zeros(len(data), dtype=torch.int64, device=data.device)
    if dtype.is_floating_point and dtype.itemsize > 1:
        for part in data.view(dtype).split(max(_VALUES_AT_ONCE // max(len(data), 1), 1), 1):
            total += part.isfinite().logical_not().sum(1)
    return total


def _error(label: str, source: str, left: Tensor, now: Tensor) -> RestoredError:
    return RestoredError(
        f"{label}, came back from {source} changed: {int(now)} NaN or Inf, {int(left)} when it left. Memory, a disk or "
        "a copy is faulty, and gradients would be wrong from here on: resume from the last checkpoint, check this "
        "machine for memory errors (dmesg; nvidia-smi -q -d ECC), and report it if it also happens on another machine"
    )
