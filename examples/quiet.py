"""Turns off progress bars and informational messages of libraries in a notebook, with `%run quiet.py`."""

import logging
import os
import warnings

os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
warnings.filterwarnings("ignore")

import datasets  # noqa: E402
from lightning.pytorch import seed_everything  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

datasets.disable_progress_bars()
transformers_logging.disable_progress_bar()
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
seed_everything(0, verbose=False)
