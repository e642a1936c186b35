"""A PyTorch loop without a trainer, and the line that changes.

    python examples/own_loop.py           with MemoLoop
    python examples/own_loop.py --plain   without

Both print the same losses, up to rounding.
"""

from __future__ import annotations

import contextlib
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memo import MemoLoop


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 172}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randint(0, 256, (4, 2, 64)).repeat(1, 1, 8)

    # This line is new. Without alpha, MemoLoop would find that a model this small needs no swapping.
    with contextlib.nullcontext() if "--plain" in sys.argv else MemoLoop(model, optimizer, alpha=0.5):
        for number, ids in enumerate(batches):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {number}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
