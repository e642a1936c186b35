"""What a model returns as its logits if it runs slice by slice, and holds those of one slice at a time."""

from __future__ import annotations

from typing import Any, NoReturn

_MESSAGE = (
    'with schedule="slice", the logits of a sequence are never held, but the training step uses them: use the loss of '
    'the output only, or schedule="layer"'
)


class AbsentLogits:
    """Raises a `ValueError` wherever it is used."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # protocols that this has not
            raise AttributeError(name)
        raise ValueError(_MESSAGE)

    def __getitem__(self, index: object) -> NoReturn:
        raise ValueError(_MESSAGE)

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise ValueError(_MESSAGE)
