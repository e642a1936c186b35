"""Training loss with weights and gradients that ZeRO sends as integers: the picture in docs/parallelism.md.

    python benchmarks/quantised_training.py
    python benchmarks/quantised_training.py --more 8  # adds seeds to the results
    python benchmarks/quantised_training.py --draw   # draws the picture again from the results, without a run

The demo's model and text, 200 steps in two processes on a CPU with ZeRO 3, with several seeds, for the weights and
the order of the text. Runs of a seed differ only in what is sent. Two more differ in rounding only, because layers are
cut into slices.
"""

from __future__ import annotations

from loss_curves import Comparison

from lightning_memo.config import ZERO_COMMUNICATION

_COMPARISON = Comparison(
    name="quantised_training",
    title="zero_communication: the demo's model, ZeRO 3 in two processes, on a CPU",
    settings=[
        "experiment=demo", "compare=false", "trainer.devices=2", "trainer.max_steps=200", "trainer.log_every_n_steps=1",
        "trainer.val_check_interval=200", "data.seq_len=512", "strategy.zero_stage=3", "strategy.device_memory=null",
        "strategy.host_memory=null",
    ],
    runs={communication: [f"strategy.zero_communication={communication}"] for communication in ZERO_COMMUNICATION},
    controls={f"slices of {tokens} tokens": [f"strategy.slice_tokens={tokens}"] for tokens in (256, 128)},
    processes=2,
)  # fmt: skip

if __name__ == "__main__":
    _COMPARISON.main(__doc__)
