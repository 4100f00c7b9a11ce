"""Models and optimisers in plain torch."""

from executor.models.dlrm import DLRM, Model
from executor.models.lookups import Lookups
from executor.models.metrics import AreaUnderCurve, area_under_curve
from executor.models.optimizers import DenseOptimizer, OptimizerKind, SparseOptimizer, sparse_optimizer
from executor.models.sequence import FuXiBlock, HSTUBlock, SequenceModel, next_item_scores

__all__ = [
    "DLRM",
    "AreaUnderCurve",
    "DenseOptimizer",
    "FuXiBlock",
    "HSTUBlock",
    "Lookups",
    "Model",
    "OptimizerKind",
    "SequenceModel",
    "SparseOptimizer",
    "area_under_curve",
    "next_item_scores",
    "sparse_optimizer",
]
