"""Models and optimisers in plain torch."""

from executor.models.dlrm import DLRM, Model
from executor.models.optimizers import DenseOptimizer, OptimizerKind, SparseOptimizer, sparse_optimizer
from executor.models.sequence import FuXiBlock, HSTUBlock, SequenceModel, next_item_scores

__all__ = [
    "DLRM",
    "DenseOptimizer",
    "FuXiBlock",
    "HSTUBlock",
    "Model",
    "OptimizerKind",
    "SequenceModel",
    "SparseOptimizer",
    "next_item_scores",
    "sparse_optimizer",
]
