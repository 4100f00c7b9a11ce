"""Batches and tables: key sources, routing to shards, sharded storage."""

from executor.data.batch import Batch, Clustering, Feature, Int64, MicroBatch, Pooling, RawBatch, Source, cut, to_device
from executor.data.clustering import cluster_by_keys
from executor.data.files import DenseScale, LabeledKeys, read_labeled_keys
from executor.data.routing import Owned, Routed, dedup, join_by_group, own, shared_positions, split_by_group, with_union
from executor.data.sources import KeyStreamSource, SequenceSource, SyntheticSource
from executor.data.tables import HostStore, Layout, TableSpec, make_layout

__all__ = [
    "Batch",
    "Clustering",
    "DenseScale",
    "Feature",
    "HostStore",
    "Int64",
    "KeyStreamSource",
    "LabeledKeys",
    "Layout",
    "MicroBatch",
    "Owned",
    "Pooling",
    "RawBatch",
    "Routed",
    "SequenceSource",
    "Source",
    "SyntheticSource",
    "TableSpec",
    "cluster_by_keys",
    "cut",
    "dedup",
    "join_by_group",
    "make_layout",
    "own",
    "read_labeled_keys",
    "shared_positions",
    "split_by_group",
    "to_device",
    "with_union",
]
