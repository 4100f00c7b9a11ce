"""Running a program: lanes, ops, buffers, process groups, checkpoints, and watching over them."""

from executor.runtime.checkpoint import latest, restore, save
from executor.runtime.cursor import make_plan
from executor.runtime.digests import state_digests
from executor.runtime.emulate import EmulatedDevice, emulating, fine_timers
from executor.runtime.lanes import Cost, OpTable, Runtime, is_realtime
from executor.runtime.numerics import NanPolicy
from executor.runtime.recorder import counters, gather_timeline
from executor.runtime.trainer import Settings, Trainer, Wrap
from executor.runtime.watchdog import Watchdog
from executor.runtime.worker import Precision
from executor.runtime.world import World, join_world
from executor.runtime.wraps import Delay, delayed, parse_delay, parse_device

__all__ = [
    "Cost",
    "Delay",
    "EmulatedDevice",
    "NanPolicy",
    "OpTable",
    "Precision",
    "Runtime",
    "Settings",
    "Trainer",
    "Watchdog",
    "World",
    "Wrap",
    "counters",
    "delayed",
    "emulating",
    "fine_timers",
    "gather_timeline",
    "is_realtime",
    "join_world",
    "latest",
    "make_plan",
    "parse_delay",
    "parse_device",
    "restore",
    "save",
    "state_digests",
]
