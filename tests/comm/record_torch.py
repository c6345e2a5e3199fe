"""Record what torch.distributed gives for the cases: ``python tests/comm/record_torch.py FILE``.

Needs torch, NumPy and ml_dtypes; nothing of Phalanx.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import cases as cs
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NARROW = {"bfloat16": np.float32, "float8_e4m3fn": np.float32}


def tensor(x: Any) -> Any:
    if isinstance(x, list):
        return [tensor(part) for part in x]
    name = x.dtype.name
    plain = x.astype(NARROW[name]) if name in NARROW else x
    return torch.tensor(plain).to(getattr(torch, name))


def array(x: Any) -> Any:
    if x is None or isinstance(x, list):
        return x if x is None else [array(part) for part in x]
    if x.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        return x.to(torch.float32).numpy()
    return x.numpy()


def run(case: cs.Case, rank: int, group: Any) -> Any:
    """One case, by torch's own functions."""
    x, count = tensor(cs.given(case, rank)), len(case.ranks)
    op = getattr(dist.ReduceOp, case.op) if case.op else None
    if case.name == "all_reduce":
        dist.all_reduce(x, op, group)
        return x
    if case.name == "reduce":
        dist.reduce(x, case.root, op, group)
        return x
    if case.name == "reduce_scatter_tensor":
        out = torch.empty_like(x[: x.shape[0] // count])
        dist.reduce_scatter_tensor(out, x, op, group)
        return out
    if case.name == "reduce_scatter uneven":
        out = torch.empty_like(x[case.ranks.index(rank)])
        dist.reduce_scatter(out, x, op, group)
        return out
    if case.name == "all_gather_into_tensor":
        out = torch.empty((count * x.shape[0],), dtype=x.dtype)
        dist.all_gather_into_tensor(out, x, group)
        return out
    if case.name == "all_gather":
        outs = [torch.empty_like(x) for _ in range(count)]
        dist.all_gather(outs, x, group)
        return outs
    if case.name == "broadcast":
        dist.broadcast(x, case.root, group)
        return x
    if case.name == "gather":
        outs = [torch.empty_like(x) for _ in range(count)] if rank == case.root else None
        dist.gather(x, outs, case.root, group)
        return outs
    if case.name == "scatter":
        out = torch.empty_like(x[0])
        dist.scatter(out, x if rank == case.root else None, case.root, group)
        return out
    if case.name == "all_to_all":
        outs = [torch.empty_like(x[0]) for _ in range(count)]
        dist.all_to_all(outs, x, group)
        return outs
    if case.name == "ring":
        me = case.ranks.index(rank)
        out = torch.empty_like(x)
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, case.ranks[(me + 1) % count], group),
                dist.P2POp(dist.irecv, out, case.ranks[me - 1], group),
            ]
        )
        for w in work:
            w.wait()
        return out
    out = torch.empty((sum(cs.came(case, rank)),), dtype=x.dtype)
    dist.all_to_all_single(out, x, cs.came(case, rank), cs.splits(case, rank), group)
    return out


def worker(rank: int, world: int, store: str, folder: str) -> None:
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", f"file://{store}", timeout, world, rank)
    groups: dict[Any, Any] = {}
    found: dict[str, Any] = {}
    for case in cs.cases(world):
        if case.ranks not in groups:
            groups[case.ranks] = dist.new_group(list(case.ranks))
        if rank not in case.ranks:
            found[case.key] = None
            continue
        try:
            found[case.key] = cs.plain(array(run(case, rank, groups[case.ranks])))
        except Exception as error:  # noqa: BLE001 - recorded
            found[case.key] = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    Path(folder, f"{world}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(target: str) -> None:
    rows = []
    for world in (2, 3):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (world, f"{folder}/store", folder), world)
            ranks = [json.loads(Path(folder, f"{world}.{r}.json").read_text()) for r in range(world)]
        for key in ranks[0]:
            rows.append([world, key, [r[key] for r in ranks]])
    about = f"torch {torch.__version__}, gloo"
    body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    Path(target).write_text(f'{{"library": "{about}", "cases": [\n{body}\n]}}\n')


if __name__ == "__main__":
    main(sys.argv[1])
