"""Updates of parameters that live in stages: each stage computes the part that is about its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from phalanx.execution.throttle import THROTTLE
from phalanx.parallel.pipelines.hosts import LocalHosts, StageHosts
from phalanx.parallel.pipelines.placed_programs import PlacedProgram, RoundRunner, in_rounds
from phalanx.parallel.pipelines.stages import StagePlace

__all__ = ["StagedUpdate", "has_spec"]

Update = Callable[..., Any]
Homes = Sequence[int] | Callable[[], Sequence[int]]


class StagedUpdate:
    """Runs functions of gradients, a state, parameters and perhaps more in stages.

    They return new parameters and a new state, and perhaps new values of the first of what there is
    more. Results are where the arguments are that they replace.

    Args:
        places: of the stages that are in this process.
        hosts: who runs which stage; by default this process all of them.
        donate: whether results may take the memory of what they replace.
    """

    def __init__(
        self,
        places: Mapping[int, StagePlace],
        hosts: StageHosts | None = None,
        donate: bool = False,
    ) -> None:
        self._places, self._hosts, self._donate = dict(places), hosts or LocalHosts(), donate
        self._runners: dict[Any, tuple[RoundRunner, Any]] = {}

    def __call__(self, update: Update, given: tuple[Any, ...], homes: Homes) -> Any:
        """The results of an update; `homes` are the stages of its arguments, leaf by leaf."""
        leaves, structure = jax.tree.flatten(given)
        if not all(has_spec(x) or isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            found = homes() if callable(homes) else homes
            leaves = [
                x if has_spec(x) else self.moved(x, at) for x, at in zip(leaves, found, strict=True)
            ]
        key = update, structure, tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        if key not in self._runners:
            known = homes() if callable(homes) else homes
            self._runners[key] = self._made(update, jax.tree.unflatten(structure, leaves), known)
        runner, results = self._runners[key]
        return jax.tree.unflatten(results, runner(leaves))

    def placed(self, update: Update, given: tuple[Any, ...], homes: Sequence[int]) -> PlacedProgram:
        """An update as programs of stages."""
        leaves, structure = jax.tree.flatten(given)

        def flat(*args: Any) -> list[Any]:
            return jax.tree.leaves(update(*jax.tree.unflatten(structure, args)))

        numbers = jax.tree.unflatten(structure, range(len(leaves)))
        wanted = [homes[i] for i in jax.tree.leaves(_replaced(update, given, numbers))]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        return in_rounds(flat, shapes, homes, wanted)

    def _made(self, update: Update, given: tuple[Any, ...], homes: Sequence[int]) -> Any:
        placed = self.placed(update, given, homes)
        outs = jax.tree.leaves(_replaced(update, given, given))
        pairs = zip(placed.results, outs, strict=True)
        shardings = {n: x.sharding for n, x in pairs if isinstance(n, int) and has_spec(x)}
        count = len(jax.tree.leaves(given[0]))
        whole = count + len(jax.tree.leaves(given[1:3]))
        donated = range(count, whole) if self._donate else ()
        runner = RoundRunner(placed, self._hosts, self.moved, THROTTLE.dispatch, shardings, donated)
        return runner, jax.tree.structure(jax.eval_shape(update, *given))

    def moved(self, x: Any, place: int) -> Any:
        """A value at another stage, whole on each of its devices."""
        return jax.device_put(x, self._places[place].whole())


def _replaced(update: Update, given: tuple[Any, ...], nests: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the results of an update take the place of, of nests like its arguments."""
    count = len(jax.eval_shape(update, *given))
    return (nests[2], nests[1], *nests[3:])[:count]


def has_spec(x: Any) -> bool:
    """Whether an array is laid out on a mesh."""
    return isinstance(getattr(x, "sharding", None), NamedSharding)
