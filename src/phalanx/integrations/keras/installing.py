"""Letting Keras take part in strategies; done once, when a scope is entered or `px.keras` is used."""

from __future__ import annotations

import threading
from typing import Any

from phalanx.core import context as ctx
from phalanx.errors import PhalanxError
from phalanx.integrations.keras import touch_points

_lock = threading.Lock()
_done: list[bool] = []


def install() -> None:
    """Change Keras, which is imported, so that models made in scopes are distributed.

    If this Keras cannot be changed, making a model in a scope raises an error that says why. Programs
    that use Keras for something else may enter scopes all the same.
    """
    with _lock:
        if _done:
            return
        _done.append(True)
        found = touch_points.problem()
        if found is not None:
            _refuse(found)
            return
        from phalanx.integrations.keras.lifting import guarded, guarded_assign, guarded_losses
        from phalanx.integrations.keras.trainer import strategy_trainer

        touch_points.put_trainer(strategy_trainer)
        touch_points.put_layer_call(guarded)
        touch_points.put_layer_losses(guarded_losses)
        touch_points.put_variable_assign(guarded_assign)
        touch_points.accept_synchronized()


def _refuse(problem: PhalanxError) -> None:
    def refusing(base: type[Any]) -> type[Any]:
        class RefusingTrainer(base):  # type: ignore[misc]
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                if ctx.has_strategy():
                    raise problem
                return super().__new__(cls)

        return RefusingTrainer

    touch_points.put_trainer(refusing)
