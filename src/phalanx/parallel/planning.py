"""Layouts for the losses of a program: searched, given, or read from a file."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.parallel.applying import apply
from phalanx.parallel.graph import Graph
from phalanx.parallel.hardware import Hardware, topology_of
from phalanx.parallel.mesh import DeviceMesh, Topology, mesh_of
from phalanx.parallel.options import ParallelOptions
from phalanx.parallel.placing import Cuts, batch_spec, checked_spec, names_of, specs_on
from phalanx.parallel.plan import Plan
from phalanx.parallel.reading import read
from phalanx.parallel.searching import search, searched_hardware
from phalanx.parallel.spanning import agree_on_plan
from phalanx.parallel.storing import is_named
from phalanx.parallel.tracing import Traced, trace
from phalanx.runtime.formatting import shown

__all__ = ["Planner", "Seen", "check_known", "dataset_cuts", "given_plan", "that_fit"]


@dataclass(frozen=True)
class Seen:
    """A loss that a program calls.

    Args:
        leaves: the arrays that it was called with.
        plan: its plan.
        names: the names of its parameters, without that of their argument, and those of the plan.
    """

    leaves: Sequence[Any]
    plan: Plan
    names: Mapping[str, str]


@dataclass(frozen=True)
class _Program:
    """A loss that needs a plan."""

    loss: Callable[..., Any]
    shapes: Any
    argnums: int | Sequence[int]
    traced: Traced
    training: bool


@dataclass
class Planner:
    """Finds plans for losses, all on one mesh and with one layout per parameter.

    Args:
        options: that are in force.
        devices: to lay out over.
        mesh: to use; None to search for one.
        hardware: what the devices can do.
        limits: `memory` and `time_limit` of the search.
        parameter_plan: layouts of parameters that are given.
        given: a plan that was made before.
        loaded: the names of the layouts that a strategy file gave.
    """

    options: ParallelOptions
    devices: Sequence[jax.Device]
    mesh: Mesh | None
    hardware: Hardware | str | None
    limits: Mapping[str, Any]
    parameter_plan: Mapping[str, Cuts]
    given: Plan | None
    loaded: frozenset[str] = frozenset()
    first: Plan | None = None
    known: dict[str, Plan] = field(default_factory=dict)
    seen: list[Seen] | None = None

    def laid_out(
        self,
        loss: Callable[..., Any],
        args: Sequence[Any],
        argnums: int | Sequence[int],
        training: bool = True,
    ) -> Callable[..., Any]:
        """The loss with the layouts of its plan in it.

        Args:
            loss: a function of parameters and inputs.
            args: its arguments.
            argnums: which of them are parameters.
            training: whether its gradient will be computed.
        """
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.numpy.result_type(x)), tuple(args)
        )
        traced = trace(loss, shapes, argnums)
        plan = self._plan(_Program(loss, shapes, argnums, traced, training))
        if self.first is None:
            self.first = plan
        if self.seen is not None:
            self.seen.append(
                Seen(jax.tree.leaves(tuple(args)), plan, _plain_names(args, argnums, traced))
            )
        return apply(loss, plan, self.mesh_of(plan), parameters=argnums)

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Seen]]:
        """Collect the losses that a program calls while it is traced."""
        found: list[Seen] = []
        self.seen = found
        try:
            yield found
        finally:
            self.seen = None

    def mesh_of(self, plan: Plan) -> Mesh:
        """The devices of a plan."""
        if self.mesh is not None:
            return self.mesh
        return plan.device_mesh(self.devices)

    def _plan(self, program: _Program) -> Plan:
        traced = program.traced
        graph = read(traced.closed, traced.names, traced.results, traced.parameters, program.training)
        fingerprint = graph.fingerprint()
        if fingerprint not in self.known:
            given = self.given
            if given is not None and not self.parameter_plan and _is_whole(given, fingerprint, graph):
                self.known[fingerprint] = given
            else:
                self.known[fingerprint] = self._searched(program)
            agree_on_plan(self.known[fingerprint], self.devices)
        return self.known[fingerprint]

    def _searched(self, program: _Program) -> Plan:
        options = self.options
        mode = "sharding_propagation" if options.sharding_propagation else options.search_mode
        hardware = searched_hardware(self.hardware).replace(all_to_all=options.enable_alltoall)
        before = self.first or self.given
        where: Any = topology_of(self.devices, hardware) if self.mesh is None else self.mesh
        if before is not None and self.mesh is None:
            where = before.mesh
        pins, notes = self._pins(program.traced, before)
        if mode == "sharding_propagation" and not pins:
            where, pins = _from_the_batch(where, program.traced)
        found = search(
            program.loss,
            program.shapes,
            where,
            hardware,
            mode=mode,
            parameters=program.argnums,
            training=program.training,
            pins=pins,
            **self.limits,
        )
        if before is not None and before is self.given:
            notes += _left_of(before, found)
        return replace(found, notes=(*found.notes, *notes)) if notes else found

    def _pins(self, traced: Traced, before: Plan | None) -> tuple[dict[str, PartitionSpec], list[str]]:
        """Layouts that are given: of parameters in earlier plans, by the user, of inputs; and notes."""
        shapes = {
            n: v.aval.shape for n, v in zip(traced.names, traced.closed.jaxpr.invars, strict=True)
        }
        parameters = [n for i, n in enumerate(traced.names) if i in traced.parameters]
        inputs = [n for i, n in enumerate(traced.names) if i not in traced.parameters]
        pins: dict[str, PartitionSpec] = {}
        if before is not None:
            for name in parameters:
                found = before.parameters.get(name)
                if found is not None and found.shape == tuple(shapes[name]):
                    pins[name] = found.spec
        owned = {name: shapes[name] for name in parameters}
        wanted, notes = that_fit(self.mesh, self.parameter_plan, owned, self.loaded)
        check_known(wanted, parameters)
        cuts = {n: c for n, c in wanted.items() if n in parameters}
        named = dataset_cuts(self.options, inputs)
        if named:
            cuts |= named
        if cuts:
            if self.mesh is None:  # because nothing is cut, but by axes that a plan will have
                pins |= {n: checked_spec(c, shapes[n], n) for n, c in cuts.items()}
            else:
                found_specs = specs_on(
                    self.mesh, list(cuts.values()), [shapes[n] for n in cuts], list(cuts)
                )
                pins |= dict(zip(cuts, found_specs, strict=True))
        return pins, notes


def given_plan(plan: Any) -> Plan | None:
    """A plan that was made before, or that of a file."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | Path):
        return Plan.load(plan)
    raise InvalidTypeError(f"A px.parallel.Plan is needed, or the path of one. Received: {shown(plan)}")


def _is_whole(plan: Plan, fingerprint: str, graph: Graph) -> bool:
    """Whether a plan is for this program, and has all of it in it; files may be edited."""
    tensors = {**plan.parameters, **plan.inputs, **plan.outputs}
    known = {*tensors, *(operator.key for operator in plan.operators)}
    return plan.fingerprint == fingerprint and known >= {node.key for node in graph.nodes}


def _left_of(given: Plan, found: Plan) -> list[str]:
    """What a plan of another program, or one with missing entries, could not say of this one."""
    if given.fingerprint == found.fingerprint:
        return ["The given plan is not complete; its layouts are kept, and the rest is searched."]
    notes = ["The given plan was made for another program; its layouts are kept where they fit."]
    for name, tensor in given.parameters.items():
        if name not in found.parameters:
            notes.append(f"{name} of the given plan is not in the program.")
        elif found.parameters[name].shape != tensor.shape:
            shapes = f"{list(tensor.shape)} there, {list(found.parameters[name].shape)} here"
            notes.append(f"{name} of the given plan is searched anew: its shape is {shapes}.")
    return notes


def _from_the_batch(where: Any, traced: Traced) -> tuple[Any, dict[str, PartitionSpec]]:
    """Batches cut along their first dim, as "data_parallel" says, from which layouts spread."""
    if isinstance(where, Topology):
        where = mesh_of(where, (where.size,))
    given = isinstance(where, DeviceMesh)
    sizes = dict(zip(where.names, where.sizes, strict=True)) if given else dict(where.shape)
    shapes = {n: v.aval.shape for n, v in zip(traced.names, traced.closed.jaxpr.invars, strict=True)}
    inputs = [n for i, n in enumerate(traced.names) if i not in traced.parameters]
    found = {name: batch_spec(shapes[name], sizes) for name in inputs if shapes[name]}
    return where, {name: spec for name, spec in found.items() if any(spec)}


def _plain_names(args: Sequence[Any], argnums: int | Sequence[int], traced: Traced) -> dict[str, str]:
    """The names of parameters in plans, by their names without that of the argument."""
    full = [name for i, name in enumerate(traced.names) if i in traced.parameters]
    plain = names_of(args[argnums]) if isinstance(argnums, int) else full
    return dict(zip(plain, full, strict=True))


def dataset_cuts(options: ParallelOptions, inputs: Sequence[str]) -> dict[str, Cuts]:
    """How `dataset_strategy` cuts the inputs of a loss; empty if the search may decide."""
    strategy = "full_batch" if options.full_batch else options.dataset_strategy
    if strategy == "full_batch":
        return {name: PartitionSpec() for name in inputs}
    if isinstance(strategy, str):
        return {}
    if len(strategy) != len(inputs):
        raise InvalidValueError(
            f"The input shapes size {len(inputs)} is not equal to dataset strategy size {len(strategy)}"
        )
    return dict(zip(inputs, strategy, strict=True))


def that_fit(
    mesh: Mesh | None,
    given: Mapping[str, Cuts],
    shapes: Mapping[str, tuple[int, ...]],
    loaded: Collection[str],
) -> tuple[dict[str, Cuts], list[str]]:
    """Layouts without those of a strategy file that do not fit the program, and what is to be said.

    Args:
        mesh: the devices; None if nothing is cut.
        given: the layouts of parameters by name.
        shapes: of the parameters of the program.
        loaded: the names of the layouts that come from a file.
    """
    found: dict[str, Cuts] = {}
    notes = []
    for name, cuts in given.items():
        shape = next((s for n, s in shapes.items() if is_named(n, name)), None)
        if name in loaded:
            if shape is None:
                notes.append(f"{name} of the strategy file is not in the program.")
                continue
            try:
                checked_spec(cuts, shape, name)
                if mesh is not None:
                    specs_on(mesh, [cuts], [shape], [name])
            except InvalidValueError as error:
                notes.append(f"The strategy file's layout of {name} is left out. {error}")
                continue
        found[name] = cuts
    return found, notes


def check_known(given: Iterable[str], names: Sequence[str]) -> None:
    """Refuse layouts of parameters that the program does not have."""
    for name in given:
        if not any(is_named(known, name) for known in names):
            close = difflib.get_close_matches(name, names, 3)
            hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
            raise InvalidValueError(
                f"The program has no parameter of this name. Received: {name!r} in parameter_plan."
                f"{hint} It has {', '.join(map(repr, names[:8]))}{'…' if len(names) > 8 else ''}."
            )
