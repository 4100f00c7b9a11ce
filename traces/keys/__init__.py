"""Key streams: readers, statistics, generators, clustering of samples."""

from traces.keys.clustering import cluster_keys, cluster_stream, duplicate_rows
from traces.keys.generate import zipf_ranks
from traces.keys.layout import detect_layout
from traces.keys.reader import read_columns, read_keys
from traces.keys.scale import KeyFiles, KeyRatios, duplication_of, read_key_files, statistics_at
from traces.keys.sets import CodedStream, MicroBatchDuplication, StreamStatistics, dense_codes, stream_statistics
from traces.keys.stats import KeyStatistics, key_statistics, largest_world_size, split_matrix
from traces.keys.stream import KeyStream, group_sequences, mix64, owner_of, row_keys

__all__ = [
    "CodedStream",
    "KeyFiles",
    "KeyRatios",
    "KeyStatistics",
    "KeyStream",
    "MicroBatchDuplication",
    "StreamStatistics",
    "cluster_keys",
    "cluster_stream",
    "dense_codes",
    "detect_layout",
    "duplicate_rows",
    "duplication_of",
    "group_sequences",
    "key_statistics",
    "largest_world_size",
    "mix64",
    "owner_of",
    "read_columns",
    "read_key_files",
    "read_keys",
    "row_keys",
    "split_matrix",
    "statistics_at",
    "stream_statistics",
    "zipf_ranks",
]
