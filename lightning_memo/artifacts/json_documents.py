"""Documents of plain data: checked ranges, and reading them from JSON that may come from anywhere.

Loading checks the type and the value of every field and runs nothing from a file. Pure: imports neither torch nor
Lightning.
"""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import MISSING, fields
from typing import Any, Final, Literal, NoReturn, TypeVar

_LONGEST_TEXT: Final = 2000
_Document = TypeVar("_Document")


def items(document: Any) -> list[tuple[str, Any]]:
    """Names and values of a document's fields."""
    return [(field.name, getattr(document, field.name)) for field in fields(document)]


def check_range(document: Any, least: dict[str, int]) -> None:
    """Refuse numbers below their least value (0 where `least` names none), NaN and infinity."""
    for name, value in items(document):
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not least.get(name, 0) <= number < math.inf:
                raise ValueError(f"{name}={number!r} must be finite and at least {least.get(name, 0)}")


def read_json(kind: type[_Document], text: str, version: int) -> _Document:
    """Read a document that was written as JSON with its version in a field of that name.

    Args:
        kind: a dataclass of plain fields.
        text: the JSON.
        version: the only one that is read.

    Raises:
        ValueError: the text is no such document; one line names the field.
    """
    try:
        content = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_twice)
        # The version comes before the fields: another version may have other fields.
        found = content.get("version") if isinstance(content, dict) else None
        if found != version or isinstance(found, bool):
            raise ValueError(f"version is {_brief(found)}, and this lightning_memo reads version {version}")
        return _decode_document(kind, content, "")
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that a plan may hold")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Which of two values counts differs between programs: the one that was looked at may not be the one that is."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{_brief(next(name for name in names if names.count(name) > 1))} is there more than once")
    return content


def _brief(value: Any) -> str:
    return text if len(text := repr(value)) <= 60 else f"{text[:57]}..."


def _decode_document(kind: type[_Document], content: Any, where: str) -> _Document:
    if not isinstance(content, dict):
        raise ValueError(f"{where or 'the file'} is {_brief(content)}, expected an object")
    prefix = f"{where}." if where else ""
    hints = typing.get_type_hints(kind)
    required = {field.name for field in fields(kind) if field.default is MISSING}  # type: ignore[arg-type]
    for name in sorted(required - content.keys()):
        raise ValueError(f"{prefix}{name} is missing")
    for name in content.keys() - hints.keys():
        raise ValueError(f"{prefix}{_brief(name)} is not a field of a plan")
    values = {name: _decode(hints[name], value, prefix + name) for name, value in content.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Turn a JSON value into what a field's annotation asks for, or refuse it."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
        return _decode_document(kind, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(options[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is types.UnionType:
        return None if value is None else _decode(options[0], value, where)
    if origin is Literal and isinstance(value, str) and value in options:
        return value
    if kind in (int, float) and isinstance(value, (int, kind)) and not isinstance(value, bool) and abs(value) < 2**63:
        return kind(value)
    # Text ends up on terminals, where control characters could act.
    if kind is str and isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST_TEXT:
        return value
    raise ValueError(f"{where} is {_brief(value)}, expected {_expected(kind)}")


def _expected(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(f'"{option}"' for option in typing.get_args(kind))
    names = {int: "an integer", float: "a number", str: "printable text"}
    return names.get(kind, "a list")
