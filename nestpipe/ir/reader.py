"""Reads the text of `nestpipe.ir.text`, or says in which line and column it goes wrong and what to write there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Final, TypeAlias, TypeVar

from nestpipe.base import ScheduleError, unknown_name
from nestpipe.ir.cursor import Cursor, Token
from nestpipe.ir.kinds import MICRO_DATA, STATES, Data, OpKind
from nestpipe.ir.model import (
    ALL,
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
    State,
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
_Enum = TypeVar("_Enum", bound=StrEnum)
_Sections: TypeAlias = tuple[
    tuple[Part, ...], tuple[str, ...], tuple[State, ...], tuple[Buffer, ...], tuple[Stream, ...]
]


def read_documents(text: str, source: str, *, loop: bool) -> tuple[Loop | Program, ...]:
    """The documents of a text: one loop, or one or several programs.

    Raises:
        ScheduleError: with line, column and what was expected.
    """
    return tuple(_Reader(text, source).documents(loop))


class _Reader(Cursor):
    """Reads documents from a cursor over the lines of a text."""

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
            parts, layers, states, buffers, streams = self.sections(loop)
            return Loop(
                name=name,
                micro_batches=micro_batches,
                parts=parts,
                layers=layers,
                states=states,
                buffers=buffers,
                streams=streams,
                doc="\n".join(raw[1:].removeprefix(" ").rstrip() for raw in doc),
            )
        steps = self.positive(options, head, "steps")
        ranks = self.ranks(options["ranks"]) if "ranks" in options else None
        parts, layers, states, buffers, streams = self.sections(loop)
        return Program(
            name=name,
            steps=steps,
            micro_batches=micro_batches,
            parts=parts,
            layers=layers,
            states=states,
            buffers=buffers,
            streams=streams,
            ranks=ranks,
        )

    def sections(self, loop: bool) -> _Sections:
        self.at += 1
        parts, layers = self.splits()
        states = self.states()
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
        return parts, layers, states, tuple(buffers.values()), tuple(streams.values())

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

    def states(self) -> tuple[State, ...]:
        """The declarations of where states live, which come after parts and layers."""
        found: dict[tuple[Data, str | None], State] = {}
        while self.at < len(self.lines) and self.lines[self.at][0] and self.lines[self.at][1][0].text == "state":
            tokens = self.lines[self.at][1]
            if len(tokens) not in (3, 4) or (len(tokens) == 4 and tokens[3].text != "atomic"):
                self.fail(tokens[0], "expected 'state DATA ssd|host|device' or 'state DATA ssd|host|device atomic'")
            data, part = self.with_part(Data, tokens[1], "data")
            if data not in STATES or (data is Data.DENSE and len(tokens) == 4):
                self.fail(tokens[1], f"expected a state with rows, such as table or optimizer, got {tokens[1].text!r}")
            if (data, part) in found:
                self.fail(tokens[1], f"state {tokens[1].text} is declared twice; keep one")
            place = self.enum(Place, tokens[2], "place")
            found[data, part] = State(data=data, part=part, place=place, atomic=len(tokens) == 4)
            self.at += 1
        return tuple(found.values())

    def part(self, tokens: list[Token]) -> Part:
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

    def part_name(self, token: Token) -> str:
        if re.fullmatch(r"[a-z][a-z0-9_]*", token.text) is None:
            self.fail(token, f"a part or layer needs a name of small letters, digits and _, got {token.text!r}")
        return token.text

    def with_part(self, values: type[_Enum], token: Token, what: str) -> tuple[_Enum, str | None]:
        """A kind or data, and the part of it that is named after a dot."""
        name, dot, part = token.text.partition(".")
        found = self.enum(values, Token(name, token.line, token.column), what)
        if dot and part not in (known := (*self.parts, *self.layers)):
            self.fail(Token(part, token.line, token.column + len(name) + 1), unknown_name("part", part, known))
        return found, part if dot else None

    def buffer(self, tokens: list[Token]) -> Buffer:
        if len(tokens) != 4:
            self.fail(tokens[0], "expected 'buffer DATA host|device slots=N'")
        data = self.enum(Data, tokens[1], "data")
        if data in STATES:
            self.fail(tokens[1], f"{data} is a state, it needs no buffer; drop the line")
        place = self.enum(Place, tokens[2], "place")
        if place is Place.SSD:
            self.fail(tokens[2], "buffers live in host or device memory")
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
        step = self.number(Token(digits, tokens[1].line, tokens[1].column), "the step")
        return [self.op(line, loop=False, in_block=False, step=-step if sign else step) for line in self.block(indent)]

    def block(self, indent: int) -> Iterator[list[Token]]:
        self.at += 1
        while self.at < len(self.lines) and self.lines[self.at][0] > indent:
            yield self.lines[self.at][1]
            self.at += 1

    # -- ops --------------------------------------------------------------------------------------------------------

    def op(self, tokens: list[Token], *, loop: bool, in_block: bool, step: int) -> Op:
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
        clauses: dict[str, list[list[Token]]] = {}
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

    def ref(self, tokens: list[Token], loop: bool) -> OpRef:
        line = _Line(self, tokens, loop)
        kind, part = self.with_part(OpKind, line.take("an op kind"), "op kind")
        batch, micro_batch = line.index()
        line.end()
        return OpRef(kind=kind, part=part, batch=batch, micro_batch=micro_batch)

    def access(self, tokens: list[Token], loop: bool, batch: int, micro_batch: int | None) -> Access:
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

    def __init__(self, reader: _Reader, tokens: list[Token], loop: bool) -> None:
        self.reader, self.tokens, self.loop, self.at = reader, tokens, loop, 0

    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, expected: str) -> Token:
        token = self.peek()
        if token is None:
            last = self.tokens[-1]
            self.reader.fail(Token("", last.line, last.column + len(last.text)), f"expected {expected}")
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
            numbers = [Token(part, token.line, token.column) for part in (batch, *([micro_batch] if dot else []))]
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

    def offset(self, letter: str, token: Token) -> int | None:
        match = re.fullmatch(rf"{letter}(?:([+-])([1-9][0-9]*))?", token.text)
        if match is None:
            return None
        size = 0 if match[2] is None else self.reader.number(Token(match[2], token.line, token.column), "an offset")
        return -size if match[1] == "-" else size

    def items(self) -> list[list[Token]]:
        """The comma-separated items up to the next clause, each non-empty."""
        found: list[list[Token]] = [[]]
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
