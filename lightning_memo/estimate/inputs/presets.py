"""Clusters and models by name: the files under `conf/cluster` and `conf/model`, and settings like theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from lightning_memo.cli.hydra_command import config_dir, plain_settings
from lightning_memo.estimate.inputs.cluster import DISK, Cluster
from lightning_memo.shapes.adapters import adapters_of
from lightning_memo.shapes.hf_config import load_shape, shape_of
from lightning_memo.shapes.model_shape import ModelShape
from lightning_memo.utils.units import parse_bytes

_SIZES: Final = ("device_bytes", "host_bytes")
_BANDWIDTHS: Final = ("host_bandwidth", "host_bandwidth_shared", "node_bandwidth", "network_bandwidth", *DISK)
_CALLED: Final = ("name", "device")
_COUNT: Final = "devices_per_node"


def preset_names(group: str) -> list[str]:
    """What files there are in a group of `conf`."""
    return sorted(file.stem for file in (Path(config_dir()) / group).glob("*.yaml") if file.stem != "default")


def load_preset(group: str, name: str) -> dict[str, Any]:
    """The settings in a file of a group of `conf`.

    Raises:
        ValueError: there is no such file; one line lists those that there are.
    """
    names = preset_names(group)
    if name not in names:
        raise ValueError(f"{group}={name!r} is not there: give {', '.join(names)}")
    settings = OmegaConf.load(Path(config_dir()) / group / f"{name}.yaml")
    assert isinstance(settings, DictConfig)
    return plain_settings(settings)


def load_cluster(name: str) -> Cluster:
    """The cluster of a file in `conf/cluster`.

    Raises:
        ValueError: there is no such file; one line lists those that there are.
    """
    return cluster_of(load_preset("cluster", name))


def load_model(name: str) -> ModelShape:
    """The shape of a model of a file in `conf/model`.

    Raises:
        ValueError: there is no such file; one line lists those that there are.
    """
    return model_of(load_preset("model", name), name)


def cluster_of(settings: Mapping[str, Any]) -> Cluster:
    """A cluster as settings tell it, with sizes like "80GiB", and bandwidths like "25GB" in a second.

    Raises:
        ValueError: a setting is missing, unknown, or not allowed; one line.
    """
    names = [field.name for field in fields(Cluster)]
    for name in names:
        if settings.get(name) is None and name not in DISK:
            raise ValueError(f"cluster.{name} is missing: give one, or a cluster of the presets")
    for name in settings:
        if name not in names:
            raise ValueError(f"cluster.{str(name)[:40]} is no setting: give {', '.join(names)}")
    try:
        given = {name: settings[name] for name in names if settings.get(name) is not None}
        return Cluster(**{name: _cluster_value(name, value) for name, value in given.items()})
    except ValueError as error:
        raise ValueError(f"cluster: {error}") from None


def model_of(settings: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of a model as `conf/model` tells it: by `path`, or else by `config`.

    Args:
        settings: those of the model group.
        name: what a model without a path is called.

    Raises:
        ValueError: neither is given, what is given tells no shape, or not one that `lora` is known for; one line.
    """
    shape = _shape_of(settings, name)
    adapters = adapters_of(settings.get("lora") or {})
    try:
        return replace(shape, adapters=adapters)
    except ValueError as error:
        raise ValueError(f"model: {error}") from None


def _shape_of(settings: Mapping[str, Any], name: str) -> ModelShape:
    if settings.get("path") is not None:
        return load_shape(Path(str(settings["path"])))
    config = settings.get("config")
    if not isinstance(config, Mapping):
        raise ValueError("model: give one of the presets, model.path (a folder or a config.json), or model.config")
    try:
        return shape_of(config, name)
    except ValueError as error:
        raise ValueError(f"model.config: {error}") from None


def _cluster_value(name: str, value: Any) -> Any:
    if name in _CALLED:
        return str(value)
    if name in _SIZES:
        return parse_bytes(value)
    if name in _BANDWIDTHS and isinstance(value, str):
        return float(parse_bytes(value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r} is no number")
    if name == _COUNT and value != int(value):
        raise ValueError(f"{name}={value!r} is no whole number")
    return value
