"""Folder of a saved model: a local one, or a download from the Hugging Face Hub."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

CONFIG_FILES: Final = ("config.json",)
TOKENIZER_FILES: Final = ("*.json", "*.jinja", "*.model", "*.txt")
MODEL_FILES: Final = (*TOKENIZER_FILES, "*.safetensors")

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@cache
def hub_folder(path: str, files: tuple[str, ...], setting: str) -> Path:
    """Return the path, or the folder of downloaded files if the path does not exist and has the form of a Hub id.

    Files that were downloaded before are taken from the cache of huggingface_hub.

    Args:
        path: Path, or an id like "meta-llama/Llama-3.1-8B".
        files: Patterns of the files to download.
        setting: Name of the setting, for messages.

    Raises:
        ValueError: The files cannot be downloaded. The message has the command that downloads them.
    """
    if Path(path).exists() or not _HUB_ID.fullmatch(path):
        return Path(path)
    # Takes a third of a second, and is not needed for local folders.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    name = path.rpartition("/")[2]
    try:
        return Path(snapshot_download(path, allow_patterns=list(files)))
    except GatedRepoError:
        reason = f"its terms have to be accepted at https://huggingface.co/{path}, by the user of `hf auth login`"
    except RepositoryNotFoundError:
        reason = "the Hub has no such model, or it is private and needs `hf auth login`"
    except (OSError, ValueError) as error:
        reason = f"HF_HUB_OFFLINE is set, or the Hub cannot be reached: {str(error).partition(chr(10))[0]}"
    raise ValueError(
        f"{setting}={path}: no such folder, and no download from the Hub ({reason}): run `hf download {path} "
        f"--local-dir {name}` where that is possible, and give {setting}={name}"
    )
