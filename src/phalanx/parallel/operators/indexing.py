"""Reading and writing at computed places: embeddings, slices, updates."""

from __future__ import annotations

from phalanx.parallel.layout import NONE
from phalanx.parallel.operators.base import Equation, Keeps, Operator, free_dims


def gather(eqn: Equation) -> Operator:
    """The places and the dims that are read as a whole may be cut.

    So may the dim that is indexed, if it is the only one: each device looks up what it has, and the sum
    over all devices is the result.
    """
    numbers = eqn.params["dimension_numbers"]
    slices = eqn.params["slice_sizes"]
    table, places = eqn.operands[0].shape, eqn.operands[1].shape
    out = eqn.results[0].shape
    loops: list[int] = []
    a, b, c = [NONE] * len(table), [NONE] * len(places), [NONE] * len(out)

    def loop(size: int) -> int:
        loops.append(size)
        return len(loops) - 1

    batch = [i for i in range(len(out)) if i not in numbers.offset_dims]
    for i, where in enumerate(batch):
        if out[where] > 1:
            b[i] = c[where] = loop(out[where])
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        a[i] = b[j]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [i for i in range(len(table)) if i not in gone]
    for i, where in zip(window, numbers.offset_dims, strict=True):
        if slices[i] == table[i] > 1:
            a[i] = c[where] = loop(table[i])
    if len(numbers.start_index_map) == 1:
        (indexed,) = numbers.start_index_map
        if indexed in numbers.collapsed_slice_dims and table[indexed] > 1:
            a[indexed] = loop(table[indexed])
    return Operator(
        eqn.name,
        "gather",
        tuple(loops),
        (tuple(a), tuple(b)),
        (tuple(c),),
        eqn.operands,
        eqn.results,
        gathers=True,
        keeps=Keeps.OTHERS,
    )


def scatter(eqn: Equation) -> Operator | None:
    """Dims that are written as a whole may be cut, and so may the dim that is indexed."""
    numbers = eqn.params["dimension_numbers"]
    table, places, updates = (s.shape for s in eqn.operands)
    if numbers.operand_batching_dims:
        return None
    loops: list[int] = []
    a, b, c = [NONE] * len(table), [NONE] * len(places), [NONE] * len(updates)

    def loop(size: int) -> int:
        loops.append(size)
        return len(loops) - 1

    window = [i for i in range(len(table)) if i not in numbers.inserted_window_dims]
    for i, where in zip(window, numbers.update_window_dims, strict=True):
        if updates[where] == table[i] > 1:
            a[i] = c[where] = loop(table[i])
    if len(numbers.scatter_dims_to_operand_dims) == 1:
        (indexed,) = numbers.scatter_dims_to_operand_dims
        if indexed in numbers.inserted_window_dims and table[indexed] > 1:
            a[indexed] = loop(table[indexed])
    return Operator(
        eqn.name,
        "scatter",
        tuple(loops),
        (tuple(a), tuple(b), tuple(c)),
        (tuple(a),),
        eqn.operands,
        eqn.results,
        keeps=Keeps.OTHERS,
    )


def dynamic_slice(eqn: Equation) -> Operator:
    """Dims that stay whole may be cut."""
    whole, part = eqn.operands[0].shape, eqn.results[0].shape
    sizes = tuple(a if a == b else 1 for a, b in zip(whole, part, strict=True))
    loops, dims = free_dims(sizes)
    places = tuple((NONE,) * len(s.shape) for s in eqn.operands[1:])
    return Operator(
        eqn.name,
        "gather",
        loops,
        (dims, *places),
        (dims,),
        eqn.operands,
        eqn.results,
        gathers=True,
    )
