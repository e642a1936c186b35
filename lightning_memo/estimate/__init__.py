"""Predicts whether a sequence fits, how fast it trains and which parallelism to use, without a GPU.

Imports neither torch nor Lightning. Plans come from the same planner as in training.
"""

from lightning_memo.estimate.cluster import Cluster, Constants, constants_of, load_cluster, load_model, read_constants
from lightning_memo.estimate.parallelism_search import Alternative, Ranking, longest, longest_with, search
from lightning_memo.estimate.request import Estimate, EstimateRequest, Parallelism
from lightning_memo.estimate.slice_settings import Slices
from lightning_memo.estimate.step_estimate import estimate
from lightning_memo.shapes.hf_config import load_shape
from lightning_memo.shapes.model_shape import ModelShape

__all__ = [
    "Alternative",
    "Cluster",
    "Constants",
    "Estimate",
    "EstimateRequest",
    "ModelShape",
    "Parallelism",
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
