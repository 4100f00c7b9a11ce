"""A profiler trace as a recording: who waited for whom, and which constants of the machine explain the rest."""

from traces.recording.build import recording
from traces.recording.model import Activity, Call, DeviceOp, Latencies, Meeting, RankRecording, Recording
from traces.recording.schedule import classified_share, recorded_schedule

__all__ = [
    "Activity",
    "Call",
    "DeviceOp",
    "Latencies",
    "Meeting",
    "RankRecording",
    "Recording",
    "classified_share",
    "recorded_schedule",
    "recording",
]
