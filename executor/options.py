"""Options as dataclass fields: each is stated once, with its help, and becomes a flag and a key of a YAML file.

@dataclass(frozen=True, kw_only=True)
class Job:
    batch_size: int = option(256, "Samples per rank and batch.", group="Data", flag="--batch")

job = read_options(parser, [Job], arguments)[0]
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from nestpipe.base import ExecutorError, parse_yaml, unknown_name

__all__ = ["Scope", "option", "read_options", "terms"]


class Scope(StrEnum):
    """How far the value of an option has to be the same.

    result: it decides what is computed, so all ranks need the same, and so does a run that resumes another.
    run: all ranks need the same. rank: every rank may have its own.
    """

    RESULT = "result"
    RUN = "run"
    RANK = "rank"


def option(
    default: Any,
    help: str,
    *,
    group: str,
    flag: str | None = None,
    parse: Callable[[str], Any] | None = None,
    collect: Callable[[Sequence[str]], Any] | None = None,
    scope: Scope = Scope.RESULT,
    identity: Callable[[Any], str] = str,
) -> Any:
    """A dataclass field that is an option.

    Args:
        default: what it is if it is not given.
        help: one sentence.
        group: the heading under which the help lists it.
        flag: `--name-of-the-field` if not given.
        parse: from the text of one value; by the type of the field if not given.
        collect: from the texts of all values of an option that may be repeated.
        scope: who needs the same value.
        identity: the text by which values are compared, for what is more than its name, such as a file.
    """
    metadata = {"help": help, "group": group, "flag": flag, "parse": parse, "collect": collect}
    return field(default=default, metadata=metadata | {"scope": scope, "identity": identity})


def terms(given: Any, *scopes: Scope) -> dict[str, str]:
    """The options of these scopes as a dataclass instance has them: flags and texts by which they are compared."""
    return {
        _flag(each): each.metadata["identity"](getattr(given, each.name))
        for each in fields(given)
        if each.metadata["scope"] in scopes
    }


def read_options(parser: argparse.ArgumentParser, classes: Sequence[type], arguments: Sequence[str]) -> list[Any]:
    """Instances of the dataclasses from the command line, and from the YAML file that `--config` names.

    Args:
        parser: gets a group of options for every group of fields.
        classes: dataclasses whose fields are all made by `option`; a field of two of them is one option.
        arguments: the command line; its options win over the file's.

    Raises:
        ExecutorError: if the file is invalid, or a class refuses a value.
        SystemExit: 2 for an unknown flag or a value of the wrong type.
    """
    known = _add_options(parser, classes)
    config = parser.parse_known_args(arguments)[0].config
    if config is not None:
        parser.set_defaults(**_read_config(config, known))
    given = vars(parser.parse_args(arguments))
    for name, each in known.items():
        collect = each.metadata["collect"]
        if collect is not None:
            given[name] = collect(given[name] or ())
    return [cls(**{each.name: given[each.name] for each in fields(cls)}) for cls in classes]


def _add_options(parser: argparse.ArgumentParser, classes: Sequence[type]) -> dict[str, Field[Any]]:
    groups: dict[str, Any] = {}
    known: dict[str, Field[Any]] = {}
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of these options by name; flags win.")
    for cls in classes:
        hints = get_type_hints(cls)
        for each in fields(cls):
            assert each.default is not MISSING, f"{each.name} is not made by `option`"
            title = each.metadata["group"]
            group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
            if each.name not in known:
                _add_option(group, each, _plain_type(hints[each.name]))
            known[each.name] = each
    return known


def _add_option(group: Any, each: Field[Any], kind: Any) -> None:
    help = each.metadata["help"]
    more: dict[str, Any] = {"default": each.default, "metavar": getattr(kind, "__name__", "text").upper()}
    if each.metadata["collect"] is not None:
        more = {"action": "append", "metavar": "TEXT"}
        help += " May be repeated."
    elif kind is bool:
        more = {"default": each.default, "action": argparse.BooleanOptionalAction}
    elif issubclass(kind, StrEnum):
        more |= {"type": kind, "choices": list(kind), "metavar": "NAME"}
        help += f" One of {', '.join(kind)} (default {each.default})."
    else:
        more |= {"type": each.metadata["parse"] or kind}
        help = help.rstrip(".") + ("." if each.default is None else f" (default {_shown(each.default)}).")
    group.add_argument(_flag(each), dest=each.name, help=help, **more)


def _flag(each: Field[Any]) -> str:
    return each.metadata["flag"] or "--" + each.name.replace("_", "-")


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else f"{default}"


def _plain_type(hint: Any) -> Any:
    """The type of a value that is given: without None, and text for what has a parser of its own."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    return str if get_origin(hint) is not None else hint


def _read_config(path: Path, known: dict[str, Field[Any]]) -> dict[str, Any]:
    """Defaults of the parser from a file; texts are parsed as on the command line.

    Raises:
        ExecutorError: if it is not a mapping of option names.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExecutorError(f"{path}: invalid: {error}") from None
    document = parse_yaml(text, ExecutorError, source=str(path))
    if not isinstance(document, dict):
        raise ExecutorError(f"{path}: expected options by name, such as 'batch: 256', got {document!r:.40}")
    by_flag = {_flag(each).removeprefix("--"): each for each in known.values()}
    defaults: dict[str, Any] = {}
    for key, value in document.items():
        name = str(key).replace("_", "-")
        if name not in by_flag:
            raise ExecutorError(f"{path}: {unknown_name('option', name, by_flag)}")
        if value is not None:
            defaults[by_flag[name].name] = _given(f"{path}: {key}", by_flag[name], value)
    return defaults


def _given(where: str, each: Field[Any], value: Any) -> Any:
    """A value of a file in the form that the command line gives: texts, or whether a flag is set."""
    is_flag = isinstance(each.default, bool)
    if is_flag != isinstance(value, bool):
        raise ExecutorError(f"{where}: expected {'true or false' if is_flag else 'a value'}, got {value!r}")
    parts = [str(part) for part in (value if isinstance(value, list) else [value])]
    return parts if each.metadata["collect"] is not None else value if isinstance(value, bool) else ",".join(parts)
