"""Makes the pictures of docs/ again, from a run on this machine's CPU and from estimates, in about two minutes.

    OMP_NUM_THREADS=1 python benchmarks/pictures.py
    python benchmarks/pictures.py --output FOLDER trainer.max_steps=40   # Hydra settings of the run

The diagrams (*.svg) are drawn by hand, memory_by_length.png is drawn by memory_by_length.py, and schedule.png by
simulated_schedule.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from PIL import Image

from lightning_memo.utils.files import replacing

_IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
_RUN: Final = (
    "lightning_memo.train", "experiment=demo", "compare=false", "trainer.max_steps=16",
    "hydra.run.dir=run",
)  # fmt: skip
_ESTIMATES: Final = (
    "lightning_memo.estimate", "-m", "model=llama3_8b", "cluster=h100", "gpus=8", "batch_size=8",
    "method=plain,full_recompute,full_swap,memo", "hydra.sweep.dir=estimates",
)  # fmt: skip
_LENGTHS: Final = "seq_len=64K,128K,256K,512K,1M,2M"
_PICTURES: Final = {
    "memory_map.png": "run/csv/memory_map.png",
    "memory_curve.png": "run/csv/memory_curve.png",
    "estimate_device_bytes.png": "estimates/device_bytes.png",
    "estimate_mfu.png": "estimates/mfu.png",
}
_COLOURS: Final = 64
"""Number of colours in a picture. The drawings have few, and the files are a third as large."""


def main() -> int:
    """Runs both commands in a temporary folder, and copies their pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=_IMAGES)
    parser.add_argument("settings", nargs="*", help="settings of the run, for example trainer.max_steps=40")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for words in ((*_RUN, *options.settings), (*_ESTIMATES, _LENGTHS)):
            print(f"python -m {' '.join(words)}", flush=True)
            environment = {**os.environ, "KINETO_LOG_LEVEL": "99"}
            subprocess.run([sys.executable, "-m", *words], cwd=temporary, env=environment, check=True)
        missing = [made for made in _PICTURES.values() if not (Path(temporary) / made).is_file()]
        if missing:
            print(
                f"{', '.join(missing)}: not made; the run was too short for its memory to be planned", file=sys.stderr
            )
            return 1
        for name, made in _PICTURES.items():
            _save(Path(temporary) / made, options.output / name)
    return 0


def _save(made: Path, path: Path) -> None:
    with Image.open(made) as picture, replacing(path) as unfinished:
        picture.convert("RGB").quantize(_COLOURS).save(unfinished, format="PNG", optimize=True)


if __name__ == "__main__":
    sys.exit(main())
