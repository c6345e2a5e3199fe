"""The trainer that Keras models get: Keras's own, with a strategy.

`compile` stays Keras's: `load_model` asks whether a class has its own, and would then not compile.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.integrations.keras import own_steps, touch_points, workers
from phalanx.integrations.keras.adapters import (
    PlacedInput,
    input_for,
    plain_arguments,
    shuffle_alike,
)
from phalanx.integrations.keras.batch_norm import per_replica
from phalanx.integrations.keras.batches import described
from phalanx.integrations.keras.distribution import (
    ModelDistribution,
    distribution_of,
    remember_scope,
)
from phalanx.integrations.keras.parameter_servers import ServerStep, WorkersInput
from phalanx.integrations.keras.steps import ModelStep
from phalanx.runtime.interrupts import uninterrupted
from phalanx.strategies.parameter_server import ParameterServerStrategy

_ALL_PARTS = dict.fromkeys(touch_points.PARTS["train_step"], True)


def strategy_trainer(base: type[Any]) -> type[Any]:
    """A subclass of Keras's trainer that knows strategies."""

    class StrategyTrainer(base):  # type: ignore[misc]
        train_function: Any
        test_function: Any
        predict_function: Any

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            self = super().__new__(cls)
            remember_scope(self)
            return self

        # -- the functions that Keras calls for each batch -------------------------------------------

        def make_train_function(self, force: bool = False) -> None:
            known = distribution_of(self)
            if known is None:
                super().make_train_function(force)
            elif isinstance(known.strategy, ParameterServerStrategy):
                if self.train_function is None or force:
                    self.train_function = ServerStep(self, known.strategy)
            elif self.train_function is None or force:
                self.train_function = ModelStep(
                    self, known.devices, "train_step", _train_step(self, known)
                )

        def make_test_function(self, force: bool = False) -> None:
            known = _here(self)
            if known is None:
                super().make_test_function(force)
            elif self.test_function is None or force:
                self.test_function = ModelStep(self, known.devices, "test_step", self.test_step)

        def make_predict_function(self, force: bool = False) -> Any:
            own_steps.prepare_to_predict(self)
            known = _here(self)
            if known is None:
                return super().make_predict_function(force)
            if self.predict_function is None or force:

                def step(state: Any, data: Any) -> tuple[Any, Any]:
                    outputs, non_trainable = self.predict_step(state, data)
                    return outputs, (state[0], non_trainable)

                self.predict_function = ModelStep(self, known.devices, "predict_step", step, joins=True)
            return self.predict_function

        def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
            own_steps.prepare(self)
            if own_steps.needs_batch(self) and data_batch is None:
                data_batch = touch_points.first_batch(iterator)
            super()._symbolic_build(iterator=iterator, data_batch=data_batch)
            if own_steps.needs_batch(self):
                own_steps.build_optimizers(
                    self, described(data_batch), lambda: self._get_jax_state(**_ALL_PARTS)
                )

        def _state(self, purge_model_variables: bool = False, **parts: bool) -> Any:
            state = super()._get_jax_state(purge_model_variables=purge_model_variables, **parts)
            more = own_steps.other_variables(self) if parts.get("optimizer_variables") else []
            if more:
                take = touch_points.take_value if purge_model_variables else lambda v: v.value
                at = [name for name, is_taken in parts.items() if is_taken].index("optimizer_variables")
                state[at].extend(map(take, more))
            return state

        def _get_jax_state(self, purge_model_variables: bool = False, **parts: bool) -> Any:
            if not purge_model_variables or _here(self) is None:
                return self._state(purge_model_variables, **parts)
            with uninterrupted():
                # The variables are empty from here on, so an interrupt must find the values elsewhere.
                state = self._state(True, **parts)
                names = [name for name, is_taken in parts.items() if is_taken]
                touch_points.hold_taken_state(self, dict(zip(names, state, strict=True)))
            return state

        def jax_state_sync(self) -> None:
            known, held = distribution_of(self), touch_points.held_state(self)
            if known is not None and known.on_servers:
                if held and "optimizer_variables" in held:
                    touch_points.hold_state(self, self.train_function.fetched())
            elif known is not None and held:
                at_rest = {
                    part: [known.devices.at_rest(x, (part, i)) for i, x in enumerate(values)]
                    for part, values in held.items()
                }
                touch_points.hold_state(self, at_rest)
            held = touch_points.held_state(self) or {}
            with uninterrupted():
                super().jax_state_sync()
                own_steps.give_back(self, held.get("optimizer_variables") or ())
                if known is not None:
                    touch_points.forget_state(self)

        @functools.wraps(base.train_on_batch)
        def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
            if _here(self) is None:
                return super().train_on_batch(*args, **kwargs)
            with _weights_kept(self):
                return super().train_on_batch(*args, **kwargs)

        # -- where batches come from -------------------------------------------------------------------

        @functools.wraps(base.fit)
        def fit(self, *args: Any, **kwargs: Any) -> Any:
            known = distribution_of(self)
            if known is None:
                return super().fit(**plain_arguments(_named(base.fit, self, args, kwargs)))
            if isinstance(known.strategy, ParameterServerStrategy):
                call = _named(base.fit, self, args, kwargs)
                x = WorkersInput(known.strategy, call["x"], call["steps_per_epoch"])
                step = self.train_function
                self.make_train_function(force=step is not None and step.is_over)
                self.train_function.input = x
                return super().fit(**(call | {"x": x, "shuffle": False}))
            with _weights_kept(self):
                return super().fit(**_fit_arguments(known, _named(base.fit, self, args, kwargs)))

        @functools.wraps(base.evaluate)
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            known = _here(self)
            call = _named(base.evaluate, self, args, kwargs)
            if known is None:
                call |= call.pop("kwargs", {})
                return super().evaluate(**plain_arguments(call))
            x, y, weight, size = (call.pop(n) for n in ("x", "y", "sample_weight", "batch_size"))
            call |= call.pop("kwargs", {})
            call["x"] = input_for(known, x, y, weight, size, call["steps"])
            with _weights_kept(self):
                return super().evaluate(**_as_one_worker(known, call))

        @functools.wraps(base.predict)
        def predict(self, *args: Any, **kwargs: Any) -> Any:
            known = _here(self)
            call = _named(base.predict, self, args, kwargs)
            if known is None:
                return super().predict(**plain_arguments(call))
            size = call.pop("batch_size")
            x = input_for(known, call["x"], batch_size=size, steps=call["steps"], ordered=True)
            if not touch_points.is_built(self) and isinstance(x, PlacedInput):
                touch_points.build(self, x.peek())
            with _weights_kept(self):
                return super().predict(**_as_one_worker(known, call | {"x": x}))

    return StrategyTrainer


def _here(model: Any) -> ModelDistribution | None:
    """How what is not training is distributed; with parameter servers, the coordinator does it."""
    known = distribution_of(model)
    return None if known is None or known.on_servers else known


@contextlib.contextmanager
def _weights_kept(model: Any) -> Iterator[None]:
    """Let a model have its weights again if something raises: Keras does so in `fit` only.

    There an interrupt can come before Keras does it.
    """
    try:
        yield
    except BaseException:
        model.jax_state_sync()
        raise


def _train_step(model: Any, known: ModelDistribution) -> Callable[..., Any]:
    if known.batch_norm == "global" or known.devices.count == 1:
        step: Callable[..., Any] = model.train_step
        return step

    def train_step(state: Any, data: Any) -> Any:
        with per_replica(model, known.devices):
            return model.train_step(state, data)

    return train_step


def _named(function: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by their names."""
    bound = inspect.signature(function).bind(model, *args, **kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def _as_one_worker(known: ModelDistribution, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of which only one worker prints and writes."""
    here = {
        "verbose": workers.said(known, call["verbose"]),
        "callbacks": workers.callbacks_here(known, call["callbacks"]),
    }
    return call | here


def _fit_arguments(known: ModelDistribution, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `fit`, with input that gives batches on devices."""
    import keras

    arrays = call["x"], call["y"], call["sample_weight"]
    validation = call["validation_data"]
    if call["validation_split"] and validation is None:
        arrays, validation = touch_points.without_validation_rows(arrays, call["validation_split"])
    shuffle_alike(known)
    size, steps = call["batch_size"], call["steps_per_epoch"]
    x, y, weight = arrays
    x = input_for(known, x, y, weight, size, steps, call["shuffle"], call["class_weight"])
    if validation is not None:
        size = call["validation_batch_size"] or size
        vx, vy, vw = keras.utils.unpack_x_y_sample_weight(validation)
        validation = input_for(known, vx, vy, vw, size, call["validation_steps"])
    taken = dict.fromkeys(("y", "sample_weight", "batch_size", "class_weight", "validation_batch_size"))
    given = {"x": x, "validation_data": validation, "validation_split": 0.0, "shuffle": False}
    return _as_one_worker(known, call | taken | given)
