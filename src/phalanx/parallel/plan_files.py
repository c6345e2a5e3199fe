"""Plans as JSON: stable keys, sorted, with a version."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

from phalanx.errors import InvalidValueError
from phalanx.parallel.layout import from_spec
from phalanx.parallel.mesh import DeviceMesh, Link
from phalanx.parallel.plan_parts import PlannedPipeline

if TYPE_CHECKING:
    from phalanx.parallel.plan import OperatorPlan, Plan, TensorPlan

VERSION = 1


def spec_to_data(spec: PartitionSpec) -> list[Any]:
    """A layout as JSON."""
    return [list(e) if isinstance(e, tuple) else e for e in spec]


def spec_from_data(data: list[Any]) -> PartitionSpec:
    """A layout from JSON."""
    entries = [tuple(e) if isinstance(e, list) else e for e in data] if isinstance(data, list) else [0]
    if not all(isinstance(axis, str) for e in entries if e is not None for axis in _axes(e)):
        raise TypeError(
            f"a layout has an axis, a list of axes or null for each dim, and is not {data!r}"
        )
    return PartitionSpec(*entries)


def _axes(entry: Any) -> tuple[Any, ...]:
    """The axes that cut a dim."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _number(x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise TypeError(f"{x!r} is no number")
    return x


def to_data(plan: Plan) -> dict[str, Any]:
    """A plan as nested dictionaries and lists."""
    return {
        "version": VERSION,
        "fingerprint": plan.fingerprint,
        "mesh": {
            "names": list(plan.mesh.names),
            "sizes": list(plan.mesh.sizes),
            "links": [list(astuple(link)) for link in plan.mesh.links],
        },
        "hardware": plan.hardware,
        "mode": plan.mode,
        "order": list(plan.order),
        "parameters": _tensors(plan.parameters),
        "inputs": _tensors(plan.inputs),
        "outputs": _tensors(plan.outputs),
        "output_order": list(plan.outputs),
        "operators": {o.key: _operator(o) for o in plan.operators},
        "operator_order": [o.key for o in plan.operators],
        "predicted": {
            "compute": plan.compute,
            "communication": plan.communication,
            "cost": plan.cost,
            "lower_bound": plan.lower_bound,
            "memory": dict(vars(plan.memory)),
        },
        "budget": None if plan.budget == float("inf") else plan.budget,
        "pins": {name: spec_to_data(spec) for name, spec in plan.pins.items()},
        "runner_up": None if plan.runner_up is None else dict(vars(plan.runner_up)),
        "notes": list(plan.notes),
        **({} if plan.pipeline is None else {"pipeline": plan.pipeline.to_data()}),
    }


def _tensors(tensors: Mapping[str, TensorPlan]) -> dict[str, Any]:
    return {
        name: {
            "shape": list(t.shape),
            "dtype": t.dtype,
            "spec": spec_to_data(t.spec),
            "bytes": t.bytes,
            "alternatives": [[spec_to_data(a.spec), a.cost] for a in t.alternatives],
        }
        for name, t in tensors.items()
    }


def _operator(o: OperatorPlan) -> dict[str, Any]:
    return {
        "primitive": o.primitive,
        "strategy": [list(cuts) for cuts in o.strategy],
        "operands": [spec_to_data(s) for s in o.operands],
        "results": [spec_to_data(s) for s in o.results],
        "routes": [[spec_to_data(s) for s in route] for route in o.routes],
        "seconds": o.seconds,
        "collectives": [{**vars(c), "axes": list(c.axes)} for c in o.collectives],
    }


def from_data(data: Any, source: str) -> Plan:
    """A plan from nested dictionaries and lists.

    Args:
        data: what `to_data` returned.
        source: where it comes from, for errors.
    """
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise InvalidValueError(
            f"A plan of version {VERSION} is needed. Received: {version} in {source!r}."
        )
    try:
        plan = _read(data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InvalidValueError(
            f"The plan is not complete, or was changed: {error!r}. Received: {source!r}."
        ) from error
    _check_layouts(plan, source)
    return plan


def _check_layouts(plan: Plan, source: str) -> None:
    """Refuse layouts that the mesh of the plan cannot give: files may be edited."""
    names, sizes = plan.mesh.names, plan.mesh.sizes
    for tensors in (plan.parameters, plan.inputs, plan.outputs):
        for tensor in tensors.values():
            try:
                from_spec(tensor.spec, names, tensor.shape, sizes)
            except InvalidValueError as error:
                raise InvalidValueError(
                    f"The plan in {source!r} has a layout of {tensor.name!r} that does not fit. {error}"
                ) from None
    for operator in plan.operators:
        specs = [*operator.operands, *operator.results, *itertools.chain(*operator.routes)]
        used = {axis for spec in specs for entry in spec for axis in _axes(entry)}
        if not used <= set(names):
            raise InvalidValueError(
                f"The plan in {source!r} cuts {operator.key!r} along axes that its mesh, {plan.mesh}, "
                f"does not have. Received: {sorted(used - set(names))}."
            )


def _read(data: Mapping[str, Any]) -> Plan:
    from phalanx.parallel.plan import MemoryUse, OperatorPlan, Plan, PlannedCollective, RunnerUp

    mesh, predicted = data["mesh"], data["predicted"]
    operators = [
        OperatorPlan(
            key,
            o["primitive"],
            tuple(tuple(cuts) for cuts in o["strategy"]),
            tuple(spec_from_data(s) for s in o["operands"]),
            tuple(spec_from_data(s) for s in o["results"]),
            tuple(tuple(spec_from_data(s) for s in route) for route in o["routes"]),
            o["seconds"],
            tuple(PlannedCollective(**{**c, "axes": tuple(c["axes"])}) for c in o["collectives"]),
        )
        for key in data["operator_order"]
        for o in [data["operators"][key]]
    ]
    order = data["order"]
    return Plan(
        DeviceMesh(tuple(mesh["names"]), tuple(mesh["sizes"]), tuple(Link(*x) for x in mesh["links"])),
        data["hardware"],
        _read_tensors(data["parameters"], order),
        _read_tensors(data["inputs"], order),
        _read_tensors(data["outputs"], data["output_order"]),
        tuple(operators),
        tuple(order),
        _number(predicted["compute"]),
        _number(predicted["communication"]),
        MemoryUse(**{name: _number(size) for name, size in predicted["memory"].items()}),
        _number(predicted["cost"]),
        _number(predicted["lower_bound"]),
        float("inf") if data["budget"] is None else data["budget"],
        data["mode"],
        data["fingerprint"],
        {name: spec_from_data(spec) for name, spec in data["pins"].items()},
        None if data["runner_up"] is None else RunnerUp(**data["runner_up"]),
        tuple(data["notes"]),
        PlannedPipeline.from_data(data["pipeline"]) if data.get("pipeline") else None,
    )


def _read_tensors(data: Mapping[str, Any], order: list[str]) -> dict[str, TensorPlan]:
    from phalanx.parallel.plan import Alternative, TensorPlan

    return {
        name: TensorPlan(
            name,
            tuple(t["shape"]),
            t["dtype"],
            spec_from_data(t["spec"]),
            t["bytes"],
            tuple(Alternative(spec_from_data(spec), cost) for spec, cost in t["alternatives"]),
        )
        for name in order
        if name in data
        for t in [data[name]]
    }


def digest(plan: Plan) -> str:
    """A short text that is the same for the same plan."""
    text = json.dumps(to_data(plan), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
