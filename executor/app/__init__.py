"""The command line of the executor, its ranks, and the equality grid."""

from executor.app.cli import main
from executor.app.options import ModelKind, RunOptions
from executor.app.pool import RankPool
from executor.app.session import last_batch
from executor.app.workload import make_trainer, user_sequences

__all__ = [
    "ModelKind",
    "RankPool",
    "RunOptions",
    "last_batch",
    "main",
    "make_trainer",
    "user_sequences",
]
