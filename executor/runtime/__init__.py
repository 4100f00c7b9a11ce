"""Running a program: lanes, ops, buffers, process groups, checkpoints, and watching over them."""

from executor.runtime.checkpoint import latest, remove_drafts, restore, save
from executor.runtime.cursor import plan_lanes
from executor.runtime.digests import state_digests
from executor.runtime.groups import ProcessGroups, join_world
from executor.runtime.lanes import Cost, OpTable, Runtime
from executor.runtime.numerics import NanPolicy
from executor.runtime.recorder import counters, gather_timeline, step_times_ms
from executor.runtime.trainer import CommDtype, Settings, Trainer
from executor.runtime.watchdog import Watchdog
from executor.runtime.wraps import Delay, Wrap, delayed, emulating

__all__ = [
    "CommDtype",
    "Cost",
    "Delay",
    "NanPolicy",
    "OpTable",
    "ProcessGroups",
    "Runtime",
    "Settings",
    "Trainer",
    "Watchdog",
    "Wrap",
    "counters",
    "delayed",
    "emulating",
    "gather_timeline",
    "join_world",
    "latest",
    "plan_lanes",
    "remove_drafts",
    "restore",
    "save",
    "state_digests",
    "step_times_ms",
]
