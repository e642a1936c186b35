"""Builds clusters and model shapes from the presets in `conf/cluster` and `conf/model`, or from settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from lightning_memo.cli.hydra_command import config_dir, plain_settings
from lightning_memo.estimate.cluster import BANDWIDTHS, DISK, Cluster
from lightning_memo.shapes.hf_config import CONFIG_FILES, hub_folder, load_shape, shape_of
from lightning_memo.shapes.model_shape import ModelShape, adapters_of
from lightning_memo.utils.units import parse_bytes

_SIZES: Final = ("device_bytes", "host_bytes")
_TEXTS: Final = ("name", "device")
_COUNT: Final = "devices_per_node"


def preset_names(group: str) -> list[str]:
    """Return the names of the presets in a group of `conf`."""
    return sorted(file.stem for file in (Path(config_dir()) / group).glob("*.yaml") if file.stem != "default")


def load_preset(group: str, name: str) -> dict[str, Any]:
    """Return the settings of a preset.

    Raises:
        ValueError: The preset does not exist. The message lists all presets.
    """
    names = preset_names(group)
    if name not in names:
        raise ValueError(f"{group}={name!r} does not exist: give {', '.join(names)}")
    settings = OmegaConf.load(Path(config_dir()) / group / f"{name}.yaml")
    assert isinstance(settings, DictConfig)
    return plain_settings(settings)


def load_cluster(name: str) -> Cluster:
    """Return the cluster of a preset in `conf/cluster`.

    Raises:
        ValueError: The preset does not exist. The message lists all presets.
    """
    return cluster_of(load_preset("cluster", name))


def load_model(name: str) -> ModelShape:
    """Return the model shape of a preset in `conf/model`.

    Raises:
        ValueError: The preset does not exist. The message lists all presets.
    """
    return model_of(load_preset("model", name), name)


def cluster_of(settings: Mapping[str, Any]) -> Cluster:
    """Build a cluster from settings, with sizes such as "80GiB" and bandwidths per second such as "25GB".

    Raises:
        ValueError: A setting is missing, unknown or not allowed.
    """
    names = [field.name for field in fields(Cluster)]
    for name in names:
        if settings.get(name) is None and name not in DISK:
            raise ValueError(f"cluster.{name} is missing: give a value, or choose a preset with cluster=")
    for name in settings:
        if name not in names:
            raise ValueError(f"cluster.{str(name)[:40]} is not a setting: give {', '.join(names)}")
    try:
        given = {name: settings[name] for name in names if settings.get(name) is not None}
        return Cluster(**{name: _cluster_value(name, value) for name, value in given.items()})
    except ValueError as error:
        raise ValueError(f"cluster: {error}") from None


def model_of(settings: Mapping[str, Any], name: str) -> ModelShape:
    """Build the shape of a model from the settings of the group `model`: from `path`, or otherwise from `config`.

    Args:
        settings: Settings of the group.
        name: Name for a model without a path.

    Raises:
        ValueError: Neither is given, the shape is incomplete, or adapters (`lora`) are not supported for it.
    """
    shape = _shape_of(settings, name)
    adapters = adapters_of(settings.get("lora") or {})
    try:
        return replace(shape, adapters=adapters)
    except ValueError as error:
        raise ValueError(f"model: {error}") from None


def _shape_of(settings: Mapping[str, Any], name: str) -> ModelShape:
    if settings.get("path") is not None:
        path = str(settings["path"])
        folder = hub_folder(path, CONFIG_FILES, "model.path")
        shape = load_shape(folder)
        return shape if folder == Path(path) else replace(shape, name=path)  # a snapshot's folder is named by a hash
    config = settings.get("config")
    if not isinstance(config, Mapping):
        raise ValueError(
            "model: give a preset, model.path (a folder, a config.json or an id on the Hub) or model.config"
        )
    try:
        return shape_of(config, name)
    except ValueError as error:
        raise ValueError(f"model.config: {error}") from None


def _cluster_value(name: str, value: Any) -> Any:
    if name in _TEXTS:
        return str(value)
    if name in _SIZES:
        return parse_bytes(value)
    if name in BANDWIDTHS and isinstance(value, str):
        return float(parse_bytes(value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r} is not a number")
    if name == _COUNT and value != int(value):
        raise ValueError(f"{name}={value!r} is not a whole number")
    return value
