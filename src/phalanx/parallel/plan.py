"""Plans: the layout of every tensor and operator of a program, what it costs, and why."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from phalanx.errors import InvalidTypeError, InvalidValueError, NotFoundError
from phalanx.parallel import plan_files, plan_html, plan_text
from phalanx.parallel.layout import Shape
from phalanx.parallel.mesh import DeviceMesh
from phalanx.parallel.placing import with_auto_axes
from phalanx.parallel.plan_parts import PlannedPipeline, RunnerUp

__all__ = [
    "Alternative",
    "MemoryUse",
    "OperatorPlan",
    "Plan",
    "PlannedCollective",
    "PlannedPipeline",
    "RunnerUp",
    "Shardings",
    "TensorPlan",
]


@dataclass(frozen=True)
class Alternative:
    """Another layout of a tensor, and the cost of the best plan that has it."""

    spec: PartitionSpec
    cost: float


@dataclass(frozen=True)
class TensorPlan:
    """The layout of a parameter, an input or an output.

    Args:
        name: its path in the arguments.
        shape: of the whole tensor.
        dtype: of its elements.
        spec: which mesh axes cut which dims.
        bytes: what each device holds of it.
        alternatives: other layouts, the best first; empty if a memory budget decided, or for
            three axes.
    """

    name: str
    shape: Shape
    dtype: str
    spec: PartitionSpec
    bytes: float
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class PlannedCollective:
    """A collective that a plan causes.

    Args:
        kind: its name in XLA.
        axes: the mesh axes that it runs along.
        phase: ``forward`` or ``backward``.
        count: how often it runs in one step.
        sent: the bytes that each device sends each time.
        seconds: how long it takes each time.
        tensor: what is communicated.
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    count: float
    sent: float
    seconds: float
    tensor: str


@dataclass(frozen=True)
class OperatorPlan:
    """How an operator is shared out.

    Args:
        key: its name, made of the names of scopes and functions, the primitive and a number.
        primitive: what it is.
        strategy: into how many pieces each dim of each operand is cut, as MindSpore writes it.
        operands: the layouts that it reads its operands in.
        results: the layouts of its results.
        routes: the layouts that each operand goes through on its way there; empty if it has that layout
            already.
        seconds: its predicted computation, gradient included.
        collectives: what must be communicated before it can run, and for its operands' gradients.
    """

    key: str
    primitive: str
    strategy: tuple[tuple[int, ...], ...]
    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    routes: tuple[tuple[PartitionSpec, ...], ...]
    seconds: float
    collectives: tuple[PlannedCollective, ...] = ()


@dataclass(frozen=True)
class MemoryUse:
    """The bytes that each device holds.

    Args:
        parameters: the parameters themselves.
        training: their gradients and the slots of the optimizer.
        inputs: the other arguments.
        kept: what the gradient needs of the forward program.
        constants: arrays in the program.
    """

    parameters: float
    training: float
    inputs: float
    kept: float
    constants: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.training + self.inputs + self.kept + self.constants


@dataclass(frozen=True)
class Shardings:
    """The shardings of a plan on real devices, by name.

    Args:
        parameters: of the parameters.
        inputs: of the other arguments.
        outputs: of the outputs.
        order: the names of all arguments, in the order in which `jax.tree.leaves` has them.
    """

    parameters: Mapping[str, NamedSharding]
    inputs: Mapping[str, NamedSharding]
    outputs: Mapping[str, NamedSharding]
    order: tuple[str, ...]

    def arguments(self, args: Any) -> Any:
        """A nest of shardings like the arguments, for `jax.device_put` and `jax.jit`."""
        leaves, structure = jax.tree.flatten(args)
        if len(leaves) != len(self.order):
            raise InvalidValueError(
                f"The plan is for {len(self.order)} arrays. Received: {len(leaves)} in {structure}."
            )
        known = {**self.parameters, **self.inputs}
        return jax.tree.unflatten(structure, [known[name] for name in self.order])

    def results(self, results: Any) -> Any:
        """A nest of shardings like the results of the function."""
        leaves, structure = jax.tree.flatten(results)
        if len(leaves) != len(self.outputs):
            raise InvalidValueError(
                f"The plan is for {len(self.outputs)} results. Received: {len(leaves)} in {structure}."
            )
        return jax.tree.unflatten(structure, list(self.outputs.values()))


@dataclass(frozen=True)
class Plan:
    """The layout of every parameter, input, output and operator of a program on a mesh.

    A plan is a value: `print` it, `save` it, compare it with `diff`, ask it to `explain` a tensor. What
    it predicts is per device and step.

    Args:
        mesh: the devices.
        hardware: the name of their profile.
        parameters: by name.
        inputs: by name.
        outputs: by name.
        operators: in the order of the program.
        order: the names of all arguments.
        compute: seconds of computation, the update of parameters included.
        communication: seconds of communication.
        memory: the bytes of each device.
        cost: what the search minimised: both, and a tiny price for memory that decides between equals.
        lower_bound: no plan on this mesh costs less.
        budget: the bytes that each device was allowed to hold.
        mode: how it was found.
        fingerprint: of the program.
        pins: the layouts that were given.
        runner_up: the best plan that differs; None if it is not known.
        notes: what the search could not see into.
        pipeline: the stages, if the program is cut into them; everything else is then about one micro
            batch of the whole program on the devices of one stage.
    """

    mesh: DeviceMesh
    hardware: str
    parameters: Mapping[str, TensorPlan]
    inputs: Mapping[str, TensorPlan]
    outputs: Mapping[str, TensorPlan]
    operators: tuple[OperatorPlan, ...]
    order: tuple[str, ...]
    compute: float
    communication: float
    memory: MemoryUse
    cost: float
    lower_bound: float
    budget: float
    mode: str
    fingerprint: str
    pins: Mapping[str, PartitionSpec] = field(default_factory=dict)
    runner_up: RunnerUp | None = None
    notes: tuple[str, ...] = ()
    pipeline: PlannedPipeline | None = None

    @property
    def proven(self) -> bool:
        """Whether no plan on this mesh is cheaper by the cost model."""
        return self.cost <= self.lower_bound

    @property
    def gap(self) -> float:
        """How much cheaper another plan might be, as a part of the cost."""
        return max(0.0, self.cost - self.lower_bound) / self.cost if self.cost else 0.0

    @property
    def collectives(self) -> tuple[PlannedCollective, ...]:
        """Everything that is communicated in one step."""
        return tuple(c for operator in self.operators for c in operator.collectives)

    def device_mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh of the plan over real devices, by default the first ones of `jax.devices()`."""
        found = list(jax.devices() if devices is None else devices)[: self.mesh.size]
        if len(found) < self.mesh.size:
            raise InvalidValueError(
                f"The plan needs {self.mesh.size} devices ({self.mesh}). Received: {len(found)}."
            )
        axes = len(self.mesh.names)
        return Mesh(
            np.asarray(found).reshape(self.mesh.sizes),
            self.mesh.names,
            axis_types=(AxisType.Auto,) * axes,
        )

    def shardings(self, mesh: Mesh | None = None) -> Shardings:
        """The shardings of all arguments and results on real devices.

        Args:
            mesh: with the axes of the plan, and perhaps others; `device_mesh()` if none is given.
        """
        mesh = self.device_mesh() if mesh is None else with_auto_axes(mesh)
        for name, size in zip(self.mesh.names, self.mesh.sizes, strict=True):
            if dict(mesh.shape).get(name) != size:
                raise InvalidValueError(
                    f"The plan is for the mesh {self.mesh}. Received: {dict(mesh.shape)}."
                )

        def over(tensors: Mapping[str, TensorPlan]) -> dict[str, NamedSharding]:
            return {name: NamedSharding(mesh, tensor.spec) for name, tensor in tensors.items()}

        return Shardings(over(self.parameters), over(self.inputs), over(self.outputs), self.order)

    def layouts(self) -> dict[str, PartitionSpec]:
        """The layout of every parameter, input, output and operator, by name."""
        tensors = {**self.parameters, **self.inputs, **self.outputs}
        found = {name: tensor.spec for name, tensor in tensors.items()}
        return {**found, **{o.key: o.results[0] for o in self.operators if o.results}}

    def pin(self, name: str, layout: PartitionSpec | Sequence[Any]) -> dict[str, PartitionSpec]:
        """The pins of this plan and one more, to search again around it.

        ``search(…, devices=plan.mesh, pins=plan.pin("layer/kernel", PartitionSpec(None, "x")))``
        """
        known = self.layouts()
        if name not in known:
            close = difflib.get_close_matches(name, known, 3)
            hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
            raise NotFoundError(f"The plan has no such tensor or operator. Received: {name!r}.{hint}")
        if isinstance(layout, str) or not isinstance(layout, Sequence | PartitionSpec):
            raise InvalidTypeError(
                f"A layout is a PartitionSpec, or a tuple like one. Received: {layout!r} for {name!r}."
            )
        return {**self.pins, name: PartitionSpec(*layout)}

    def diff(self, other: Plan) -> list[str]:
        """What differs between this plan and another one, one line each; empty if they agree."""
        if not isinstance(other, Plan):
            raise InvalidTypeError(f"diff compares plans. Received: {other!r}.")
        return plan_text.differences(self, other)

    def explain(self, name: str) -> str:
        """Why a tensor or an operator is laid out as it is: what it costs, and what others would."""
        return plan_text.explanation(self, name)

    def __str__(self) -> str:
        return plan_text.table(self)

    def to_html(self, title: str = "Plan") -> str:
        """The plan as a web page with pictures, in one file that needs no others."""
        return plan_html.page(self, title)

    def _repr_html_(self) -> str:
        return plan_html.framed(self)

    def to_json(self) -> str:
        """The plan as JSON, with the same text for the same plan."""
        return json.dumps(plan_files.to_data(self), indent=1, sort_keys=True)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, for `load`."""
        Path(path).write_text(self.to_json() + "\n")

    @staticmethod
    def from_json(text: str, source: str = "text") -> Plan:
        """A plan from what `to_json` returned.

        Args:
            text: the JSON.
            source: where it comes from, for errors.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise InvalidValueError(f"This is no plan: {error}. Received: {source!r}.") from error
        return plan_files.from_data(data, source)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` has written."""
        try:
            text = Path(path).read_text()
        except FileNotFoundError:
            raise NotFoundError(f"There is no file with a plan. Received: {str(path)!r}.") from None
        except (IsADirectoryError, UnicodeDecodeError) as error:
            raise InvalidValueError(f"This is no plan: {error}. Received: {str(path)!r}.") from error
        return Plan.from_json(text, str(path))

    def digest(self) -> str:
        """A short text that is the same for the same plan, to compare those of several processes."""
        return plan_files.digest(self)
