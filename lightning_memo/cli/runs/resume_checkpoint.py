"""Finds the checkpoint that a run resumes from."""

import zipfile
from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig


def checkpoint_to_resume(cfg: DictConfig) -> str | None:
    """Returns the checkpoint in ``ckpt_path``; ``last`` is the newest checkpoint of all runs with the same name.

    Raises:
        ValueError: The checkpoint does not exist.
    """
    if cfg.ckpt_path is None:
        return None
    if cfg.ckpt_path != "last":
        if not Path(cfg.ckpt_path).exists():
            raise ValueError(f"ckpt_path={cfg.ckpt_path}: no such checkpoint; give the path of a checkpoint, or last")
        return str(cfg.ckpt_path)
    runs = Path(cfg.paths.root) / cfg.name / "runs"
    found = newest_checkpoint(runs.glob("*/checkpoints/*.ckpt"))
    if found is None:
        raise ValueError(f"ckpt_path=last: no checkpoint in {runs}; give a path, or the name=... of an earlier run")
    return found


def newest_checkpoint(paths: Iterable[Path]) -> str | None:
    """Returns the newest complete checkpoint, or None.

    Args:
        paths: Checkpoint files, checkpoint folders of several processes, and links to them. If a run was killed while
            saving, its link may be broken and its file incomplete.
    """
    complete = [path for path in paths if path.is_dir() or (path.exists() and zipfile.is_zipfile(path))]
    newest = max(complete, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else str(newest.resolve())
