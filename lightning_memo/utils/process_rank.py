"""Rank of this process, read from the environment before a process group exists."""

import os

# Set by torchrun, by Lightning's launcher (within a node, and per node), by SLURM and by LSF.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


def is_rank_zero() -> bool:
    """Whether this is the process that prints and writes for all of them. Needs no process group."""
    return all(os.environ.get(name, "0") == "0" for name in _RANK_VARIABLES)
