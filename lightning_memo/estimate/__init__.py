"""Whether a sequence will fit, how fast it will be, and how to divide it, before a GPU is rented.

Pure: imports neither torch nor Lightning. Plans come from the same planner as in training.
"""

from lightning_memo.estimate.answer import Estimate, Question
from lightning_memo.estimate.cluster import Cluster
from lightning_memo.estimate.constants import Constants, constants_of, read_constants
from lightning_memo.estimate.hf_config import load_shape
from lightning_memo.estimate.model import estimate
from lightning_memo.estimate.parallelism import Parallelism
from lightning_memo.estimate.presets import load_cluster, load_model
from lightning_memo.estimate.search import Alternative, Ranking, longest, longest_with, search
from lightning_memo.estimate.shape import ModelShape
from lightning_memo.estimate.slices import Slices

__all__ = [
    "Alternative",
    "Cluster",
    "Constants",
    "Estimate",
    "ModelShape",
    "Parallelism",
    "Question",
    "Ranking",
    "Slices",
    "constants_of",
    "estimate",
    "load_cluster",
    "load_model",
    "load_shape",
    "longest",
    "longest_with",
    "read_constants",
    "search",
]
