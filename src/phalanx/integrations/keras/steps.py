"""The functions that Keras calls for each batch, as programs for all replicas.

A `ModelStep` takes the place of Keras's `train_function`, `test_function` or `predict_function`: it
gets the state and an iterator of batches, and returns a result and the new state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.execution.throttle import THROTTLE, token
from phalanx.integrations.keras import touch_points
from phalanx.integrations.keras.batches import flatten, key_of, unflatten
from phalanx.integrations.keras.model_devices import ModelDevices
from phalanx.integrations.keras.own_steps import state_variables
from phalanx.job.shared_programs import SharedProgram, serial_of
from phalanx.runtime.interrupts import uninterrupted

KerasStep = Callable[[Any, Any], tuple[Any, Any]]


class StepState(tuple[Any, ...]):
    """The state that a compiled step has returned: where it lies is known, so it need not be looked at.

    Keras passes it on to the next step, unless it has put the values into the variables meanwhile.
    """


class ModelStep:
    """Runs one of Keras's steps on all replicas.

    Args:
        model: the model.
        devices: where its arrays lie.
        name: of the step, as in `PARTS`.
        step: ``step(state, data) -> (result, state)``, Keras's own or the user's.
        joins: whether results have rows, as those of predict_step; if not, the last batch's counts.
    """

    def __init__(
        self, model: Any, devices: ModelDevices, name: str, step: KerasStep, joins: bool = False
    ) -> None:
        self._model, self._devices, self._name = model, devices, name
        self._step, self._joins, self._parts = step, joins, touch_points.PARTS[name]
        self._programs: dict[Any, Any] = {}
        self._returned: Any = None  # by the latest step that was not compiled

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Take the next batches, and return a result and the new state."""
        lies_well = isinstance(state, StepState)
        given = state = tuple(state)
        try:
            batches = self._next(iterator)
            compiled = touch_points.is_compiled(self._model)
            if not compiled:
                state = self._eager_state(state)
            elif not lies_well:
                state = self._placed(state)
            alike = compiled and len({key_of(batch) for batch in batches}) == 1
            results = []
            for group in [batches] if alike else [[batch] for batch in batches]:
                result, state = self._run(state, group) if compiled else self._eagerly(state, group[0])
                results.append(result)
        except StopIteration:
            raise
        except BaseException:
            self._give_back(state, given)
            raise
        state = StepState(state) if compiled else state
        if self._joins and len(results) > 1:
            return jax.tree.map(lambda *xs: np.concatenate(xs), *results), state
        return results[-1], state

    def _next(self, iterator: Iterator[Any]) -> list[Any]:
        """As many batches as one call takes; fewer at the end."""
        batches = [self._on_devices(next(iterator))]
        while len(batches) < self._model.steps_per_execution:
            try:
                batches.append(self._on_devices(next(iterator)))
            except StopIteration:
                break
        return batches

    def _on_devices(self, batch: Any) -> Any:
        leaves, structure = flatten(batch)
        return jax.tree.unflatten(structure, [self._devices.put(x, i) for i, x in enumerate(leaves)])

    # -- state ---------------------------------------------------------------------------------------

    def _placed(self, state: Any) -> Any:
        """The state on all devices, or as the strategy lays it out."""
        leaves, structure = jax.tree.flatten(state)
        variables = [v for part in self._parts for v in state_variables(self._model, part)]
        shardings = self._shardings(variables)
        names = [(part, i) for part in self._parts for i in range(len(state[self._parts.index(part)]))]
        return jax.tree.unflatten(structure, self._devices.placed(leaves, shardings, names))

    def _shardings(self, variables: Sequence[Any]) -> list[Any]:
        """How variables lie; slots of the optimizer lie like their variables."""
        known = {v.path.replace("/", "_"): v for v in self._model.trainable_variables}
        found = []
        for v in variables:
            like = v
            if v.path not in known:
                like = next((w for n, w in known.items() if n in v.path and w.shape == v.shape), v)
            found.append(self._devices.sharding_of(like.path, like.shape))
        return found

    def _eager_state(self, state: Any) -> Any:
        """The state on one device of this process, for steps that are not compiled."""
        if state is self._returned:
            return state
        device = self._devices.local[0]
        placed = self._placed(state)  # which begins with what the first worker has
        return jax.tree.map(lambda x: jax.device_put(_local(x), device), placed)

    def _give_back(self, state: Any, given: Any) -> None:
        """Let the model keep its weights: Keras has taken them out, and would lose them."""
        for values in (state, given):
            if _is_whole(values):
                touch_points.give_back(self._model, self._parts, values)
                return

    # -- running -------------------------------------------------------------------------------------

    def _run(self, state: Any, group: list[Any]) -> tuple[Any, Any]:
        arrays = [[x.array for x in flatten(batch)[0]] for batch in group]
        key = (len(group), tuple(map(len, state)), key_of(group[0]))
        program = self._programs.get(key)
        if program is None:
            program = self._compiled(state, group)
            if not self._devices.spans_workers:
                program.lower(state, arrays).compile()  # where Ctrl-C can end it
            self._programs[key] = program
        result: tuple[Any, Any]
        if self._devices.spans_workers:
            operation = f"{self._name} of the Keras model {self._model.name!r}"
            shared = SharedProgram((serial_of(self), key), operation, arrays[0], lambda: str(key))
            result = THROTTLE.dispatch(program, state, arrays, shared=shared)
            return result
        THROTTLE.make_room()
        with uninterrupted():
            # The program overwrites the state. From here on the model has the new one, also if an
            # interrupt keeps Keras from taking it.
            result = THROTTLE.start(program, state, arrays)[0]
            touch_points.hold_state(self._model, dict(zip(self._parts, result[1], strict=True)))
        return result

    def _compiled(self, state: Any, group: list[Any]) -> Any:
        leaves, structure = flatten(group[0])
        cuts, count, step = [x.cut for x in leaves], len(group), self._step
        devices, joins = self._devices, self._joins

        def program(state: Any, batches: Sequence[Sequence[Any]]) -> Any:
            def one(state: Any, arrays: Any) -> tuple[Any, Any]:
                result, state = step(state, unflatten(structure, arrays, cuts))
                return state, result

            if count == 1:
                state, result = one(state, batches[0])
            else:
                stacked = [jnp.stack(xs) for xs in zip(*batches, strict=True)]
                state, results = jax.lax.scan(one, state, stacked)
                result = jax.tree.map(_rows_joined if joins else _last, results)
            return (result, state), token(devices.spans_workers)

        program.__name__ = self._name
        divides = all(cut is None for cut in cuts)
        # Rows that do not divide cannot leave a program in parts; those of other workers are needed.
        in_parts = joins and divides and not devices.spans_workers
        results = None if in_parts else devices.whole
        states = jax.tree.map(lambda x: x.sharding, state)
        # Where other workers can fail in the middle of a step, the state before it is kept.
        donated = () if devices.spans_workers else (0,)
        return jax.jit(program, donate_argnums=donated, out_shardings=((results, states), None))

    def _eagerly(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """One operation after the other, on one device: every worker computes the whole batch."""
        leaves, structure = flatten(batch)
        arrays = [np.asarray(x) for x in self._gathered([leaf.array for leaf in leaves])]
        result, state = self._step(state, unflatten(structure, arrays, [leaf.cut for leaf in leaves]))
        self._returned = state
        return result, state

    def _gathered(self, arrays: list[Any]) -> list[Any]:
        if not self._devices.spans_workers:
            return arrays
        kinds = tuple((x.shape, str(x.dtype)) for x in arrays)
        program = self._programs.get(kinds)
        if program is None:
            out = ([self._devices.whole] * len(arrays), None)
            program = jax.jit(lambda xs: (xs, token(True)), out_shardings=out)
            self._programs[kinds] = program
        operation = f"rows for {self._name} of the Keras model {self._model.name!r}"
        shared = SharedProgram((serial_of(self), kinds), operation, arrays)
        gathered: list[Any] = THROTTLE.dispatch(program, arrays, shared=shared)
        return gathered


def _rows_joined(x: Any) -> Any:
    return x.reshape(-1, *x.shape[2:])


def _last(x: Any) -> Any:
    return x[-1]


def _local(x: Any) -> Any:
    here = not isinstance(x, jax.Array) or x.is_fully_addressable
    return x if here else x.addressable_data(0)


def _is_whole(state: Any) -> bool:
    """Whether arrays still have their values: they were not overwritten, and did not fail."""
    for x in jax.tree.leaves(state):
        if isinstance(x, jax.Array):
            if x.is_deleted():
                return False
            try:
                x.block_until_ready()
            except jax.errors.JaxRuntimeError:
                return False
    return True
