"""A cursor over the lines of a schedule text, and the values that stand in them: names, numbers, ranks, options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NoReturn, TypeVar

from nestpipe.base import ScheduleError, unknown_name
from nestpipe.ir.model import NUMBER_MAX, RANKS_MAX

__all__ = ["Cursor", "Token"]

_SHOWN_MAX: Final = 160
_Enum = TypeVar("_Enum", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    line: int
    column: int


class Cursor:
    """A cursor over the lines of a text."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.raw = text.splitlines()
        self.lines: list[tuple[int, list[Token]]] = []
        for number, raw in enumerate(self.raw, start=1):
            content = raw.split("#", 1)[0]
            tokens = [Token(m.group(), number, m.start() + 1) for m in re.finditer(r",|[^\s,]+", content)]
            if tokens:
                self.lines.append((len(content) - len(content.lstrip()), tokens))
        self.at = 0

    def fail(self, token: Token, message: str) -> NoReturn:
        shown = self.raw[token.line - 1][: token.column + _SHOWN_MAX]
        marker = "".join("\t" if letter == "\t" else " " for letter in shown[: token.column - 1]) + "^"
        if token.column > _SHOWN_MAX:
            shown, marker = f"... {shown[token.column - 1 :]}", "    ^"
        raise ScheduleError(f"{self.source}:{token.line}:{token.column}: {message}\n  {shown}\n  {marker}")

    def options(self, tokens: list[Token], expected: tuple[str, ...]) -> dict[str, Token]:
        joined: list[Token] = []
        for token in tokens:  # ranks=0,2-5 comes in pieces, split at its commas
            if joined and (token.text == "," or joined[-1].text.endswith(",")):
                joined[-1] = Token(joined[-1].text + token.text, joined[-1].line, joined[-1].column)
            else:
                joined.append(token)
        found: dict[str, Token] = {}
        for token in joined:
            key, _, value = token.text.partition("=")
            if key not in expected:
                self.fail(token, unknown_name("option", key, expected))
            if not value:
                self.fail(token, f"expected {key}=VALUE")
            if key in found:
                self.fail(token, f"{key} is given twice; keep one")
            found[key] = Token(value, token.line, token.column + len(key) + 1)
        return found

    def name(self, token: Token) -> str:
        if token.text == ",":
            self.fail(token, "expected a name, got a comma")
        return token.text

    def number(self, token: Token, what: str, expected: str = "a whole number", least: int = 0) -> int:
        """A number of plain digits in bounds. Digits of other scripts have another spelling when shown."""
        digits = token.text
        known = re.fullmatch(r"[0-9]+", digits) is not None and len(digits.lstrip("0")) <= len(str(NUMBER_MAX))
        if not known or not least <= int(digits) <= NUMBER_MAX:
            shown = digits if len(digits) < 40 else f"{digits[:36]}..."
            self.fail(token, f"{what} must be {expected} of at most {NUMBER_MAX:,}, got {shown!r}")
        return int(digits)

    def positive(self, options: dict[str, Token], head: Token, key: str) -> int:
        if key not in options:
            self.fail(head, f"missing {key}=N")
        return self.number(options[key], key, "a positive integer", 1)

    def ranks(self, token: Token) -> tuple[int, ...]:
        found: set[int] = set()
        for part in token.text.split(","):
            bounds = [self.number(Token(b, token.line, token.column), "a rank in ranks=0,2-5") for b in part.split("-")]
            first, last = bounds[0], bounds[-1]
            if len(bounds) > 2 or last < first:
                self.fail(token, f"expected ranks such as 0,2-5, the lower first, got {part!r}")
            if last >= RANKS_MAX:
                self.fail(token, f"rank {last:,} is too large; ranks go up to {RANKS_MAX - 1:,}")
            part_ranks = range(first, last + 1)
            if not found.isdisjoint(part_ranks):
                self.fail(token, f"rank {min(found & set(part_ranks))} is given twice; keep one")
            found.update(part_ranks)
        return tuple(sorted(found))

    def enum(self, values: type[_Enum], token: Token, what: str) -> _Enum:
        try:
            return values(token.text)
        except ValueError:
            self.fail(token, unknown_name(what, token.text, [value.value for value in values]))
