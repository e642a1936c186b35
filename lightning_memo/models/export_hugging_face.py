"""Exports models of any parallel layout as plain Hugging Face folders, and uploads them to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from lightning_memo.data.tokenizer import has_tokenizer
from lightning_memo.parallel.pipeline.stage_modules import gather_stages, is_stage
from lightning_memo.parallel.ranks import is_first_rank
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.files import commit, unfinished

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LOG_IN = "run `hf auth login` with a token that may write, or set HF_TOKEN"


def gather_state(model: nn.Module) -> dict[str, Any] | None:
    """Gathers a sharded model's state in the host memory of rank 0, one tensor at a time. All ranks call it.

    Returns:
        Full tensors by name on rank 0 or in the only process; None on other ranks.
    """
    if is_stage(model):
        return gather_stages(model)
    # `full_state_dict` with `cpu_offload` gathers a tensor, copies it to the host memory of rank 0 and frees it.
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return state if is_first_rank() else None


def export_huggingface(
    model: nn.Module, folder: str | Path, state_dict: dict[str, Any] | None = None, merge: bool = False
) -> None:
    """Writes a folder for `from_pretrained`: safetensors, configuration, generation configuration and tokenizer.

    For a PEFT model only the adapter is written, or with `merge` the whole model with the adapter merged into its
    weights. If the adapter was trained with other positions than its base model was saved with, the configuration of
    the base model is added and a warning says how to load both. The tokenizer is copied from the folder that the model
    was loaded from, if there is one. Only one process calls this function. The folder appears when it is complete.

    Args:
        model: Hugging Face model or PEFT model. It may be sharded if `state_dict` is given.
        folder: New or empty folder.
        state_dict: Full tensors from :func:`gather_state`; None for the model's own.
        merge: Whether to merge the adapter into the weights. This changes `model`.

    Raises:
        ValueError: The model is sharded, is no Hugging Face model or has no adapter to merge, or `folder` is not empty.
    """
    target = check_free(folder)
    if not hasattr(model, "save_pretrained"):
        raise ValueError(f"{class_name(model)} is no Hugging Face model: give the one that is in it")
    if merge:
        model, state_dict = _merged(model, state_dict), None
    if state_dict is None and (_is_sharded(model) or is_stage(model)):
        raise ValueError("the model is sharded: give the state_dict that gather_state returns")
    with unfinished(target) as written:
        written.mkdir()
        with _cache_in_use(model):
            # A copy, because tensors are taken out of it as they are written.
            host: Any = model
            host.save_pretrained(written, state_dict=None if state_dict is None else dict(state_dict))
            base = _base_of_other_positions(model)
            if base is not None:
                base.config.save_pretrained(written)
        _save_tokenizer(model, written)
        commit(written, target)
    if base is not None:
        rank_zero_warn(
            f"{folder}: the adapter was trained with positions that its base model was not saved with, and PEFT loads"
            f' the base as it was saved; give it the configuration: AutoModelForCausalLM.from_pretrained("'
            f'{base.config.name_or_path}", config=AutoConfig.from_pretrained("{folder}")), and then '
            f'PeftModel.from_pretrained(model, "{folder}")'
        )


def check_free(folder: str | Path) -> Path:
    """Returns the absolute path of a folder that is new or empty.

    Raises:
        ValueError: The path exists and is no empty folder.
    """
    target = Path(folder).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{folder}: exists already; give a new or an empty folder")
    return target


def _base_of_other_positions(model: nn.Module) -> Any | None:
    """Returns the base model of an adapter if the folder it was loaded from has other positions, otherwise None."""
    if not hasattr(model, "peft_config"):
        return None
    adapted: Any = model
    base = adapted.get_base_model()
    if not (Path(base.config.name_or_path) / "config.json").is_file():
        return None
    from transformers import AutoConfig

    saved = AutoConfig.from_pretrained(base.config.name_or_path, local_files_only=True)
    return None if _positions(saved) == _positions(base.config) else base


def _positions(config: PretrainedConfig) -> tuple[Any, Any]:
    text = config.get_text_config()
    return getattr(text, "rope_parameters", None), getattr(text, "max_position_embeddings", None)


def _save_tokenizer(model: nn.Module, folder: Path) -> None:
    origin = getattr(getattr(model, "config", None), "name_or_path", "")
    if has_tokenizer(origin):
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(origin, local_files_only=True).save_pretrained(folder)


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _merged(model: nn.Module, state_dict: dict[str, Tensor] | None) -> nn.Module:
    if not hasattr(model, "merge_and_unload"):
        raise ValueError("merge: the model has no adapter")
    if _is_sharded(model):
        raise ValueError("merge: the model is sharded; save a checkpoint, then python -m lightning_memo.export --merge")
    if state_dict is not None:
        model.load_state_dict(state_dict)
    adapted: Any = model
    merged: nn.Module = adapted.merge_and_unload()
    return merged


@contextmanager
def _cache_in_use(model: nn.Module) -> Iterator[None]:
    """Enables the key-value cache, which training turns off, in the exported configuration."""
    configs: list[Any] = [getattr(model, name, None) for name in ("config", "generation_config")]
    off = [config for config in configs if getattr(config, "use_cache", None) is False]
    for config in off:
        config.use_cache = True
    try:
        yield
    finally:
        for config in off:
            config.use_cache = False


def create_repository(repository: str, private: bool | None = None) -> None:
    """Create a repository for a model on the Hub, unless it exists. Called before the work of an export.

    Args:
        repository: `ORGANISATION/NAME` or `USER/NAME`.
        private: Whether a new repository is private; None for the default of the organisation or user.

    Raises:
        ValueError: The name is wrong, the user is not logged in or may not write there, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token  # not all runs upload

    with _in_one_line(repository):
        if get_token() is None:
            raise ValueError(f"push_to_hub={repository}: you are not logged in to the Hugging Face Hub: {_LOG_IN}")
        HfApi().create_repo(repository, private=private, exist_ok=True)


def upload_model(folder: str | Path, repository: str) -> str:
    """Upload the files of an exported model, and return the address of the repository.

    Args:
        folder: A folder that :func:`~lightning_memo.models.export_hugging_face.export_huggingface` wrote.
        repository: As for :func:`create_repository`, which has created it.

    Raises:
        ValueError: As for :func:`create_repository`.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _in_one_line(repository):
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by lightning_memo")
    return f"{api.endpoint}/{repository}"


@contextmanager
def _in_one_line(repository: str) -> Iterator[None]:
    """Turn errors of the Hub, of which most have several lines, into ones that say what to do."""
    # HTTPError is httpx's in version 1 of huggingface_hub, and httpx2's in version 2.
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]

    given = f"push_to_hub={repository}"
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"{given}: no name of a repository: give ORGANISATION/NAME or USER/NAME") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status not in (401, 403):
            raise ValueError(f"{given}: the Hugging Face Hub answered with status {status}: try again later") from error
        what = "does not know your token" if status == 401 else "does not let you write there"
        raise ValueError(f"{given}: the Hugging Face Hub {what}: give another name, or {_LOG_IN}") from error
    except (HTTPError, ConnectionError) as error:  # the latter if HF_HUB_OFFLINE is set
        raise ValueError(
            f"{given}: the Hugging Face Hub cannot be reached ({type(error).__name__}): export without push_to_hub, "
            f"and later run `hf upload {repository} FOLDER`"
        ) from error
