"""The notebooks under examples/ run from top to bottom, and a notebook's kernel survives what is done in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient
from support.commands import ROOT, TEXT_FOLDER, environment

EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
MOST_BYTES = 300_000  # GitHub shows them, and everyone clones them
SHORTER = {
    "colab": {"else 1024": "else 512", "18MiB": "10MiB", "2**18": f"2**17, path='{TEXT_FOLDER}'"},
    "finetune": {"STEPS = 40": "STEPS = 12", '"seq_len": 2048': '"seq_len": 512'},
    "length_sweep": {
        "STEPS = 8": "STEPS = 4",
        "(512, 1024, 2048)": "(128, 256)",
        "max_bytes=2**20": f"path='{TEXT_FOLDER}', max_bytes=2**17",
    },
    "will_it_fit": {"range(16, 22)": "range(16, 19)", "gpus = (1, 2, 4, 8)": "gpus = (1, 4)"},
}


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_with_their_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < MOST_BYTES
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert "**CPU**" in notebook.cells[0].source


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = sorted(EXAMPLES.iterdir())
    for name, value in (environment(cold=True) | {"TMPDIR": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    left = dict(SHORTER[path.stem])
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
            for text in [text for text in left if text in cell.source]:
                cell.source = cell.source.replace(text, left.pop(text))
    assert not left
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": EXAMPLES}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs), "no bars, no warnings"
    assert sorted(EXAMPLES.iterdir()) == before


class Kernel:
    """Runs cells as a notebook does."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self._manager, self._client = manager, client

    def run(self, code: str, interrupt_at: str | None = None, seconds: float = 300.0) -> str:
        """Run a cell; returns what it printed, and the name of the exception that ended it.

        Args:
            code: The cell.
            interrupt_at: The kernel is interrupted, as by the stop button, once the cell has printed this.
            seconds: When it counts as hanging.
        """
        request = self._client.execute(code)
        deadline, printed = time.monotonic() + seconds, ""
        while time.monotonic() < deadline:
            message = self._client.get_iopub_msg(timeout=seconds)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "error":
                printed += f"\n{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                return printed
            if interrupt_at is not None and interrupt_at in printed:
                self._manager.interrupt_kernel()
                interrupt_at = None
        raise AssertionError(f"the cell goes on and on: {printed}")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("kernel")
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(folder), env=environment(cold=True))
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


SETUP = """
%load_ext autoreload
%autoreload 2
import gc, threading, time
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning_memo import MemoStrategy
from lightning_memo.allocator import PlannedAllocator
from lightning_memo.data import TextDataModule
from lightning_memo.models import CausalLM
from lightning_memo.planner.placement.placement_core import load_library

CONFIG = {"model_type": "llama", "vocab_size": 264, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": None}

PlannedAllocator(torch.device("cpu")), load_library()  # compiled before, memory is planned within few steps

class Slow(CausalLM):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == PAUSE:
            print("pause", flush=True)
            time.sleep(60)
        return loss

class Wait(Callback):  # until memory is planned, which takes longer on a busy machine
    def on_train_batch_end(self, trainer, *args):
        while trainer.strategy.memory.busy:
            time.sleep(0.01)
"""
FIT = """
seed_everything(0, verbose=False)
PAUSE = {pause}
strategy = MemoStrategy(alpha=0.5, plan_memory=True)
trainer = Trainer(accelerator="cpu", strategy=strategy, max_steps=12, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=0, callbacks=[Wait()])
trainer.fit(Slow({{"config": CONFIG}}), TextDataModule(seq_len=384, path="{text}", max_bytes=100000))
print("loss", trainer.callback_metrics["train_loss"].item())
"""
LEFT = """
del trainer, strategy
gc.collect()
big = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.numel() >= 384 * 64]
print("tensors", len(big), "threads", threading.active_count())
"""


@pytest.mark.slow
def test_interrupted_training_leaves_a_usable_kernel(kernel: Kernel) -> None:
    assert "Error" not in kernel.run(SETUP)
    first = kernel.run(FIT.format(text=TEXT_FOLDER, pause=None)).splitlines()[-1]
    assert first.startswith("loss ")
    assert kernel.run(FIT.format(text=TEXT_FOLDER, pause=None)).splitlines()[-1] == first, (
        "a cell that is run again does the same"
    )
    left = kernel.run(LEFT)
    for step in (0, 9):  # the step that is profiled, and one whose memory is planned
        printed = kernel.run(FIT.format(text=TEXT_FOLDER, pause=step), interrupt_at="pause\n")
        assert "\nSystemExit: 1" in printed, printed  # Lightning's
        assert kernel.run(LEFT) == left, step
        after = kernel.run(FIT.format(text=TEXT_FOLDER, pause=None))
        assert "memory plan ready" in after
        assert after.splitlines()[-1] == first, step
        assert kernel.run(LEFT) == left
