"""Reads the text of `nestpipe.ir.text`, or says in which line and column it goes wrong and what to write there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NoReturn, TypeVar

from nestpipe.base import ScheduleError, unknown_name
from nestpipe.ir.kinds import MICRO_DATA, STATES, Data, OpKind
from nestpipe.ir.model import (
    ALL,
    NUMBER_MAX,
    RANKS_MAX,
    Access,
    Buffer,
    Loop,
    MicroBlock,
    MicroIndex,
    Op,
    OpRef,
    Place,
    Program,
    Resource,
    Stream,
)
from nestpipe.ir.parts import Part, Split

__all__ = ["VERSION", "read_documents"]

VERSION: Final = "v1"
_CLAUSES: Final = ("after", "reads", "writes")
_HEADS: Final = {
    True: f"loop {VERSION} NAME micro_batches=N",
    False: f"program {VERSION} NAME steps=S micro_batches=N",
}
_SHOWN_MAX: Final = 160
_Enum = TypeVar("_Enum", bound=StrEnum)


def read_documents(text: str, source: str, *, loop: bool) -> tuple[Loop | Program, ...]:
    """The documents of a text: one loop, or one or several programs.

    Raises:
        ScheduleError: with line, column and what was expected.
    """
    return tuple(_Reader(text, source).documents(loop))


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    line: int
    column: int


class _Reader:
    """A cursor over the lines of a text."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.raw = text.splitlines()
        self.lines: list[tuple[int, list[_Token]]] = []
        for number, raw in enumerate(self.raw, start=1):
            content = raw.split("#", 1)[0]
            tokens = [_Token(m.group(), number, m.start() + 1) for m in re.finditer(r",|[^\s,]+", content)]
            if tokens:
                self.lines.append((len(content) - len(content.lstrip()), tokens))
        self.at = 0

    def fail(self, token: _Token, message: str) -> NoReturn:
        shown = self.raw[token.line - 1][: token.column + _SHOWN_MAX]
        marker = "".join("\t" if letter == "\t" else " " for letter in shown[: token.column - 1]) + "^"
        if token.column > _SHOWN_MAX:
            shown, marker = f"... {shown[token.column - 1 :]}", "    ^"
        raise ScheduleError(f"{self.source}:{token.line}:{token.column}: {message}\n  {shown}\n  {marker}")

    # -- documents --------------------------------------------------------------------------------------------------

    def documents(self, loop: bool) -> Iterator[Loop | Program]:
        if not self.lines:
            line = max(len(self.raw), 1)
            raise ScheduleError(f"{self.source}:{line}: expected '{_HEADS[loop]}', found the end of the text")
        while self.at < len(self.lines):
            head = self.lines[self.at][1][0]
            if head.text not in ("loop", "program"):
                self.fail(head, f"expected 'loop' or 'program', got {head.text!r}")
            if (head.text == "loop") is not loop:
                self.fail(head, f"expected {'one loop' if loop else 'programs only'}; write '{_HEADS[loop]}'")
            if loop and self.at:
                self.fail(head, "expected one loop, found another; give each loop a file of its own")
            yield self.document(loop)

    def document(self, loop: bool) -> Loop | Program:
        tokens = self.lines[self.at][1]
        head = tokens[0]
        if len(tokens) < 3:
            self.fail(head, f"expected '{_HEADS[loop]}'")
        if tokens[1].text != VERSION:
            self.fail(tokens[1], f"unknown version {tokens[1].text!r}; this release reads {VERSION}")
        name = self.name(tokens[2])
        options = self.options(tokens[3:], ("micro_batches",) if loop else ("steps", "micro_batches", "ranks"))
        micro_batches = self.positive(options, head, "micro_batches")
        if loop:
            doc = [raw for raw in self.raw[: head.line - 1] if raw.startswith("#")]
            parts, layers, buffers, streams = self.sections(loop)
            return Loop(
                name=name,
                micro_batches=micro_batches,
                parts=parts,
                layers=layers,
                buffers=buffers,
                streams=streams,
                doc="\n".join(raw[1:].removeprefix(" ").rstrip() for raw in doc),
            )
        steps = self.positive(options, head, "steps")
        ranks = self.ranks(options["ranks"]) if "ranks" in options else None
        parts, layers, buffers, streams = self.sections(loop)
        return Program(
            name=name,
            steps=steps,
            micro_batches=micro_batches,
            parts=parts,
            layers=layers,
            buffers=buffers,
            streams=streams,
            ranks=ranks,
        )

    def sections(self, loop: bool) -> tuple[tuple[Part, ...], tuple[str, ...], tuple[Buffer, ...], tuple[Stream, ...]]:
        self.at += 1
        parts, layers = self.splits()
        buffers: dict[str, Buffer] = {}
        streams: dict[str, Stream] = {}
        while self.at < len(self.lines):
            indent, tokens = self.lines[self.at]
            head = tokens[0]
            if indent == 0:
                break
            if head.text not in ("buffer", "stream"):
                self.fail(head, f"expected 'buffer' or 'stream', got {head.text!r}")
            if len(tokens) > 1 and tokens[1].text in (buffers if head.text == "buffer" else streams):
                self.fail(tokens[1], f"{head.text} {tokens[1].text} is declared twice; keep one")
            if head.text == "stream":
                stream = self.stream(loop)
                streams[stream.name] = stream
            elif streams:
                self.fail(head, "buffers come before streams; move it up")
            else:
                buffer = self.buffer(tokens)
                buffers[buffer.data] = buffer
                self.at += 1
        return parts, layers, tuple(buffers.values()), tuple(streams.values())

    def splits(self) -> tuple[tuple[Part, ...], tuple[str, ...]]:
        """The declarations of parts and layers, which come first."""
        self.parts: dict[str, Part] = {}
        self.layers: tuple[str, ...] = ()
        while self.at < len(self.lines) and self.lines[self.at][0]:
            tokens = self.lines[self.at][1]
            if tokens[0].text == "layer" and not self.layers:
                items = _Line(self, tokens[1:], loop=True).items() if len(tokens) > 1 else []
                if not items or any(len(item) > 1 for item in items):
                    self.fail(tokens[0], "expected 'layer NAME, NAME', in the order of forward")
                self.layers = tuple(self.part_name(item[0]) for item in items)
                if len(set(self.layers)) < len(self.layers):
                    self.fail(tokens[1], "a layer is declared twice; keep one")
            elif tokens[0].text == "part":
                part = self.part(tokens)
                self.parts[part.name] = part
            else:
                break
            self.at += 1
        if both := set(self.parts) & set(self.layers):
            self.fail(self.lines[self.at - 1][1][0], f"{min(both)} is both a part and a layer; rename one")
        return tuple(self.parts.values()), self.layers

    def part(self, tokens: list[_Token]) -> Part:
        expected = "expected 'part NAME in t-1', 'part NAME not t-1', 'part NAME static' or 'part NAME cached|uncached'"
        if len(tokens) < 3 or self.layers:
            self.fail(tokens[0], "parts come before layers; move it up" if self.layers else expected)
        name, split = self.part_name(tokens[1]), self.enum(Split, tokens[2], "kind of part")
        if name in self.parts:
            self.fail(tokens[1], f"part {name} is declared twice; keep one")
        if len(tokens) != 3 + split.with_batch:
            self.fail(tokens[0], expected)
        offset = _Line(self, tokens, loop=True).offset("t", tokens[3]) if split.with_batch else None
        if split.with_batch and not offset:
            self.fail(tokens[3], f"expected another batch such as t-1 or t+1, got {tokens[3].text!r}")
        same = [p.name for p in self.parts.values() if (p.split, p.offset) == (split, offset)]
        if same and split is not Split.STATIC:
            self.fail(tokens[1], f"part {name} holds the same keys as {same[0]}; keep one of them")
        return Part(name=name, split=split, offset=offset)

    def part_name(self, token: _Token) -> str:
        if re.fullmatch(r"[a-z][a-z0-9_]*", token.text) is None:
            self.fail(token, f"a part or layer needs a name of small letters, digits and _, got {token.text!r}")
        return token.text

    def with_part(self, values: type[_Enum], token: _Token, what: str) -> tuple[_Enum, str | None]:
        """A kind or data, and the part of it that is named after a dot."""
        name, dot, part = token.text.partition(".")
        found = self.enum(values, _Token(name, token.line, token.column), what)
        if dot and part not in (known := (*self.parts, *self.layers)):
            self.fail(_Token(part, token.line, token.column + len(name) + 1), unknown_name("part", part, known))
        return found, part if dot else None

    def buffer(self, tokens: list[_Token]) -> Buffer:
        if len(tokens) != 4:
            self.fail(tokens[0], "expected 'buffer DATA host|device slots=N'")
        data = self.enum(Data, tokens[1], "data")
        if data in STATES:
            self.fail(tokens[1], f"{data} is a state, it needs no buffer; drop the line")
        place = self.enum(Place, tokens[2], "place")
        slots = self.positive(self.options(tokens[3:], ("slots",)), tokens[0], "slots")
        return Buffer(data=data, place=place, slots=slots)

    def stream(self, loop: bool) -> Stream:
        indent, tokens = self.lines[self.at]
        if len(tokens) != 4 or tokens[2].text != "on":
            self.fail(tokens[0], "expected 'stream NAME on RESOURCE'")
        name, resource = self.name(tokens[1]), self.enum(Resource, tokens[3], "resource")
        self.at += 1
        body: list[Op | MicroBlock] = []
        while self.at < len(self.lines) and self.lines[self.at][0] > indent:
            line = self.lines[self.at][1]
            if not loop:
                body += self.step_block()
            elif line[0].text == "for":
                body.append(self.micro_block())
            else:
                body.append(self.op(line, loop=True, in_block=False, step=0))
                self.at += 1
        return Stream(name=name, resource=resource, body=tuple(body))

    def micro_block(self) -> MicroBlock:
        indent, tokens = self.lines[self.at]
        if [token.text for token in tokens] != ["for", "m"]:
            self.fail(tokens[0], "expected 'for m'")
        ops = tuple(self.op(line, loop=True, in_block=True, step=0) for line in self.block(indent))
        if not ops:
            self.fail(tokens[0], "'for m' needs at least one indented op")
        return MicroBlock(ops=ops)

    def step_block(self) -> list[Op]:
        indent, tokens = self.lines[self.at]
        if tokens[0].text != "step" or len(tokens) != 2:
            self.fail(tokens[0], "expected 'step I' with a whole number before the ops of a program")
        sign, digits = re.fullmatch(r"(-?)(.*)", tokens[1].text).groups()  # type: ignore[union-attr]
        step = self.number(_Token(digits, tokens[1].line, tokens[1].column), "the step")
        return [self.op(line, loop=False, in_block=False, step=-step if sign else step) for line in self.block(indent)]

    def block(self, indent: int) -> Iterator[list[_Token]]:
        self.at += 1
        while self.at < len(self.lines) and self.lines[self.at][0] > indent:
            yield self.lines[self.at][1]
            self.at += 1

    # -- values -----------------------------------------------------------------------------------------------------

    def options(self, tokens: list[_Token], expected: tuple[str, ...]) -> dict[str, _Token]:
        joined: list[_Token] = []
        for token in tokens:  # ranks=0,2-5 comes in pieces, split at its commas
            if joined and (token.text == "," or joined[-1].text.endswith(",")):
                joined[-1] = _Token(joined[-1].text + token.text, joined[-1].line, joined[-1].column)
            else:
                joined.append(token)
        found: dict[str, _Token] = {}
        for token in joined:
            key, _, value = token.text.partition("=")
            if key not in expected:
                self.fail(token, unknown_name("option", key, expected))
            if not value:
                self.fail(token, f"expected {key}=VALUE")
            if key in found:
                self.fail(token, f"{key} is given twice; keep one")
            found[key] = _Token(value, token.line, token.column + len(key) + 1)
        return found

    def name(self, token: _Token) -> str:
        if token.text == ",":
            self.fail(token, "expected a name, got a comma")
        return token.text

    def number(self, token: _Token, what: str, expected: str = "a whole number", least: int = 0) -> int:
        """A number of plain digits in bounds. Digits of other scripts have another spelling when shown."""
        digits = token.text
        known = re.fullmatch(r"[0-9]+", digits) is not None and len(digits.lstrip("0")) <= len(str(NUMBER_MAX))
        if not known or not least <= int(digits) <= NUMBER_MAX:
            shown = digits if len(digits) < 40 else f"{digits[:36]}..."
            self.fail(token, f"{what} must be {expected} of at most {NUMBER_MAX:,}, got {shown!r}")
        return int(digits)

    def positive(self, options: dict[str, _Token], head: _Token, key: str) -> int:
        if key not in options:
            self.fail(head, f"missing {key}=N")
        return self.number(options[key], key, "a positive integer", 1)

    def ranks(self, token: _Token) -> tuple[int, ...]:
        found: set[int] = set()
        for part in token.text.split(","):
            bounds = [
                self.number(_Token(b, token.line, token.column), "a rank in ranks=0,2-5") for b in part.split("-")
            ]
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

    def enum(self, values: type[_Enum], token: _Token, what: str) -> _Enum:
        try:
            return values(token.text)
        except ValueError:
            self.fail(token, unknown_name(what, token.text, [value.value for value in values]))

    # -- ops --------------------------------------------------------------------------------------------------------

    def op(self, tokens: list[_Token], *, loop: bool, in_block: bool, step: int) -> Op:
        line = _Line(self, tokens, loop)
        kind, part = self.with_part(OpKind, line.take("an op kind"), "op kind")
        batch, micro_batch = line.index()
        if micro_batch == ALL:
            self.fail(tokens[0], "'*' stands for what is waited for, not for an op; write m, m+1, ...")
        if loop and in_block is (micro_batch is None):
            self.fail(
                tokens[0], "an op inside 'for m' needs a micro-batch" if in_block else "a micro-batch needs 'for m'"
            )
        own = None if micro_batch is None else int(micro_batch)
        clauses: dict[str, list[list[_Token]]] = {}
        while (token := line.peek()) is not None:
            if token.text not in _CLAUSES:
                self.fail(token, f"expected one of {', '.join(_CLAUSES)}, got {token.text!r}")
            if token.text in clauses:
                self.fail(token, f"{token.text} is given twice; join the two lists with a comma")
            line.take("a clause")
            clauses[token.text] = line.items()
        return Op(
            kind=kind,
            part=part,
            batch=batch,
            micro_batch=own,
            after=tuple(self.ref(item, loop) for item in clauses.get("after", [])),
            reads=tuple(self.access(item, loop, batch, own) for item in clauses.get("reads", [])),
            writes=tuple(self.access(item, loop, batch, own) for item in clauses.get("writes", [])),
            step=step,
        )

    def ref(self, tokens: list[_Token], loop: bool) -> OpRef:
        line = _Line(self, tokens, loop)
        kind, part = self.with_part(OpKind, line.take("an op kind"), "op kind")
        batch, micro_batch = line.index()
        line.end()
        return OpRef(kind=kind, part=part, batch=batch, micro_batch=micro_batch)

    def access(self, tokens: list[_Token], loop: bool, batch: int, micro_batch: int | None) -> Access:
        line = _Line(self, tokens, loop)
        data, part = self.with_part(Data, line.take("data"), "data")
        if data in STATES:
            line.end()
            return Access(data=data, part=part)
        if data in MICRO_DATA and micro_batch is None:
            self.fail(tokens[0], f"{data} is per micro-batch; only an op with a micro-batch can use it")
        if line.peek() is None:
            return Access(data=data, part=part, batch=batch, micro_batch=micro_batch if data in MICRO_DATA else None)
        at, micro = line.index()
        line.end()
        if (data in MICRO_DATA) is (micro is None) or micro == ALL:
            wanted = "micro-batch; name one" if data in MICRO_DATA else "batch; drop the micro-batch"
            self.fail(tokens[0], f"{data} is per {wanted}")
        return Access(data=data, part=part, batch=at, micro_batch=None if micro is None else int(micro))


class _Line:
    """A cursor over the tokens of one line."""

    def __init__(self, reader: _Reader, tokens: list[_Token], loop: bool) -> None:
        self.reader, self.tokens, self.loop, self.at = reader, tokens, loop, 0

    def peek(self) -> _Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, expected: str) -> _Token:
        token = self.peek()
        if token is None:
            last = self.tokens[-1]
            self.reader.fail(_Token("", last.line, last.column + len(last.text)), f"expected {expected}")
        self.at += 1
        return token

    def end(self) -> None:
        if (token := self.peek()) is not None:
            self.reader.fail(token, f"expected a comma or the next clause, got {token.text!r}")

    def index(self) -> tuple[int, MicroIndex]:
        """The batch that comes next, and its micro-batch where it has one."""
        token = self.take("a batch")
        if not self.loop:
            batch, dot, micro_batch = token.text.partition(".")
            numbers = [_Token(part, token.line, token.column) for part in (batch, *([micro_batch] if dot else []))]
            found = [self.reader.number(part, "a batch such as 3 or 3.1", "whole numbers") for part in numbers]
            return found[0], found[1] if dot else None
        offset = self.offset("t", token)
        if offset is None:
            self.reader.fail(token, f"expected a batch such as t or t+1, got {token.text!r}")
        follow = self.peek()
        if follow is not None and follow.text == ALL.value:
            self.at += 1
            return offset, ALL
        inner = None if follow is None else self.offset("m", follow)
        self.at += inner is not None
        return offset, inner

    def offset(self, letter: str, token: _Token) -> int | None:
        match = re.fullmatch(rf"{letter}(?:([+-])([1-9][0-9]*))?", token.text)
        if match is None:
            return None
        size = 0 if match[2] is None else self.reader.number(_Token(match[2], token.line, token.column), "an offset")
        return -size if match[1] == "-" else size

    def items(self) -> list[list[_Token]]:
        """The comma-separated items up to the next clause, each non-empty."""
        found: list[list[_Token]] = [[]]
        while (token := self.peek()) is not None and token.text not in _CLAUSES:
            if token.text != ",":
                found[-1].append(token)
            elif not found[-1]:
                break
            else:
                found.append([])
            self.at += 1
        if not found[-1]:
            at = self.peek() or self.tokens[-1]
            self.reader.fail(at, "expected an item before and after each comma")
        return found
