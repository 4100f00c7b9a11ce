"""The schedule as text: `show` prints a loop or a program, `parse` reads it back, exactly.

The grammar, one op per line, `#` starts a comment (kept only at the head of a loop, as its `doc`):

    loop v1 NAME micro_batches=N
      buffer DATA host|device slots=N
      stream NAME on RESOURCE
        KIND BATCH [after KIND BATCH, ...] [reads DATA [BATCH], ...] [writes DATA [BATCH], ...]
        for m
          KIND BATCH MICRO [after KIND BATCH [MICRO|*], ...] [reads ...] [writes ...]

In a loop BATCH is `t`, `t+1`, `t-1`, ... and MICRO is `m`, `m+1`, ...; `*` waits for every micro-batch. Data without a
batch is the op's own instance, or a state. A program is headed `program v1 NAME steps=S micro_batches=N`, with
`ranks=0,2-5` where it is not for every rank; its ops stand under `step I` lines and carry absolute indices: `forward 3`
or, with a micro-batch, `forward 3.1`.

Canonical text has one spelling: `show(parse(text)) == text` for canonical `text`, and `parse(show(s)) == s` always.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import NoReturn, TypeVar

from nestpipe.base import ScheduleError, unknown_name
from nestpipe.ir.model import (
    ALL,
    MICRO_DATA,
    STATES,
    Access,
    Buffer,
    Data,
    Loop,
    MicroBlock,
    Op,
    OpKind,
    OpRef,
    Place,
    Program,
    Resource,
    Stream,
)

__all__ = ["parse", "parse_programs", "show", "show_op"]

VERSION = "v1"
_CLAUSES = ("after", "reads", "writes")
_Enum = TypeVar("_Enum", bound=StrEnum)


def show(schedule: Loop | Program) -> str:
    """The canonical text of a loop or program, ending in a newline."""
    if isinstance(schedule, Loop):
        lines = [f"# {line}".rstrip() for line in schedule.doc.splitlines()]
        lines.append(f"loop {VERSION} {schedule.name} micro_batches={schedule.micro_batches}")
    else:
        ranks = "" if schedule.ranks is None else f" ranks={_show_ranks(schedule.ranks)}"
        lines = [
            f"program {VERSION} {schedule.name} steps={schedule.steps} micro_batches={schedule.micro_batches}{ranks}"
        ]
    lines += [f"  buffer {buffer.data} {buffer.place} slots={buffer.slots}" for buffer in schedule.buffers]
    for stream in schedule.streams:
        lines.append(f"  stream {stream.name} on {stream.resource}")
        if isinstance(schedule, Loop):
            for item in stream.body:
                if isinstance(item, MicroBlock):
                    lines.append("    for m")
                    lines += [f"      {show_op(op, loop=True)}" for op in item.ops]
                else:
                    lines.append(f"    {show_op(item, loop=True)}")
        else:
            for step, ops in groupby(stream.ops, key=lambda op: op.step):
                lines.append(f"    step {step}")
                lines += [f"      {show_op(op, loop=False)}" for op in ops]
    return "\n".join(lines) + "\n"


def show_op(op: Op, *, loop: bool) -> str:
    """The canonical line of one op, without indentation."""
    width = 9 if op.micro_batch is not None and loop else 5
    line = f"{op.kind.value:<20}{_index(op.batch, op.micro_batch, loop):<{width}}"
    if op.after:
        line += "  after " + ", ".join(f"{ref.kind} {_index(ref.batch, ref.micro_batch, loop)}" for ref in op.after)
    for clause, accesses in (("reads", op.reads), ("writes", op.writes)):
        if accesses:
            line += f"  {clause} " + ", ".join(_show_access(access, op, loop) for access in accesses)
    return line.rstrip()


def parse(text: str, *, source: str = "schedule") -> Loop:
    """The loop that `text` describes.

    Args:
        text: a loop in the grammar above.
        source: what to call the text in errors, for example its file name.

    Raises:
        ScheduleError: with line, column and what was expected.
    """
    documents = _Parser(text, source).documents()
    if len(documents) != 1 or not isinstance(documents[0], Loop):
        raise ScheduleError(
            f"{source}: expected one loop, found {len(documents)} documents; write 'loop {VERSION} NAME'"
        )
    return documents[0]


def parse_programs(text: str, *, source: str = "schedule") -> tuple[Program, ...]:
    """The programs of `text`: one for every rank, or several, each with its `ranks`.

    Raises:
        ScheduleError: with line, column and what was expected.
    """
    documents = _Parser(text, source).documents()
    programs = tuple(document for document in documents if isinstance(document, Program))
    if not programs or len(programs) != len(documents):
        raise ScheduleError(f"{source}: expected programs only; write 'program {VERSION} NAME steps=S micro_batches=N'")
    return programs


def _index(batch: int, micro_batch: object, loop: bool) -> str:
    if not loop:
        return str(batch) if micro_batch is None else f"{batch}.{micro_batch}"
    if micro_batch is None:
        return _offset("t", batch)
    return _offset("t", batch) + " " + (_offset("m", micro_batch) if isinstance(micro_batch, int) else str(micro_batch))


def _offset(letter: str, value: int) -> str:
    return letter if value == 0 else f"{letter}{value:+d}"


def _show_access(access: Access, op: Op, loop: bool) -> str:
    own = access.batch is None or (
        access.batch == op.batch and access.micro_batch == (op.micro_batch if access.data in MICRO_DATA else None)
    )
    if own or access.batch is None:
        return access.data
    return f"{access.data} {_index(access.batch, access.micro_batch, loop)}"


def _show_ranks(ranks: Iterable[int]) -> str:
    parts = []
    for _, run in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(parts)


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    line: int
    column: int


class _Parser:
    """Reads documents line by line; every failure names line, column and what was expected."""

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

    def fail(self, token: _Token | None, message: str) -> NoReturn:
        if token is None:
            raise ScheduleError(f"{self.source}:{max(len(self.raw), 1)}: {message}, found the end of the text")
        shown = self.raw[token.line - 1]
        marker = " " * (token.column - 1) + "^"
        raise ScheduleError(f"{self.source}:{token.line}:{token.column}: {message}\n  {shown}\n  {marker}")

    def documents(self) -> list[Loop | Program]:
        if not self.lines:
            self.fail(None, f"expected 'loop {VERSION} NAME micro_batches=N'")
        found: list[Loop | Program] = []
        while self.at < len(self.lines):
            found.append(self.document())
        return found

    def document(self) -> Loop | Program:
        tokens = self.lines[self.at][1]
        head = tokens[0]
        if head.text not in ("loop", "program"):
            self.fail(head, f"expected 'loop' or 'program', got {head.text!r}")
        if len(tokens) < 3:
            self.fail(head, f"expected '{head.text} {VERSION} NAME ...'")
        if tokens[1].text != VERSION:
            self.fail(tokens[1], f"unknown version {tokens[1].text!r}; this release reads {VERSION}")
        loop = head.text == "loop"
        expected = ("micro_batches",) if loop else ("steps", "micro_batches", "ranks")
        options = self.options(tokens[3:], expected)
        doc = self.doc(head.line) if loop and not self.at else ""
        self.at += 1
        buffers, streams = self.sections(loop)
        try:
            micro_batches = self.positive(options.get("micro_batches"), head, "micro_batches")
            if loop:
                return Loop(name=tokens[2].text, micro_batches=micro_batches, buffers=buffers, streams=streams, doc=doc)
            return Program(
                name=tokens[2].text,
                steps=self.positive(options.get("steps"), head, "steps"),
                micro_batches=micro_batches,
                buffers=buffers,
                streams=streams,
                ranks=self.ranks(options["ranks"]) if "ranks" in options else None,
            )
        except ScheduleError as error:
            raise error if str(error).startswith(self.source) else ScheduleError(f"{self.source}: {error}") from None

    def doc(self, line: int) -> str:
        head = [raw for raw in self.raw[: line - 1] if raw.startswith("#")]
        return "\n".join(raw[1:].removeprefix(" ").rstrip() for raw in head)

    def options(self, tokens: list[_Token], expected: tuple[str, ...]) -> dict[str, _Token]:
        found: dict[str, _Token] = {}
        # ranks=0,2-5 is split at its commas by the tokeniser
        joined: list[_Token] = []
        for token in tokens:
            if joined and (token.text == "," or joined[-1].text.endswith(",")):
                joined[-1] = _Token(joined[-1].text + token.text, joined[-1].line, joined[-1].column)
            else:
                joined.append(token)
        for token in joined:
            key, _, value = token.text.partition("=")
            if key not in expected:
                self.fail(token, unknown_name("option", key, expected))
            if not value:
                self.fail(token, f"expected {key}=VALUE")
            found[key] = _Token(value, token.line, token.column + len(key) + 1)
        return found

    def positive(self, token: _Token | None, head: _Token, key: str) -> int:
        if token is None:
            self.fail(head, f"missing {key}=N")
        if not token.text.isdigit() or int(token.text) < 1:
            self.fail(token, f"{key} must be a positive integer, got {token.text!r}")
        return int(token.text)

    def ranks(self, token: _Token) -> tuple[int, ...]:
        found: set[int] = set()
        for part in token.text.split(","):
            bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
            if bounds is None:
                self.fail(token, f"expected ranks such as 0,2-5, got {token.text!r}")
            found.update(range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1))
        return tuple(sorted(found))

    def sections(self, loop: bool) -> tuple[tuple[Buffer, ...], tuple[Stream, ...]]:
        buffers: list[Buffer] = []
        streams: list[Stream] = []
        while self.at < len(self.lines):
            indent, tokens = self.lines[self.at]
            head = tokens[0]
            if indent == 0:
                break
            if head.text == "buffer":
                if streams:
                    self.fail(head, "buffers come before streams")
                buffers.append(self.buffer(tokens))
                self.at += 1
            elif head.text == "stream":
                streams.append(self.stream(loop))
            else:
                self.fail(head, f"expected 'buffer' or 'stream', got {head.text!r}")
        for kind, names in (("buffer", [str(b.data) for b in buffers]), ("stream", [s.name for s in streams])):
            for name in names:
                if names.count(name) > 1:
                    raise ScheduleError(f"{self.source}: {kind} {name} is declared twice")
        return tuple(buffers), tuple(streams)

    def buffer(self, tokens: list[_Token]) -> Buffer:
        if len(tokens) != 4:
            self.fail(tokens[0], "expected 'buffer DATA host|device slots=N'")
        data = self.enum(Data, tokens[1], "data")
        if data in STATES:
            self.fail(tokens[1], f"{data} is a state, it needs no buffer")
        slots = self.options(tokens[3:], ("slots",))["slots"]
        place = self.enum(Place, tokens[2], "place")
        return Buffer(data=data, place=place, slots=self.positive(slots, tokens[0], "slots"))

    def stream(self, loop: bool) -> Stream:
        indent, tokens = self.lines[self.at]
        if len(tokens) != 4 or tokens[2].text != "on":
            self.fail(tokens[0], "expected 'stream NAME on RESOURCE'")
        resource = self.enum(Resource, tokens[3], "resource")
        self.at += 1
        body: list[Op | MicroBlock] = []
        while self.at < len(self.lines) and self.lines[self.at][0] > indent:
            head = self.lines[self.at][1][0]
            if loop and head.text == "for":
                body.append(self.micro_block())
            elif not loop and head.text == "step":
                body += self.step_block()
            elif not loop:
                self.fail(head, "expected 'step I' before the ops of a program")
            else:
                body.append(self.op(self.lines[self.at][1], loop=True, in_block=False, step=0))
                self.at += 1
        return Stream(name=tokens[1].text, resource=resource, body=tuple(body))

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
        if len(tokens) != 2 or re.fullmatch(r"-?\d+", tokens[1].text) is None:
            self.fail(tokens[0], "expected 'step I' with a whole number")
        step = int(tokens[1].text)
        return [self.op(line, loop=False, in_block=False, step=step) for line in self.block(indent)]

    def block(self, indent: int) -> Iterator[list[_Token]]:
        self.at += 1
        while self.at < len(self.lines) and self.lines[self.at][0] > indent:
            yield self.lines[self.at][1]
            self.at += 1

    def enum(self, values: type[_Enum], token: _Token, what: str) -> _Enum:
        try:
            return values(token.text)
        except ValueError:
            self.fail(token, unknown_name(what, token.text, [value.value for value in values]))

    def op(self, tokens: list[_Token], *, loop: bool, in_block: bool, step: int) -> Op:
        line = _Line(self, tokens, loop)
        kind = self.enum(OpKind, line.take("an op kind"), "op kind")
        batch, micro_batch = line.index("a batch")
        if loop and in_block is (micro_batch is None):
            self.fail(
                tokens[0], "an op inside 'for m' needs a micro-batch" if in_block else "a micro-batch needs 'for m'"
            )
        if micro_batch == ALL:
            self.fail(tokens[0], "'*' stands for what is waited for, not for an op")
        own = None if micro_batch is None else int(micro_batch)
        clauses: dict[str, list[list[_Token]]] = {}
        while (token := line.peek()) is not None:
            if token.text not in _CLAUSES:
                self.fail(token, f"expected one of {', '.join(_CLAUSES)}, got {token.text!r}")
            if token.text in clauses:
                self.fail(token, f"{token.text} is given twice")
            line.take("a clause")
            clauses[token.text] = line.items()
        return Op(
            kind=kind,
            batch=batch,
            micro_batch=own,
            after=tuple(self.ref(item, loop) for item in clauses.get("after", [])),
            reads=tuple(self.access(item, loop, batch, own) for item in clauses.get("reads", [])),
            writes=tuple(self.access(item, loop, batch, own) for item in clauses.get("writes", [])),
            step=step,
        )

    def ref(self, tokens: list[_Token], loop: bool) -> OpRef:
        line = _Line(self, tokens, loop)
        kind = self.enum(OpKind, line.take("an op kind"), "op kind")
        batch, micro_batch = line.index("a batch")
        line.end()
        return OpRef(kind=kind, batch=batch, micro_batch=ALL if micro_batch == ALL else micro_batch)  # type: ignore[arg-type]

    def access(self, tokens: list[_Token], loop: bool, batch: int, micro_batch: int | None) -> Access:
        line = _Line(self, tokens, loop)
        data = self.enum(Data, line.take("data"), "data")
        if data in STATES:
            line.end()
            return Access(data=data)
        if data in MICRO_DATA and micro_batch is None:
            self.fail(tokens[0], f"{data} is per micro-batch; only an op with a micro-batch can use it")
        if line.peek() is None:
            return Access(data=data, batch=batch, micro_batch=micro_batch if data in MICRO_DATA else None)
        at, micro = line.index("a batch")
        line.end()
        if (data in MICRO_DATA) is (micro is None) or micro == ALL:
            self.fail(tokens[0], f"{data} is per {'micro-batch' if data in MICRO_DATA else 'batch'}")
        return Access(data=data, batch=at, micro_batch=None if micro is None else int(micro))


class _Line:
    """A cursor over the tokens of one line."""

    def __init__(self, parser: _Parser, tokens: list[_Token], loop: bool) -> None:
        self.parser, self.tokens, self.loop, self.at = parser, tokens, loop, 0

    def peek(self) -> _Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, expected: str) -> _Token:
        token = self.peek()
        if token is None:
            last = self.tokens[-1]
            self.parser.fail(_Token("", last.line, last.column + len(last.text)), f"expected {expected}")
        self.at += 1
        return token

    def end(self) -> None:
        if (token := self.peek()) is not None:
            self.parser.fail(token, f"expected a comma or the next clause, got {token.text!r}")

    def index(self, expected: str) -> tuple[int, int | str | None]:
        token = self.take(expected)
        if not self.loop:
            match = re.fullmatch(r"(\d+)(?:\.(\d+))?", token.text)
            if match is None:
                self.parser.fail(token, f"expected {expected} such as 3 or 3.1, got {token.text!r}")
            return int(match[1]), None if match[2] is None else int(match[2])
        batch = self.offset("t", token)
        if batch is None:
            self.parser.fail(token, f"expected {expected} such as t or t+1, got {token.text!r}")
        follow = self.peek()
        if follow is not None and follow.text == ALL.value:
            self.at += 1
            return batch, ALL
        micro_batch = None if follow is None else self.offset("m", follow)
        self.at += micro_batch is not None
        return batch, micro_batch

    @staticmethod
    def offset(letter: str, token: _Token) -> int | None:
        match = re.fullmatch(rf"{letter}(?:([+-])([1-9]\d*))?", token.text)
        if match is None:
            return None
        return int(f"{match[1] or '+'}{match[2] or 0}")

    def items(self) -> list[list[_Token]]:
        """The comma-separated items up to the next clause, each non-empty."""
        found: list[list[_Token]] = [[]]
        while (token := self.peek()) is not None and token.text not in _CLAUSES:
            self.at += 1
            if token.text == ",":
                found.append([])
            else:
                found[-1].append(token)
        if not all(found):
            self.parser.fail(self.tokens[self.at - 1], "expected an item before and after each comma")
        return found
