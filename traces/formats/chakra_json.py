"""The JSON variant of Chakra traces: an object whose `workload_graph` lists the nodes."""

from __future__ import annotations

from pathlib import Path

from nestpipe.base import NS_PER_US, TraceError
from traces.formats.chakra import NODE_TYPES, ChakraNode, ChakraTrace, summarise
from traces.formats.format import Head, Options
from traces.formats.json_stream import whole
from traces.formats.reading import load_json, rank_in_name

__all__ = ["read", "sniff", "summarise"]


def sniff(head: Head) -> bool:
    """Whether this is JSON with a `workload_graph`."""
    return head.is_json and head.has("workload_graph")


def read(path: Path, _options: Options) -> ChakraTrace:
    """A rank's trace.

    Raises:
        TraceError: an invalid node.
    """
    name, document = str(path), load_json(path)
    if not isinstance(document, dict):
        raise TraceError(f"{name}: expected a JSON object with workload_graph")
    graph = document.get("workload_graph")
    if not isinstance(graph, list):
        raise TraceError(f"{name}: workload_graph must be a list of nodes, got {type(graph).__name__}")
    nodes: list[ChakraNode] = []
    for index, node in enumerate(graph):
        if not isinstance(node, dict):
            raise TraceError(f"{name}: workload_graph[{index}] must be an object, got {node!r}")
        identity, kind = whole(node.get("Id", node.get("id"))), whole(node.get("NodeType", node.get("type")))
        runtime = whole(node.get("runtime", 0))
        if identity is None or kind is None or not 0 <= kind < len(NODE_TYPES) or runtime is None or runtime < 0:
            raise TraceError(
                f"{name}: workload_graph[{index}] must have a whole Id, a NodeType from 0 to {len(NODE_TYPES) - 1} "
                f"and a runtime in us, got {identity!r}, {kind!r}, {node.get('runtime')!r}"
            )
        known = ("Id", "Name", "NodeType", "ctrlDeps", "data_deps", "runtime")
        attributes = {key: value for key, value in node.items() if key not in known}
        deps = [[item for item in node.get(key) or [] if type(item) is int] for key in ("ctrlDeps", "data_deps")]
        nodes.append(
            ChakraNode(identity, str(node.get("Name", "")), kind, deps[0], deps[1], 0, runtime * NS_PER_US, attributes)
        )
    metadata = {key: value for key, value in document.items() if key != "workload_graph"}
    return ChakraTrace(name, "JSON", rank_in_name(name), metadata, nodes, len(nodes))
