"""The command line of the executor, its ranks, and the equality grid."""

from executor.app.cli import main
from executor.app.options import ModelKind, RunOptions, make_trainer, user_sequences
from executor.app.pool import RankPool
from executor.app.session import last_batch

__all__ = [
    "ModelKind",
    "RankPool",
    "RunOptions",
    "last_batch",
    "main",
    "make_trainer",
    "user_sequences",
]
