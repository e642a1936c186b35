"""The spill file on a GPU: bytes come back through page-locked bounce buffers, while the compute stream goes on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lightning_memo.artifacts.slot_layouts import DiskLayout
from lightning_memo.engine import TestMode
from lightning_memo.engine.memory.disk import DiskStore

MIB = 2**20
SLOT_BYTES = 20 * MIB + 100  # four chunks, the last one not full


def test_bytes_of_the_device_come_back(device: torch.device, tmp_path: Path) -> None:
    sizes = DiskLayout(SLOT_BYTES)
    store = DiskStore(tmp_path, 3 * sizes.region_bytes, sizes, device, TestMode(0, 0.002))
    slots = [torch.randint(0, 256, (SLOT_BYTES,), dtype=torch.uint8, device=device) for _ in range(3)]
    buffer, back = torch.empty_like(slots[0]), list[Tensor]()
    rooms = []
    for slot in slots:
        room = store.take(SLOT_BYTES)
        assert room is not None
        rooms.append(room)
        torch.cuda._sleep(20_000_000)  # the spilled bytes are computed late, and overwritten as soon as possible
        buffer.copy_(slot)
        room.write(buffer).wait()
    for room in rooms:
        buffer.fill_(1)
        room.read(buffer).wait()
        back.append(buffer.clone())
    assert all(map(torch.equal, back, slots))
    store.close()
