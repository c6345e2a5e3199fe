"""Record what MindSpore gives for the cases that it has on CPUs, under its launcher.

``msrun --worker_num=3 --local_worker_num=3 --join=True tests/comm/record_mindspore.py FOLDER``

Each rank leaves a file in the folder; ``record_mindspore.py FOLDER FILE`` joins those of all numbers of
ranks. Needs MindSpore, NumPy and ml_dtypes; nothing of Phalanx.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cases as cs
import numpy as np

DTYPES = ["float16", "bfloat16", "float32", "int8", "int32", "int64"]
REDUCTIONS = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "AVG": "avg"}
MOVES = ["all_gather", "gather", "scatter", "broadcast"]


def is_known(case: cs.Case) -> bool:
    """Whether MindSpore has the case on CPUs."""
    if case.name == "all_reduce":
        return case.dtype in DTYPES and case.op in REDUCTIONS
    return case.name in MOVES and case.dtype in ("float32", "int64", "bfloat16")


def record(folder: str) -> None:
    import mindspore as ms
    from mindspore import mint
    from mindspore.communication import get_group_size, get_rank, init

    ms.set_device("CPU")
    init()
    dist, rank, world = mint.distributed, get_rank(), get_group_size()

    def tensor(x: Any) -> Any:
        if isinstance(x, list):
            return [tensor(part) for part in x]
        if x.dtype.name == "bfloat16":
            return ms.Tensor(x.astype(np.float32)).astype(ms.bfloat16)
        return ms.Tensor(x)

    def array(x: Any) -> Any:
        if x is None or isinstance(x, list):
            return x if x is None else [array(part) for part in x]
        return (x.astype(ms.float32) if x.dtype == ms.bfloat16 else x).asnumpy()

    def run(case: cs.Case, group: Any) -> Any:
        given, count = cs.given(case, rank), len(case.ranks)
        x = tensor(given)
        if case.name == "all_reduce":
            dist.all_reduce(x, REDUCTIONS[case.op], group)
            return x
        if case.name == "broadcast":
            dist.broadcast(x, case.root, group)
            return x
        if case.name == "scatter":
            out = tensor(np.zeros_like(given[0]))
            dist.scatter(out, x, case.root, group)
            return out
        outs = [tensor(np.zeros_like(given)) for _ in range(count)]
        if case.name == "all_gather":
            dist.all_gather(outs, x, group)
            return outs
        dist.gather(x, outs, case.root, group)
        return outs if rank == case.root else None

    groups: dict[Any, Any] = {tuple(range(world)): None}
    found: dict[str, Any] = {}
    for case in filter(is_known, cs.cases(world)):
        if case.ranks not in groups:
            groups[case.ranks] = dist.new_group(list(case.ranks), backend="mccl")
        if rank in case.ranks:
            try:
                found[case.key] = cs.plain(array(run(case, groups[case.ranks])))
            except Exception as error:  # noqa: BLE001 - recorded
                found[case.key] = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    Path(folder, f"{world}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def join(folder: str, target: str) -> None:
    rows = []
    for world in (2, 3):
        ranks = [json.loads(Path(folder, f"{world}.{r}.json").read_text()) for r in range(world)]
        for key in ranks[0] | ranks[-1]:
            rows.append([world, key, [r.get(key) for r in ranks]])
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    about = "MindSpore 2.10, mint.distributed on CPUs"
    Path(target).write_text(f'{{"library": "{about}", "cases": [\n{body}\n]}}\n')


if __name__ == "__main__":
    record(sys.argv[1]) if len(sys.argv) == 2 else join(sys.argv[1], sys.argv[2])
