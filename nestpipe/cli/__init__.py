"""The command line: each command parses, calls the library and prints.

Results go to stdout, progress and errors to stderr. Exit status: 0 good, 1 a check failed, 2 bad usage or bad input.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from nestpipe.base import NestPipeError
from nestpipe.cli._commands import CommandGroup

__all__ = ["app", "main"]

_WELCOME = """\
nestpipe predicts, explains and validates nested pipelining of large recommendation-model training.

plan a cluster             nestpipe plan examples/plan.yaml
see the scaling curve      nestpipe reproduce --out out
validate on real devices   nestpipe profile, then nestpipe validate

look at a schedule         nestpipe schedule show nestpipe, nestpipe schedule check nestpipe
try it at any size         nestpipe simulate --schedule nestpipe --world-size 1536

nestpipe --help lists every command, nestpipe COMMAND --help its options.
"""

_INTERRUPTED = 130  # what typer makes of Ctrl-C

app = typer.Typer(
    cls=CommandGroup,
    help="Predict, explain and validate nested pipelining of large recommendation-model training.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"nestpipe {version('nestpipe')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _welcome(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    del show_version
    if context.invoked_subcommand is None:
        typer.echo(_WELCOME, nl=False)


def main() -> None:
    """The `nestpipe` command: an error of the user's is one message on stderr and exit status 2."""
    try:
        app(prog_name="nestpipe")
    except NestPipeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            print("interrupted; nothing was left half-written", file=sys.stderr)
        raise
    except BrokenPipeError:  # the reader of stdout has gone, for example head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
