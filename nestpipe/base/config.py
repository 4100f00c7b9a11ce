"""Reads YAML into typed structs; every failure names file, path to the key, value and way out."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
import yaml

from nestpipe.base.errors import NestPipeError

__all__ = [
    "AtLeastOne",
    "Config",
    "Count",
    "NotNegative",
    "Positive",
    "Share",
    "YamlLoader",
    "decode",
    "explain",
    "parse_yaml",
    "read_yaml",
]

T = TypeVar("T")
#: Whole numbers from 1, as many as 32 bits count.
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
NotNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
AtLeastOne: TypeAlias = Annotated[float, msgspec.Meta(ge=1)]
Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
_BOUND: Final = re.compile(r"Expected `(?:int|float)` (>=|<=|>|<) (\S+)")
_BOUND_WORDS: Final = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


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
    document = parse_yaml(text, error, source=source)
    if document is None:
        raise error(f"{source}: the file is empty; it needs at least {', '.join(_required(into)) or 'one key'}")
    try:
        return msgspec.convert(document, into)
    except (msgspec.ValidationError, NestPipeError, ValueError, OverflowError, RecursionError) as cause:
        raise error(f"{source}: {explain(cause, document, into)}") from None


def parse_yaml(text: str, error: type[NestPipeError], *, source: str) -> Any:
    """The YAML text as plain values; None if there is nothing in it.

    Raises:
        error: if it is not YAML, gives a key twice, nests too deeply to be read, or holds a number that is not finite.
    """
    try:
        document = yaml.load(text, YamlLoader)
    except (yaml.YAMLError, ValueError) as cause:  # a ValueError comes of a date such as 2024-13-45
        raise error(f"{source}: not valid YAML: {' '.join(str(cause).split())}") from None
    except RecursionError:
        raise error(f"{source}: not valid YAML: nested too deeply; close the brackets that are open") from None
    for path, value in _numbers(document):
        if not math.isfinite(value):
            raise error(f"{source}: {path} must be finite, got {value}")
    return document


def _numbers(document: Any) -> Iterator[tuple[str, float]]:
    """Every float with its path; what an alias repeats once."""
    queue, seen = [("", document)], set()
    while queue:
        path, node = queue.pop()
        if isinstance(node, float):
            yield path, node
        elif isinstance(node, dict | list) and id(node) not in seen:
            seen.add(id(node))
            inside = enumerate(node) if isinstance(node, list) else node.items()
            queue += [(f"{path}[{k}]" if isinstance(node, list) else f"{path}.{k}".lstrip("."), v) for k, v in inside]


def explain(cause: Exception, document: Any, into: Any) -> str:
    """What is wrong with a document that does not fit `into`: path to the key, expectation, value, nearest key."""
    message = str(cause)
    found = re.search(r" - at `\$\.?([^`]*)`", message)
    path, value = _locate(found[1], message, document, into) if found else ("", document)
    message = re.sub(r" - at `[^`]*`", "", message)
    unknown = re.search(r"unknown field `([^`]*)`", message)
    bound = _BOUND.search(message)
    if unknown:
        near = difflib.get_close_matches(unknown[1], _field_names(into), n=1)
        message = f"unknown key {unknown[1]!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
    elif bound:
        limit = float(bound[2])
        words = "positive" if bound[1] == ">" and not limit else f"{_BOUND_WORDS[bound[1]]} {limit:.15g}"
        return f"{path} must be {words}, got {value!r}".lstrip()
    return (f"{path}: " if path else "") + message.replace("`", "'")


def _locate(path: str, message: str, document: Any, into: Any) -> tuple[str, Any]:
    """The path with the keys for which msgspec writes `[...]`, and the value there."""
    done: list[str] = []
    node = document
    for step in re.findall(r"\[\.\.\.\]|\[\d+\]|[^.\[\]]+", path):
        if step == "[...]" and isinstance(node, dict):
            key = next((key for key in node if _fails(_only(document, done, key), into, message)), None)
            if key is None:
                return path, None
            done.append(key)
            node = node[key]
        elif step.startswith("[") and isinstance(node, list) and step != "[...]":
            done.append(step)
            node = node[int(step[1:-1])]
        elif isinstance(node, dict) and step in node:
            done.append(step)
            node = node[step]
        else:
            return path, None
    return re.sub(r"\.\[", "[", ".".join(map(str, done))), node


def _only(document: Any, path: list[str], key: Any) -> Any:
    """The document with one key alone in the mapping at `path`."""
    if not path:
        return {key: document[key]}
    step, *rest = path
    if isinstance(document, list):
        at = int(step[1:-1])
        return [_only(each, rest, key) if i == at else each for i, each in enumerate(document)]
    return {**document, step: _only(document[step], rest, key)}


def _fails(document: Any, into: Any, message: str) -> bool:
    try:
        msgspec.convert(document, into)
    except (msgspec.ValidationError, NestPipeError, ValueError, OverflowError) as cause:
        return str(cause) == message
    return False


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
