"""Ctrl-C between two lines of Keras: the model has whole weights, those of the latest step."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import phalanx as px
from tests.data.interrupting import Interrupt, interrupt_at

X = np.linspace(-1, 1, 24, dtype="float32").reshape(12, 2)
Y = X.sum(1, keepdims=True)


def made() -> Any:
    with px.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class InterruptedAfter:
    """A step of Keras after which Ctrl-C comes, before Keras has taken its results."""

    def __init__(self, step: Any, steps: int) -> None:
        self.step, self.left = step, steps

    def __call__(self, *args: Any) -> Any:
        result = self.step(*args)
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_interrupt_after_a_step_keeps_the_weights_of_that_step(by_hand: bool) -> None:
    model, alike = made(), made()
    model.make_train_function()
    model.train_function = InterruptedAfter(model.train_function, 2)

    def train() -> None:
        if by_hand:
            for i in (0, 4):
                model.train_on_batch(X[i : i + 4], Y[i : i + 4])
        else:
            model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)

    with pytest.raises(KeyboardInterrupt):
        train()
    alike.fit(X[:8], Y[:8], batch_size=4, shuffle=False, verbose=0)
    for mine, theirs in zip(model.get_weights(), alike.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert int(model.optimizer.iterations.numpy()) == 2


WHERE = ("keras/src/backend/jax/trainer", "phalanx/integrations/keras")


def check_moments(method: str, every: int) -> int:
    """Interrupt two steps at each moment in turn, or at some of them; how many there were."""
    model = made()
    start = model.get_weights()

    def call() -> None:
        if method == "fit":
            model.fit(X[:8], Y[:8], batch_size=4, shuffle=False, verbose=0)
        elif method == "evaluate":
            model.evaluate(X[:8], Y[:8], batch_size=4, verbose=0)
        else:
            for i in (0, 4):
                model.train_on_batch(X[i : i + 4], Y[i : i + 4])

    def begin_anew() -> None:
        model.set_weights(start)
        model.optimizer.iterations.assign(0)

    states = [start]
    for i in (0, 4) if method != "evaluate" else ():
        model.train_on_batch(X[i : i + 4], Y[i : i + 4])
        states.append(model.get_weights())
    call()  # so that all programs are there
    number, ended = 1, False
    while not ended:
        begin_anew()
        try:
            ended = interrupt_at(number, call, WHERE)
        except Interrupt:
            steps = int(model.optimizer.iterations.numpy())
            for mine, theirs in zip(model.get_weights(), states[steps], strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-6, err_msg=f"at moment {number}")
        number += every
    return number


@pytest.mark.parametrize(("method", "every"), [("fit", 7), ("train_on_batch", 21)])
def test_weights_are_kept_at_many_moments(method: str, every: int) -> None:
    assert check_moments(method, every) > 100


@pytest.mark.soak
@pytest.mark.parametrize("method", ["fit", "train_on_batch", "evaluate"])
def test_weights_are_kept_at_every_moment(method: str) -> None:
    assert check_moments(method, every=1) > 100
