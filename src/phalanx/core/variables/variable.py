"""`Variable`: state that steps read and write.

`px.Variable(…)` asks the current strategy which kind to make: a plain variable without a strategy, one
with a copy per replica under a mirrored strategy, and so on. All kinds share the interface defined
here; they differ in what reading and updating mean in each context. To JAX a variable is its value:
it can be given to any function that takes an array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import context as ctx
from phalanx.core.indexed_slices import IndexedSlices, checked_slices
from phalanx.core.name_scopes import in_scope
from phalanx.core.operators import ArrayOperators, operand_of
from phalanx.core.options import VariableAggregation, VariableSynchronization, check_kinds
from phalanx.core.replica_context import MergePoint, meet
from phalanx.core.structure import Leaf
from phalanx.core.values import DistributedValues
from phalanx.core.variables import traced_variables, transactions
from phalanx.core.variables.bundles import Holder
from phalanx.core.variables.variable_spec import (
    InitialValue,
    VariableReference,
    VariableSpec,
    apply_update,
    broadcasts_to,
    fitting_shape,
    register,
)
from phalanx.errors import ContextError, InternalError, InvalidTypeError, InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.devices import device_name
from phalanx.runtime.formatting import shown
from phalanx.runtime.pickling import StaysHere
from phalanx.runtime.placement import device_of, place
from phalanx.runtime.printing import describe_numpy

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy

Self = TypeVar("Self", bound="Variable")


class VariableMeta(type):
    """Lets ``px.Variable(…)`` make the kind of variable that the current strategy wants."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a variable; subclasses are made as usual."""
        if cls is not Variable:
            return super().__call__(*args, **kwargs)
        return create_variable(*args, **kwargs)


class Variable(StaysHere, Holder, Leaf, ArrayOperators, metaclass=VariableMeta):
    """A value that can be read and replaced.

    Args:
        initial_value: an array, a number, a nested list, or a function of no arguments that
            returns one. A function is called once, so random initial values are the same on all
            replicas.
        trainable: whether optimizers should change it. Default: True, but False for
            ``synchronization=ON_READ``.
        name: for printing and checkpoints.
        dtype: of the value; the initial value is converted.
        synchronization: when the copies of different replicas are combined.
        aggregation: how the values that replicas write become one.
        constraint: a function of the value, kept for code that reads it. `px.train.Optimizer` does not
            apply it: use a transformation of optax, such as `optax.keep_params_nonnegative`.
        shape: if given, the initial value must have it.

    Examples:
        >>> import phalanx as px
        >>> v = px.Variable([1.0, 2.0], name="v")
        >>> v.assign_add([10.0, 10.0])
        <px.Variable 'v:0' shape=(2,) dtype=float32, numpy=array([11., 12.], dtype=float32)>
        >>> float(v[0] * 2)
        22.0
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        compat.register_array_like(cls, lambda v: v._array())

    _keeps_layout = False
    """Whether an array over several devices is held as it is, also if each of them has all of it."""

    instead = "Send what it holds, v.numpy(), and make a variable there; or use px.train.snapshot."

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        *,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        constraint: Callable[[Any], Any] | None = None,
        shape: Any = None,
    ) -> None:
        raise InternalError("Variables are made by create_variable")  # the metaclass sees to it

    def _set_up(self, spec: VariableSpec, strategy: Strategy | None, device: jax.Device | None) -> None:
        """What every kind of variable has; called by the kinds' constructors."""
        self._describe(spec, strategy, device)
        self._value = spec.value if device is None else place(spec.value, device)

    def _describe(
        self, spec: VariableSpec, strategy: Strategy | None, device: jax.Device | None
    ) -> None:
        """The same without a value."""
        # The initial value is only needed for its shape and dtype, and would stay in memory.
        like: Any = jax.ShapeDtypeStruct(spec.value.shape, spec.value.dtype)
        self._spec = dataclasses.replace(spec, value=like)
        self._strategy = strategy
        self._device = device
        register(self)

    # -- description ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name with TensorFlow's output suffix, as ``w:0``."""
        return f"{self._spec.name}:0"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which never changes."""
        return tuple(self._spec.value.shape)

    @property
    def dtype(self) -> Any:
        """The dtype, which never changes."""
        return self._spec.value.dtype

    @property
    def ndim(self) -> int:
        """The rank."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))

    @property
    def trainable(self) -> bool:
        """Whether optimizers should change it."""
        return self._spec.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When copies are combined."""
        return self._spec.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the values that replicas write become one."""
        return self._spec.aggregation

    @property
    def constraint(self) -> Callable[[Any], Any] | None:
        """The function that was given; `px.train.Optimizer` does not apply it."""
        return self._spec.constraint

    @property
    def device(self) -> str:
        """The canonical string of the device that holds the value ('' if spread over several)."""
        return "" if self._device is None else device_name(self._device)

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that created the variable, or None."""
        return self._strategy

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies; a plain variable is its own only copy."""
        return (self,)

    # -- reading --------------------------------------------------------------------------------

    def _read(self) -> jax.Array:
        """The value in the current context."""
        value: jax.Array = self._held()
        return value

    def _held(self) -> Any:
        """What the variable holds: an array, or a distributed value with all copies."""
        program = traced_variables.current()
        if program is not None:
            program.check_read()
            return program.held(self)
        if compat.is_staging(batching=False):
            raise ContextError(
                f"Variable {self.name!r} was read while JAX staged a function (jax.jit, lax.scan, …), "
                "which would freeze its present value into the program. Give the value to the function "
                "as an argument, or use px.function in place of jax.jit."
            )
        step = transactions.current()
        return self._committed() if step is None else step.held(self)

    def _check_access(self, what: str) -> None:
        """Refuse use in a foreign strategy's scope; plain variables can be used anywhere."""

    def _operand(self) -> jax.Array | None:
        return self._read()

    def read_value(self) -> jax.Array:
        """The value in the current context, as an array that later updates do not change."""
        self._check_access(f"Variable.read_value of {self.name!r}")
        return self._read()

    def value(self) -> jax.Array:
        """The same as `read_value`."""
        return self.read_value()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The value as a NumPy array."""
        return np.asarray(self.read_value())

    def initialized_value(self) -> jax.Array:
        """The same as `read_value`; variables are initialized when they are made."""
        return self.read_value()

    def is_initialized(self) -> bool:
        """Always True."""
        return True

    @property
    def handle(self) -> Variable:
        """The copy that an operation in this context works on."""
        return self

    def ref(self) -> VariableReference:
        """A hashable stand-in that compares by identity, for dictionaries and sets."""
        return VariableReference(self)

    # -- writing --------------------------------------------------------------------------------

    def assign(self: Self, value: Any, **kwargs: Any) -> Self:
        """Replace the value. In replica context the aggregation decides what all replicas write.

        Returns the variable; in cross-replica context of a strategy with copies, their `Mirrored`
        value. The keyword arguments of TensorFlow (`use_locking`, `name`, `read_value`) are
        accepted and change nothing.
        """
        return self._dense("assign", value, kwargs)

    def assign_add(self: Self, delta: Any, **kwargs: Any) -> Self:
        """Add to the value; see `assign`."""
        return self._dense("assign_add", delta, kwargs)

    def assign_sub(self: Self, delta: Any, **kwargs: Any) -> Self:
        """Subtract from the value; see `assign`."""
        return self._dense("assign_sub", delta, kwargs)

    def scatter_add(self: Self, sparse_delta: IndexedSlices, **kwargs: Any) -> Self:
        """Add rows; an index that occurs twice adds twice."""
        return self._scatter("scatter_add", sparse_delta, kwargs)

    def scatter_sub(self: Self, sparse_delta: IndexedSlices, **kwargs: Any) -> Self:
        """Subtract rows."""
        return self._scatter("scatter_sub", sparse_delta, kwargs)

    def scatter_mul(self: Self, sparse_delta: IndexedSlices, **kwargs: Any) -> Self:
        """Multiply rows."""
        return self._scatter("scatter_mul", sparse_delta, kwargs)

    def scatter_div(self: Self, sparse_delta: IndexedSlices, **kwargs: Any) -> Self:
        """Divide rows."""
        return self._scatter("scatter_div", sparse_delta, kwargs)

    def scatter_min(self: Self, sparse_delta: IndexedSlices, **kwargs: Any) -> Self:
        """Replace elements of rows by the smaller of old and new."""
        return self._scatter("scatter_min", sparse_delta, kwargs)

    def scatter_max(self: Self, sparse_delta: IndexedSlices, **kwargs: Any) -> Self:
        """Replace elements of rows by the larger of old and new."""
        return self._scatter("scatter_max", sparse_delta, kwargs)

    def scatter_update(self: Self, sparse_delta: IndexedSlices, **kwargs: Any) -> Self:
        """Replace rows."""
        return self._scatter("scatter_update", sparse_delta, kwargs)

    def _dense(self, method: str, value: Any, kwargs: dict[str, Any]) -> Any:
        _check_update_kwargs(method, kwargs)
        self._check_access(f"Variable.{method} of {self.name!r}")
        if isinstance(value, Variable) or ctx.active_replica() is not None:
            value = operand_of(value)
        value = compat.primal_value(value)
        if not isinstance(value, DistributedValues):
            value = self._checked(method, value)
        return self._update_in_step(method, value)

    def _scatter(self, method: str, slices: IndexedSlices, kwargs: dict[str, Any]) -> Any:
        _check_update_kwargs(method, kwargs)
        self._check_access(f"Variable.{method} of {self.name!r}")
        what = f"Variable.{method} of {self.name!r}"
        checked = checked_slices(slices, self.shape, what)
        rows, indices = compat.primal_value(checked.values), compat.primal_value(checked.indices)
        return self._update_in_step(method, IndexedSlices(rows, indices, checked.dense_shape))

    def _update_in_step(self, method: str, operand: Any) -> Any:
        """Apply an update as a part of the current step, or as a step of its own."""
        if transactions.current() is not None:
            return self._update(method, operand)
        return transactions.atomically(self._update, method, operand)

    def _update(self, method: str, operand: Any) -> Any:
        """Apply an update; what that means in which context is the kind's business."""
        if isinstance(operand, DistributedValues):
            operand = self._checked(method, jnp.asarray(operand))
        self._store(apply_update(method, self._read(), operand))
        return self

    def _store(self, new: jax.Array) -> None:
        self._set(new if self._device is None else place(new, self._device))

    def _set(self, held: Any) -> None:
        """Replace what the variable holds at this point of a program or a step."""
        program = traced_variables.current()
        if program is not None:
            program.set(self, held)
        else:
            self._set_now(held)

    def _set_now(self, held: Any) -> None:
        """Replace what the variable holds at this point of an eager step."""
        traced_variables.check_known(self, getattr(held, "values", (held,)))
        step = transactions.current()
        if step is None:
            transactions.atomically(self._set_now, held)
        else:
            step.set(self, held)

    def _checked(self, method: str, value: Any) -> Any:
        """Require that a value fits in dtype and shape; returns it as it is.

        Replicas that all write one constant are told apart from replicas that write values of their
        own by object identity, so nothing may be converted before they meet.
        """
        shape = fitting_shape(value, self.dtype, self.name, method)
        if shape != self.shape and (method == "assign" or not broadcasts_to(shape, self.shape)):
            raise InvalidValueError(
                f"Variable {self.name!r} has the shape {list(self.shape)}, and the shape of a "
                f"variable never changes. Received: a value of shape {list(shape)} for {method}"
            )
        return value

    # -- saving ---------------------------------------------------------------------------------

    def state(self) -> jax.Array:
        """What a checkpoint should save: one array, however many copies there are."""
        return self.read_value()

    def load_state(self, state: Any) -> None:
        """Take back what `state` returned, also from another number of replicas."""
        with ctx.push(ctx.default_mode()):
            self.assign(state)

    def __copy__(self: Self) -> Self:
        return self.__deepcopy__({})

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        self._check_access(f"copy.deepcopy of {self.name!r}")
        self._committed()  # both will have the same arrays
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        memo[id(self)] = clone
        register(clone)
        return clone

    # -- printing and comparing -----------------------------------------------------------------

    def __repr__(self) -> str:
        return (
            f"<px.Variable '{self.name}' shape={self.shape} dtype={self.dtype}, "
            f"numpy={describe_numpy(self._array())}>"
        )

    __str__ = __repr__

    def __getattr__(self, name: str) -> Any:
        if name in _ARRAY_METHODS:
            return getattr(self._array(), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class ResourceVariable(Variable):
    """A variable with one copy, made without a strategy or by one that has a single replica."""

    def __init__(
        self, spec: VariableSpec, strategy: Strategy | None = None, device: jax.Device | None = None
    ) -> None:
        self._set_up(spec, strategy, device or device_of(spec.value))


# -- making variables ---------------------------------------------------------------------------


_ARRAY_METHODS = {  # of jax.Array, as model code calls them on parameters
    "all",
    "any",
    "argmax",
    "argmin",
    "at",
    "clip",
    "dot",
    "flatten",
    "item",
    "max",
    "mean",
    "min",
    "prod",
    "ravel",
    "round",
    "squeeze",
    "std",
    "sum",
    "swapaxes",
    "take",
    "tolist",
    "transpose",
    "var",
}
_UNUSED_ARGUMENTS = {
    "validate_shape",
    "caching_device",
    "variable_def",
    "import_scope",
    "experimental_enable_variable_lifting",
}  # of tf.Variable: they mean nothing here, and are accepted so that ported code runs


def create_variable(
    initial_value: Any = None,
    trainable: bool | None = None,
    *,
    name: str | None = None,
    dtype: Any = None,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
    constraint: Callable[[Any], Any] | None = None,
    shape: Any = None,
    **unused: Any,
) -> Variable:
    """Make a variable of the kind that the current strategy wants."""
    unknown = set(unused) - _UNUSED_ARGUMENTS
    if unknown:
        raise InvalidTypeError(
            "px.Variable takes initial_value, trainable, name, dtype, synchronization, aggregation, "
            f"constraint and shape. Received: {', '.join(sorted(unknown))}"
        )
    name = "Variable" if name is None else name
    if not isinstance(name, str) or not name:
        raise InvalidTypeError(f"name must be a non-empty string or None. Received: {shown(name)}")
    name = in_scope(name)
    if initial_value is None:
        raise InvalidValueError(
            "A variable needs an initial value, or a function that makes one. "
            f"Received: initial_value=None for variable {shown(name)}"
        )
    check_kinds(synchronization, aggregation, name)
    if trainable is None:
        trainable = synchronization is not VariableSynchronization.ON_READ

    initial = InitialValue(initial_value, dtype, shape, name)
    kinds = (bool(trainable), name, synchronization, aggregation, constraint)

    def make(strategy: Strategy) -> Variable:
        with strategy.extended._creation():
            return strategy.extended._create_variable_from(initial, kinds)

    replica = ctx.active_replica()
    if replica is None:
        return make(ctx.get_strategy())
    point = MergePoint(f"creation of variable {name!r}", make, (), {})
    return cast(Variable, meet(replica, point))


def _check_update_kwargs(method: str, kwargs: dict[str, Any]) -> None:
    unknown = set(kwargs) - {"use_locking", "name", "read_value"}
    if unknown:
        raise InvalidTypeError(
            f"Variable.{method} takes use_locking, name and read_value besides the value. "
            f"Received: {', '.join(sorted(unknown))}"
        )
