"""Reads YAML into typed structs; every failure names file, path to the key, value and way out."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from nestpipe.base.errors import NestPipeError

__all__ = ["Config", "YamlLoader", "decode", "read_yaml"]

T = TypeVar("T")


class YamlLoader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, with the numbers of YAML 1.2: `2e10` and `1.0e9` are numbers, not text.

    A key that is given twice is refused: which of the two is meant cannot be known.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def number(self, node: yaml.ScalarNode) -> float | int:
        """A number with point or exponent; `2e10` is whole, so it counts rows as well as it measures time."""
        value = float(self.construct_yaml_float(node))
        return int(value) if "e" in node.value.lower() and value.is_integer() and abs(value) < 2**63 else value


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+\Z"),
    list("-+.0123456789"),
)
YamlLoader.add_constructor("tag:yaml.org,2002:float", YamlLoader.number)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every struct that a user writes as YAML: frozen, by keyword, unknown keys refused."""


def read_yaml(path: Path, into: type[T], error: type[NestPipeError]) -> T:
    """The file as an `into`.

    Raises:
        error: if the file cannot be read, is not YAML, or does not fit `into`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise error(f"{path}: cannot be read: {cause}") from None
    return decode(text, into, error, source=str(path))


def decode(text: str, into: type[T], error: type[NestPipeError], *, source: str) -> T:
    """The YAML text as an `into`; see `read_yaml`."""
    try:
        document = yaml.load(text, YamlLoader)
    except (yaml.YAMLError, ValueError) as cause:  # a ValueError comes of a date such as 2024-13-45
        raise error(f"{source}: not valid YAML: {str(cause).replace(chr(10), ' ')}") from None
    if document is None:
        raise error(f"{source}: the file is empty; it needs at least {', '.join(_required(into)) or 'one key'}")
    try:
        return msgspec.convert(document, into)
    except (msgspec.ValidationError, NestPipeError, ValueError) as cause:
        raise error(f"{source}: {_explain(str(cause), into)}") from None


def _explain(message: str, into: type) -> str:
    """msgspec's message with the path as a user writes it and the nearest known key."""
    path = re.search(r" - at `\$\.?([^`]*)`", message)
    message = re.sub(r" - at `[^`]*`", "", message)
    where = f"{path[1]}: " if path and path[1] else ""
    unknown = re.search(r"unknown field `([^`]*)`", message)
    if unknown:
        near = difflib.get_close_matches(unknown[1], _field_names(into), n=1)
        message = f"unknown key {unknown[1]!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
    return where + message.replace("`", "'")


def _required(into: type) -> list[str]:
    """The keys without which there is no `into`."""
    fields = msgspec.structs.fields(into) if issubclass(into, msgspec.Struct) else ()
    return [field.encode_name for field in fields if field.required]


def _field_names(into: object) -> list[str]:
    """Names of all fields of a struct and of the structs inside it."""
    names: list[str] = []
    queue, seen = [into], set()
    while queue:
        each = queue.pop()
        if isinstance(each, type) and issubclass(each, msgspec.Struct) and each not in seen:
            seen.add(each)
            for field in msgspec.structs.fields(each):
                names.append(field.encode_name)
                queue.append(field.type)
        else:
            queue += getattr(each, "__args__", ())
    return names
