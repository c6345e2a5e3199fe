"""How a distributed dataset is divided, in words."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.data.distribute.input_topology import InputTopology
from phalanx.data.distribute.sharding import Division, file_sources, nominal_batch
from phalanx.data.distribute.splitting import cut, cut_for_worker, deal, fill, sizes_per_step
from phalanx.data.plan.loaders import Loader
from phalanx.data.plan.nodes import INFINITE, UNKNOWN, PlanNode

_EXAMPLE = 8
"""The size of the batch that is shown where the size of batches is unknown."""


def describe(
    division: Division, topology: InputTopology, nodes: Sequence[PlanNode], reference: PlanNode | None
) -> str:
    """Which rows or files each worker and replica reads."""
    lines = [f"{topology.workers} worker(s) with {topology.replicas} replica(s) each"]
    if reference is None:
        return "\n".join([*lines, *_from_function(topology, nodes)])
    lines += [_source(reference), _policy(division)]
    if division.reason:
        lines.append(division.reason)
    if topology.workers * topology.replicas == 1:
        return "\n".join(lines)
    if division.policy == "FILE" and topology.workers > 1:
        lines += ["files:", *_files(division, reference)]
    return "\n".join([*lines, *_rows(division, reference)])


def _source(node: PlanNode) -> str:
    names = {INFINITE: "endlessly many", UNKNOWN: "an unknown number of"}
    count = names.get(node.cardinality, str(node.cardinality))
    size = nominal_batch(node)
    rows = "" if size is None else f" of {size} rows"
    kind = f" from a {type(node.source).__name__}" if isinstance(node, Loader) else ""
    return f"{count} global batches{rows}{kind}"


def _policy(division: Division) -> str:
    workers = {
        "DATA": "every worker reads all batches and keeps its own rows",
        "FILE": "each worker reads files of its own",
        "HINT": "each worker reads its shard, at the place that was marked",
        "OFF": "every worker reads and keeps everything",
    }[division.policy]
    if division.workers == 1:
        workers = "one worker reads everything"
    size = "its own size" if division.batch is None else f"the nominal size of {division.batch}"
    return f"policy {division.policy}: {workers}; a batch is cut by {size}"


def _files(division: Division, reference: PlanNode) -> list[str]:
    lines = []
    for worker in range(division.workers):
        files = [f for s in file_sources(reference) for f in deal(s.files, division.workers, worker)]
        lines.append(f"  worker {worker}: {', '.join(files)}")
    return lines


def _rows(division: Division, reference: PlanNode) -> list[str]:
    """The rows of the first batch that a worker reads."""
    size = nominal_batch(reference)
    rows = _EXAMPLE if size is None else size
    shared = division.policy == "DATA"
    whose = "the first batch" if shared else "the first rows that the worker reads"
    lines = [f"rows of {whose}{'' if size is not None else f', if it has {rows}'}:"]
    for worker in range(division.workers):
        if shared:
            slices = cut_for_worker(rows, division.workers, division.replicas, worker)
        elif division.batch is None:
            slices = cut(rows, division.workers * division.replicas)[: division.replicas]
        else:
            sizes = sizes_per_step(division.batch, division.workers, division.replicas, worker)[0]
            slices = fill(rows, sizes)
        for replica, part in enumerate(slices):
            lines.append(f"  worker {worker}, replica {replica}: {_range(part)}")
    return lines


def _range(part: slice) -> str:
    if part.start == part.stop:
        return "none"
    if part.stop - part.start == 1:
        return str(part.start)
    return f"{part.start} to {part.stop - 1}"


def _from_function(topology: InputTopology, nodes: Sequence[PlanNode]) -> list[str]:
    if len(nodes) > 1:
        return [
            "the input function is called once per replica, and its dataset is used as it is",
            "in each step every replica takes the next element of its own dataset",
        ]
    order = ", ".join(f"replica {i} element {i}" for i in range(min(topology.replicas, 4)))
    return [
        "the input function is called once per worker, and its dataset is used as it is",
        f"in each step every replica takes the next element: {order}, and so on",
    ]
