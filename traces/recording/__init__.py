"""A profiler trace as a recording: who waited for whom, and which constants of the machine explain the rest."""

from traces.recording.build import recording
from traces.recording.host import HostUse, host_use
from traces.recording.model import Activity, Call, DeviceOp, Latencies, Meeting, RankRecording, Recording
from traces.recording.schedule import classified_share, own_routing, recorded_schedule

__all__ = [
    "Activity",
    "Call",
    "DeviceOp",
    "HostUse",
    "Latencies",
    "Meeting",
    "RankRecording",
    "Recording",
    "classified_share",
    "host_use",
    "own_routing",
    "recorded_schedule",
    "recording",
]
