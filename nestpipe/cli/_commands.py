"""The commands by name, each with its module and one line of help; a module is imported when its command is called."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["COMMANDS", "CommandGroup", "Entry"]


class Entry(NamedTuple):
    """Where a command is, as `module:function` in this package, and its line in the list of commands."""

    target: str
    help: str
    settings: dict[str, Any] = {}  # noqa: RUF012  what click calls context settings; never changed


#: Commands by name; a group of commands has its line under "".
COMMANDS: Final[dict[str, Entry | dict[str, Entry]]] = {
    "reproduce": Entry("reproduce:reproduce", "Predict the published rows of a cluster from its baseline."),
    "simulate": Entry("simulate:simulate", "Simulate one schedule: metrics, where the time goes, what limits it."),
    "scale": Entry("scale:scale", "Scaling curves per schedule, and what limits each where it falls off."),
    "sweep": Entry("sweep:sweep", "Evaluate every configuration of a scenario; where schedules stop paying."),
    "plan": Entry("plan:plan", "The best configuration that meets constraints, and what it rests on."),
    "profile": Entry("profile:profile", "Measure op costs on the devices at hand."),
    "validate": Entry("validate:validate", "Predict a grid of configurations, run them all, and compare."),
    "report": Entry("report:report", "Write one self-contained HTML page about runs."),
    "diff": Entry("report:diff", "Compare two runs, simulated or measured, op by op."),
    "network": Entry("network:network", "Completion times of network cases, flow by flow."),
    "schedule": {
        "": Entry("", "The schedule catalogue and the schedule text."),
        "list": Entry("schedule:list_", "The schedules of the catalogue, one line each."),
        "show": Entry("schedule:show_", "The canonical text of a schedule, as a loop or unrolled."),
        "check": Entry("check:check", "Prove which version every read sees, or show what is wrong."),
    },
    "topology": {
        "": Entry("", "Clusters: accelerators, hosts and links, with the source of each number."),
        "list": Entry("topology:list_", "The clusters of the catalogue, one line each."),
        "show": Entry("topology:show_", "Tiers, bisection bandwidth, memory and hosts of a cluster."),
        "measured": Entry("topology:measured", "Measured collectives beside a cluster."),
        "accuracy": Entry("accuracy:accuracy", "Predicted against measured collectives, size by size."),
    },
    "trace": {
        "": Entry("", "Import, export and inspect traces."),
        "import": Entry("trace:import_", "Read traces, benchmark logs and workloads into one trace table."),
        "export": Entry("trace:export", "Write a trace table for HTA, Chrome, Chakra, ASTRA-sim or Perfetto."),
        "keys": Entry("keys:keys", "Unique ratio, overlap, skew and splits of a key stream."),
        "cluster": Entry("keys:cluster", "Put samples that share keys into the same micro-batch."),
        "replay": Entry("replay:replay", "Run a recorded trace again, as it was or under a schedule."),
    },
    "testbed": {
        "": Entry("", "Make, use and remove a testbed: a namespace per rank with shaped links (Linux, root)."),
        "up": Entry("testbed:up", "Make a testbed that stays until 'nestpipe testbed down'."),
        "down": Entry("testbed:down", "Remove a testbed and end what runs in it."),
        "run": Entry(
            "testbed:run",
            "Run a command on every rank of a testbed.",
            {"ignore_unknown_options": True, "allow_interspersed_args": False},
        ),
        "check": Entry("testbed:check", "Measure what shaped links really carry here."),
    },
}


class _Command(TyperCommand):
    """A command whose help lists its options under their panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for each in self.get_params(ctx):
            usual = "Arguments" if each.param_type_name == "argument" else "Options"
            panels.setdefault(getattr(each, "rich_help_panel", None) or usual, []).append(each)
        for name, params in panels.items():
            rows = [row for each in params if (row := each.get_help_record(ctx)) is not None]
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows)


class _Deferred(TyperCommand):
    """Stands for a command in lists and in completion, and becomes it when it is called."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, short_help=entry.help, rich_markup_mode=None)
        self._entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        module, function = self._entry.target.split(":")
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        target = getattr(import_module(f"nestpipe.cli.{module}"), function)
        app.command(self.name, cls=_Command, context_settings=dict(self._entry.settings))(target)
        return typer.main.get_command(app).make_context(info_name, args, parent, **extra)


class CommandGroup(TyperGroup):
    """All commands of the table."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, entry in COMMANDS.items():
            self.add_command(_group(name, entry) if isinstance(entry, dict) else _Deferred(name, entry))


def _group(name: str, entries: dict[str, Entry]) -> TyperGroup:
    line = entries[""].help
    commands = [_Deferred(each, entry) for each, entry in entries.items() if each]
    return TyperGroup(
        name=name, help=line, short_help=line, commands=commands, no_args_is_help=True, rich_markup_mode=None
    )
