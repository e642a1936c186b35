"""Checks the fields of dataclasses, and reads dataclasses from untrusted JSON.

Reading checks the type and the value of every field and executes nothing from a file.
"""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import MISSING, fields
from typing import Any, Final, Literal, NoReturn, TypeVar

_LONGEST_TEXT: Final = 2000
_TOO_LARGE: Final = 2**63
_Document = TypeVar("_Document")


def items(document: Any) -> list[tuple[str, Any]]:
    """Names and values of a dataclass's fields."""
    return [(field.name, getattr(document, field.name)) for field in fields(document)]


def check_range(document: Any, least: dict[str, int]) -> None:
    """Check that every number of a dataclass, also within tuples, is not too small, and can be read from JSON.

    Args:
        document: The dataclass.
        least: Smallest allowed value by field; 0 for fields that it does not name.

    Raises:
        ValueError: A number is too small, too large for 64 bits, NaN or infinite.
    """
    for name, value in items(document):
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not least.get(name, 0) <= number < math.inf:
                raise ValueError(f"{name}={number!r} must be finite and at least {least.get(name, 0)}")
            if isinstance(number, (int, float)) and number >= _TOO_LARGE:
                raise ValueError(f"{name}={number!r} must be less than 2^63")


def read_json(kind: type[_Document], text: str, version: int) -> _Document:
    """Read a dataclass from JSON that has a field "version".

    Args:
        kind: Dataclass with fields of plain types.
        text: The JSON.
        version: The only version that is accepted.

    Raises:
        ValueError: The text is not such a document. The message is one line that names the field.
    """
    try:
        content = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_twice)
        # The version is checked before the fields because another version may have other fields.
        found = content.get("version") if isinstance(content, dict) else None
        if found != version or isinstance(found, bool):
            raise ValueError(f"version is {_brief(found)}, but this lightning_memo reads version {version}")
        return _decode_document(kind, content, "")
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that occurs twice: programs differ in which of the two values they use."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{_brief(next(name for name in names if names.count(name) > 1))} occurs more than once")
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
    """Convert a JSON value to the type of a field's annotation, or raise a ValueError."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
        return _decode_document(kind, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(options[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is types.UnionType:
        return None if value is None else _decode(options[0], value, where)
    if origin is Literal and isinstance(value, str) and value in options:
        return value
    if kind is bool and isinstance(value, bool):
        return value
    is_number = kind in (int, float) and isinstance(value, (int, kind)) and not isinstance(value, bool)
    # Integers just below the bound are rounded up to it where the field is a float.
    if is_number and abs(value) < _TOO_LARGE and abs(number := kind(value)) < _TOO_LARGE:
        return number
    # Text is printed on terminals, where control characters would take effect.
    if kind is str and isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST_TEXT:
        return value
    raise ValueError(f"{where} is {_brief(value)}, expected {_expected(kind)}")


def _expected(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(f'"{option}"' for option in typing.get_args(kind))
    names = {bool: "true or false", int: "an integer", float: "a number", str: "printable text"}
    return names.get(kind, "a list")
