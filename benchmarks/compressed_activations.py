"""Training loss with activations that are swapped in 8 bits: the picture in docs/long_sequences.md.

    python benchmarks/compressed_activations.py
    python benchmarks/compressed_activations.py --draw   # draws the picture again from the results, without a run

The demo's model and text, 200 steps on a CPU in fp32, with all activations of all layers swapped (alpha = 1), so that
all that can be compressed is, with six seeds, for the weights and the order of the text. Runs of a seed differ only in
how activations are swapped.
"""

from __future__ import annotations

from loss_curves import Comparison

from lightning_memo.config import SWAP_PRECISIONS

_COMPARISON = Comparison(
    name="compressed_activations",
    title="swap_precision: the demo's model, alpha = 1, on a CPU",
    settings=[
        "experiment=demo", "compare=false", "trainer.max_steps=200", "trainer.log_every_n_steps=1",
        "trainer.val_check_interval=200", "data.seq_len=256", "strategy.alpha=1.0", "strategy.device_memory=null",
        "strategy.host_memory=null",
    ],
    runs={precision: [f"strategy.swap_precision={precision}"] for precision in SWAP_PRECISIONS},
)  # fmt: skip

if __name__ == "__main__":
    _COMPARISON.main(__doc__)
