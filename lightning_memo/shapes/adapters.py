"""LoRA adapters: low-rank matrices added to some projections of a layer, and the only trained weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lightning_memo.artifacts.json_documents import check_range

PRODUCTS: Final = ("query", "key", "value", "output", "gate", "up", "down")
"""Projections of a layer with a gated feed-forward."""

_MODULES: Final = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
_PEFT_DEFAULT: Final = ("q_proj", "v_proj")
_ALL: Final = "all-linear"
_WITHOUT_BYTES: Final = ("lora_alpha", "use_rslora", "init_lora_weights", "inference_mode", "lora_dropout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """Adapters of each layer.

    Raises:
        ValueError: The rank is below 1.
    """

    rank: int
    products: tuple[str, ...]
    """The projections of `PRODUCTS` that have an adapter."""

    def __post_init__(self) -> None:
        check_range(self, {"rank": 1})


def adapters_of(settings: Mapping[str, Any]) -> Adapters | None:
    """Adapters for the settings of `model.lora`, which have the names of `peft.LoraConfig`.

    Args:
        settings: `r`, `target_modules` (modules of a Llama layer; by default `q_proj` and `v_proj`, as in peft), and
            settings that do not change memory.

    Returns:
        The adapters; None if `r` is 0.

    Raises:
        ValueError: A setting is invalid or not supported. The message is one line.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(f"model.lora={settings} is no group of settings: give model.lora.r, the rank, like 8")
    rank = settings.get("r")
    if not rank:
        return None
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ValueError(f"model.lora.r={rank!r} must be an integer of at least 1, or 0 to train all weights")
    for name, value in settings.items():
        if name not in ("r", "target_modules", *_WITHOUT_BYTES) and value:
            raise ValueError(f"model.lora.{str(name)[:40]} is not supported by the estimate; remove it")
    if settings.get("lora_dropout"):
        raise ValueError(
            f"model.lora.lora_dropout={settings['lora_dropout']}: the estimate does not support dropout; set it to 0"
        )
    return Adapters(rank=rank, products=_products(settings.get("target_modules")))


def _products(modules: Any) -> tuple[str, ...]:
    if modules == _ALL:
        return PRODUCTS
    names = _PEFT_DEFAULT if modules is None else (modules,) if isinstance(modules, str) else tuple(modules)
    for name in names:
        if name not in _MODULES:
            raise ValueError(
                f"model.lora.target_modules: unknown module {str(name)[:40]}; choose from {', '.join(_MODULES)}, "
                f'or "{_ALL}"'
            )
    return tuple(product for module, product in _MODULES.items() if module in names)
