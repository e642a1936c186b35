"""A Lightning Fabric loop, and the line that changes.

    python examples/fabric.py           with MemoLoop
    python examples/fabric.py --plain   without

Both print the same losses, up to rounding.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import tiny
import torch
from lightning.fabric import Fabric
from transformers import AutoModelForCausalLM

from lightning_memo import MemoLoop
from lightning_memo.data import DocumentsDataModule


def main(folder: Path) -> None:
    fabric = Fabric(devices=1)
    documents = DocumentsDataModule(tiny.write_documents(folder), tiny.KNOWN_POSITIONS, batch_size=2)
    documents.setup("fit")
    model = AutoModelForCausalLM.from_pretrained(tiny.save_model(folder), use_cache=False).train()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(documents.train_dataloader())

    with contextlib.nullcontext() if "--plain" in sys.argv else MemoLoop(model, optimizer, alpha=0.5):  # new
        for number, batch in zip(range(5), loader, strict=False):
            loss = model(**batch).loss
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            fabric.print(f"step {number}: loss {loss:.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
