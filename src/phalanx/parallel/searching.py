"""`search`: the cheapest plan for a program, on the best mesh."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.errors import InvalidTypeError, InvalidValueError, NotFoundError, ResourceExhaustedError
from phalanx.parallel import building
from phalanx.parallel.algo_parameters import AlgoParameters, current_algo_parameters
from phalanx.parallel.graph import Graph
from phalanx.parallel.hardware import Hardware, profile, topology_of
from phalanx.parallel.layout import Layout, from_spec
from phalanx.parallel.mesh import DeviceMesh, Topology, mesh_of, meshes
from phalanx.parallel.plan import Plan, RunnerUp
from phalanx.parallel.plan_text import spec_text
from phalanx.parallel.reading import read
from phalanx.parallel.search import elimination, marginals
from phalanx.parallel.search.memory import Smallest, smallest, solve_within
from phalanx.parallel.search.problem import Solution, Table
from phalanx.parallel.search.propagation import solve_by_propagation
from phalanx.parallel.search.recursive import solve_recursively
from phalanx.parallel.tables import Accounting, Tables
from phalanx.parallel.tracing import Traced, trace
from phalanx.runtime.formatting import bytes_text, shown
from phalanx.runtime.numbers import check_number

MODES = {
    "exact": "exact",
    "dynamic_programming": "exact",
    "recursive_programming": "recursive_programming",
    "sharding_propagation": "sharding_propagation",
}
"""The names of search modes, MindSpore's among them, and what they mean here."""

Devices = int | Topology | DeviceMesh | Mesh | Sequence[jax.Device] | None


def search(
    program: Callable[..., Any] | Any,
    example_args: Sequence[Any] = (),
    devices: Devices = None,
    hardware: Hardware | str | None = None,
    *,
    memory: float | None = None,
    pins: Mapping[str, Any] | Plan | None = None,
    mode: str = "exact",
    time_limit: float | None = None,
    parameters: int | Sequence[int] = 0,
    training: bool = True,
    slots: float = 2.0,
    overlap: float = 0.0,
) -> Plan:
    """The cheapest way to lay a program out over devices.

    The program is the forward function, usually a loss. If it is trained, the cost of its gradient and
    the memory of the optimizer are accounted for.

    Args:
        program: a function, or what `jax.make_jaxpr` returned.
        example_args: its arguments; `jax.ShapeDtypeStruct` will do for arrays.
        devices: how many, which ones, or how they are connected. A mesh is taken as it is; for others,
            every mesh of up to three axes is tried. By default all devices of JAX.
        hardware: what they can do, or the name of a shipped profile. By default that of the devices of
            JAX.
        memory: the bytes that each device may hold; by default what the hardware has.
        pins: layouts that are given, by the name of a parameter, an input, an output or an operator; or
            a plan, all of whose layouts are kept where they fit.
        mode: ``exact`` (MindSpore's ``dynamic_programming``), ``recursive_programming`` or
            ``sharding_propagation``.
        time_limit: seconds after which the best plan so far is returned, with a lower bound.
        parameters: the numbers of the arguments that are trained, as `jax.grad` counts them.
        training: whether the program is trained.
        slots: how many tensors the optimizer keeps for each parameter.
        overlap: the part of the communication of parameters' gradients that hides behind computation.

    Raises:
        ResourceExhaustedError: if no plan fits into memory.
        InvalidValueError: if a pin does not fit.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.sum((x @ w) ** 2)
    >>> w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in [(64, 64), (2**20, 64)])
    >>> plan = search(loss, (w, x), devices=2, hardware="A100")
    >>> str(plan.mesh), tuple(plan.inputs["x"].spec), plan.proven
    ('x=2', ('x',), True)
    """
    if mode not in MODES:
        raise InvalidValueError(f"Known search modes are {', '.join(MODES)}. Received: mode={mode!r}.")
    for name, number in (("memory", memory), ("time_limit", time_limit)):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if number is not None and (not is_number or not number >= 0):
            what = "bytes" if name == "memory" else "seconds"
            raise InvalidValueError(f"{name} is a number of {what}. Received: {name}={number!r}.")
    check_number(slots, "slots", 0, 1000)
    check_number(overlap, "overlap", 0, 1)
    start = time.monotonic()
    hardware = searched_hardware(hardware)
    candidates = _meshes(devices, hardware)
    traced = trace(program, example_args, parameters)
    graph = read(traced.closed, traced.names, traced.results, traced.parameters, training)
    budget = hardware.device.memory if memory is None else float(memory)
    task = _Task(
        traced,
        graph,
        hardware,
        Accounting(training, slots, overlap),
        budget,
        MODES[mode],
        pins,
        None if time_limit is None else start + time_limit,
        current_algo_parameters(),
    )
    return task.best(candidates)


def searched_hardware(given: Hardware | str | None) -> Hardware:
    """What is searched for: hardware that is given, that of a name, or that of the devices of JAX."""
    if isinstance(given, Hardware):
        return given
    if isinstance(given, str):
        return profile(given)
    if given is not None:
        raise InvalidTypeError(f"Hardware, or the name of a profile, is needed. Received: {given!r}.")
    device = jax.devices()[0]
    if device.platform == "cpu":
        return profile("CPU")
    kind = device.device_kind.lower()
    for sign, name in (("a100", "A100"), ("h100", "H100"), ("v5p", "TPU v5p"), ("v5 lite", "TPU v5e")):
        if sign in kind:
            return profile(name)
    raise NotFoundError(
        "There is no profile for these devices. Give `hardware`: a profile that is close, or one with "
        f"measured figures. Received: devices of kind {device.device_kind!r}."
    )


def _meshes(devices: Devices, hardware: Hardware) -> list[DeviceMesh]:
    if isinstance(devices, DeviceMesh):
        return [devices.without_single()]
    if isinstance(devices, Mesh):
        sizes = {name: size for name, size in dict(devices.shape).items() if size > 1}
        topology = topology_of(tuple(devices.devices.flat), hardware)
        return [mesh_of(topology, list(sizes.values()), list(sizes))]
    if isinstance(devices, Topology):
        return meshes(devices)
    if isinstance(devices, float | str | bytes) or not isinstance(devices, int | Iterable | None):
        raise InvalidTypeError(
            "devices is a number, a mesh, a px.parallel.Topology, or a list of devices of JAX. "
            f"Received: devices={devices!r}."
        )
    given = None if devices is None or isinstance(devices, int) else tuple(devices)
    if given is not None and not all(isinstance(device, jax.Device) for device in given):
        raise InvalidTypeError(
            f"Devices are those of jax.devices(). Received: devices={shown(devices)}."
        )
    count: Any = jax.device_count() if devices is None else devices
    count = count if given is None else len(given)
    if isinstance(count, bool) or count < 1:
        raise InvalidValueError(f"At least one device is needed. Received: devices={devices!r}.")
    return meshes(hardware.topology(count) if given is None else topology_of(given, hardware))


@dataclass(frozen=True)
class _Found:
    """What was found on one mesh."""

    tables: Tables
    solution: Solution
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Task:
    """One search, on any mesh."""

    traced: Traced
    graph: Graph
    hardware: Hardware
    accounting: Accounting
    budget: float
    mode: str
    pins: Mapping[str, Any] | Plan | None
    deadline: float | None
    algorithm: AlgoParameters

    def best(self, candidates: Sequence[DeviceMesh]) -> Plan:
        """The best plan on any of the meshes."""
        found: list[_Found] = []
        failures: list[Exception] = []
        notes: tuple[str, ...] = ()
        for i, mesh in enumerate(candidates):
            if found and self.deadline is not None and time.monotonic() > self.deadline:
                notes = (f"The time was over before {len(candidates) - i} meshes could be tried.",)
                break
            try:
                found.append(self._on(mesh, len(candidates) - i))
            except (ResourceExhaustedError, InvalidValueError) as error:
                failures.append(error)
        if not found:
            raise _closest(failures)
        ranked = sorted(found, key=lambda f: (f.solution.cost, f.solution.bytes))
        others = [RunnerUp(f"the mesh {f.tables.mesh}", f.solution.cost) for f in ranked[1:]]
        best = ranked[0]
        return self._plan(replace(best, notes=(*best.notes, *notes)), others)

    def _on(self, mesh: DeviceMesh, left: int) -> _Found:
        """The best solution on one mesh, in its part of the time that is left."""
        now = time.monotonic()
        deadline = None if self.deadline is None else now + max(0.0, self.deadline - now) / left
        layouts, notes = self._layouts(mesh)
        tables = Tables(self.graph, mesh, self.hardware, self.accounting, layouts, self.algorithm)
        self._check_pins(tables)
        notes = (*notes, *self._left_out())
        room = self.budget - self.graph.constants
        if self.mode == "exact":
            solution = solve_within(tables.problem, room, deadline=deadline)
            if isinstance(solution, Smallest):
                raise self._too_large(tables, solution)
            if self.algorithm.enable_algo_approxi:  # what was left out may be cheaper
                solution = replace(solution, bound=0.0)
            return _Found(tables, solution, notes)
        if self.mode == "sharding_propagation":
            solution = solve_by_propagation(tables.problem, layouts)
        else:
            solution = solve_recursively(tables.problem, self._loops(tables))
        if solution.bytes > room:
            raise self._over_budget(tables, solution)
        steps = elimination.order(tables.problem)
        exact = elimination.eliminate(tables.problem, steps, cap=1_000_000, deadline=deadline)
        bounded = Solution(
            solution.values, solution.cost, solution.bytes, min(exact.bound, solution.cost)
        )
        return _Found(tables, bounded, notes)

    def _left_out(self) -> list[str]:
        """What `set_algo_parameters` has kept the search from looking at."""
        changed = [
            f"{f.name}={getattr(self.algorithm, f.name)}"
            for f in fields(AlgoParameters)
            if getattr(self.algorithm, f.name) is True
        ]
        return [f"Some strategies were left out by {', '.join(changed)}."] if changed else []

    def _loops(self, tables: Tables) -> list[list[Layout]]:
        return [
            [options.loops[i] for i in (range(len(options)) if allowed is None else allowed)]
            for options, allowed in zip(tables.strategies, tables.allowed, strict=True)
        ]

    def _plan(self, found: _Found, others: Sequence[RunnerUp]) -> Plan:
        tables, solution = found.tables, found.solution
        marginal = self._marginals(tables, solution)
        return building.build(
            tables,
            solution,
            order=self.traced.names,
            mode=self.mode,
            budget=self.budget,
            pins={} if self.pins is None or isinstance(self.pins, Plan) else _specs(self.pins),
            marginals=marginal,
            others=others,
            notes=found.notes,
        )

    def _marginals(self, tables: Tables, solution: Solution) -> dict[int, Table]:
        """The cost of the best plan with each layout of each parameter and input, if quickly known."""
        steps = elimination.order(tables.problem)
        wide = elimination.largest(tables.problem, steps) > elimination.PRUNE_ABOVE
        late = self.deadline is not None and time.monotonic() > self.deadline
        if self.mode != "exact" or not tables.mesh.sizes or wide or late:
            return {}
        whole = elimination.eliminate(tables.problem, steps)
        if whole.bound != solution.cost:  # a budget decided
            return {}
        kinds = ("parameter", "input")
        wanted = frozenset(i for i, n in enumerate(self.graph.nodes) if n.kind in kinds)
        return marginals.marginals(whole, wanted)

    # -- pins ---------------------------------------------------------------------------------------

    def _layouts(self, mesh: DeviceMesh) -> tuple[dict[int, Layout], tuple[str, ...]]:
        """The layouts that are given, by node, and what was given in vain."""
        numbers = {node.key: i for i, node in enumerate(self.graph.nodes)}
        found: dict[int, Layout] = {}
        notes: list[str] = []
        for i, node in enumerate(self.graph.nodes):
            spec = node.constraint.spec if isinstance(node.constraint, NamedSharding) else None
            if spec is not None and set(_axes(spec)) <= set(mesh.names):
                shape = node.operator.result_specs[0].shape
                found[i] = from_spec(spec, mesh.names, shape, mesh.sizes)
        if isinstance(self.pins, Plan):
            self._from_plan(self.pins, mesh, numbers, found, notes)
        else:
            for name, spec in _specs(self.pins or {}).items():
                if name not in numbers:
                    raise _unknown(name, numbers)
                node = self.graph.nodes[numbers[name]]
                shape = node.operator.result_specs[0].shape
                # What has several readers is laid out where they read it.
                copy = numbers.get(f"{name}:copy", numbers[name])
                try:
                    layout = from_spec(spec, mesh.names, shape, mesh.sizes)
                except InvalidValueError as error:
                    raise InvalidValueError(f"The pin of {name!r} does not fit. {error}") from None
                found[copy if node.kind == "operator" else numbers[name]] = layout
        return found, tuple(notes)

    def _from_plan(
        self,
        plan: Plan,
        mesh: DeviceMesh,
        numbers: Mapping[str, int],
        found: dict[int, Layout],
        notes: list[str],
    ) -> None:
        if (plan.mesh.names, plan.mesh.sizes) != (mesh.names, mesh.sizes):
            raise InvalidValueError(
                f"The given plan is for the mesh {plan.mesh}. Received: devices as {mesh}. "
                "Pass devices=plan.mesh."
            )
        if plan.fingerprint != self.graph.fingerprint():
            notes.append(
                "The given plan was made for another program; its layouts are kept where they fit."
            )
        for name, spec in plan.layouts().items():
            if name not in numbers:
                notes.append(f"{name} of the given plan is not in the program.")
                continue
            number = numbers[name]
            try:
                shape = self.graph.nodes[number].operator.result_specs[0].shape
                layout = from_spec(spec, mesh.names, shape, mesh.sizes)
            except InvalidValueError as error:
                notes.append(f"{name} of the given plan is searched anew: {error}")
                continue
            if self.graph.nodes[number].kind != "operator":
                found[number] = layout

    def _check_pins(self, tables: Tables) -> None:
        for node, allowed in zip(self.graph.nodes, tables.allowed, strict=True):
            if allowed is not None and not allowed:
                raise InvalidValueError(
                    f"{node.operator.name} cannot give its result in this layout. "
                    f"Received: a pin of {node.key.removesuffix(':copy')!r}."
                )

    # -- errors -------------------------------------------------------------------------------------

    def _over_budget(self, tables: Tables, solution: Solution) -> _TooLargeError:
        """What a search that does not look at memory has found is too large, or everything is."""
        least = smallest(tables.problem)
        if least.bytes > self.budget - self.graph.constants:
            return self._too_large(tables, least)
        needed = solution.bytes + self.graph.constants
        return _TooLargeError(
            needed,
            f"The plan of {self.mode} for {tables.mesh} needs {bytes_text(needed)} per device, more "
            f"than {bytes_text(self.budget)}. This search does not look at memory. The exact one does "
            "(search_mode='dynamic_programming'), and the smallest plan needs "
            f"{bytes_text(least.bytes + self.graph.constants)}. Received: memory={self.budget:.0f}.",
        )

    def _too_large(self, tables: Tables, least: Smallest) -> _TooLargeError:
        """Nothing fits: what the smallest and the fastest plan need, and which tensors are largest."""
        free = elimination.solve(tables.problem, cap=1_000_000, deadline=self.deadline)
        constants = self.graph.constants
        sizes = sorted(
            (
                (float(m[v]), node.key, i)
                for i, (node, m, v) in enumerate(
                    zip(self.graph.nodes, tables.problem.memory, least.values, strict=True)
                )
            ),
            key=lambda x: (-x[0], x[1]),
        )
        chosen = tables.chosen(least.values)
        largest = []
        for held, key, i in sizes[:5]:
            if held:
                spec = self.graph.nodes[i].operator.result_specs[0]
                layout = tables.strategies[i].results[0][chosen[i]]
                text = spec_text(building.spec_of_layout(layout, tables.mesh.names, len(spec.shape)))
                largest.append(f"{key} {spec} {text}: {bytes_text(held)}")
        return _TooLargeError(
            least.bytes + constants,
            f"No plan for {tables.mesh} fits into {bytes_text(self.budget)} per device. "
            f"The smallest one needs {bytes_text(least.bytes + constants)}, "
            f"the cheapest one {bytes_text(free.bytes + constants)}. "
            "The largest tensors of the smallest plan, with what training holds for them: "
            f"{'; '.join(largest)}. Use more devices, a "
            "smaller batch, jax.checkpoint, or an optimizer with fewer slots. "
            f"Received: memory={self.budget:.0f}.",
        )


class _TooLargeError(ResourceExhaustedError):
    """No plan for a mesh fits into memory; says what the smallest one needs."""

    def __init__(self, needed: float, message: str) -> None:
        super().__init__(message)
        self.needed = needed


def _closest(failures: Sequence[Exception]) -> Exception:
    """The error of the mesh that needs the least memory; the first one if memory is not what lacks."""
    memory = [error for error in failures if isinstance(error, _TooLargeError)]
    if not memory:
        return failures[0]
    return ResourceExhaustedError(str(min(memory, key=lambda error: error.needed)))


def _specs(pins: Mapping[str, Any]) -> dict[str, PartitionSpec]:
    if not isinstance(pins, Mapping):
        raise InvalidTypeError(f"pins are layouts by name, or a plan. Received: {pins!r}.")
    found = {}
    for name, spec in pins.items():
        if isinstance(spec, str) or not isinstance(spec, Sequence | PartitionSpec):
            raise InvalidTypeError(
                f"A pin is a PartitionSpec, or a tuple like one. Received: {spec!r} for {name!r}."
            )
        found[name] = PartitionSpec(*spec)
    return found


def _axes(spec: PartitionSpec) -> list[str]:
    return [a for e in spec if e is not None for a in ((e,) if isinstance(e, str) else e)]


def _unknown(name: str, known: Mapping[str, int]) -> NotFoundError:
    close = difflib.get_close_matches(name, known, 3)
    hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
    return NotFoundError(
        f"The program has no tensor or operator of this name. Received: {name!r}.{hint}"
    )
