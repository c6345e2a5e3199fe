"""How much a compiled step communicates, as the compiler left it.

The counts are those of the optimised program, not of the source: XLA merges collectives, removes those
of a single device, and adds some where data must be moved.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.execution.function import function
from phalanx.runtime.formatting import shown


@dataclass(frozen=True)
class Traffic:
    """How many collectives of one kind a program has, and how many bytes enter them."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.count + other.count, self.bytes + other.bytes)


@dataclass(frozen=True)
class Communication:
    """The collectives of a program, by kind; see `communication`.

    Examples:
        >>> import phalanx as px
        >>> report = px.testing.Communication(
        ...     all_reduce=px.testing.Traffic(2, 4096), all_gather=px.testing.Traffic(1, 256))
        >>> report.count, report.bytes
        (3, 4352)
        >>> print(report)
        kind        count  bytes
        all-reduce      2   4096
        all-gather      1    256
        total           3   4352
    """

    all_reduce: Traffic = Traffic()
    all_gather: Traffic = Traffic()
    reduce_scatter: Traffic = Traffic()
    all_to_all: Traffic = Traffic()
    collective_permute: Traffic = Traffic()
    collective_broadcast: Traffic = Traffic()

    @property
    def count(self) -> int:
        """How many collectives there are."""
        return self._total.count

    @property
    def bytes(self) -> int:
        """How many bytes of one device enter collectives."""
        return self._total.bytes

    @property
    def _total(self) -> Traffic:
        return sum((getattr(self, f.name) for f in fields(self)), Traffic())

    def __str__(self) -> str:
        kinds = [(f.name.replace("_", "-"), getattr(self, f.name)) for f in fields(self)]
        used = [(kind, traffic) for kind, traffic in kinds if traffic.count]
        rows = [("kind", "count", "bytes")]
        rows += [(kind, str(t.count), str(t.bytes)) for kind, t in [*used, ("total", self._total)]]
        first, second, third = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(f"{a:<{first}}  {b:>{second}}  {c:>{third}}" for a, b, c in rows)


def communication(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Communication:
    """Count the collectives of a compiled step; compiles it, and runs nothing.

    An instruction counts once, also inside a loop, and also if XLA has merged several collectives into
    it. Its bytes are those of all its operands on one device. How XLA merges depends on the platform,
    so counts on CPU devices may be higher than on others.

    Args:
        step: a `px.function`, a `jax.jit` object, or another callable, which is given to `px.function`
            first.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     w = px.Variable(jnp.zeros(100), aggregation=px.VariableAggregation.MEAN)
        >>> def step(x):
        ...     w.assign_add(x)
        >>> x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(100))
        >>> px.testing.communication(strategy.run, step, (x,)).all_reduce
        Traffic(count=1, bytes=400)
    """
    if not callable(step):
        raise InvalidTypeError(f"communication needs a callable step. Received: {shown(step)}")
    compilable: Any = step if hasattr(step, "lower") else function(step)
    text = compilable.lower(*args, **kwargs).compile().as_text()
    if text is None:
        raise InvalidValueError(
            "The platform of this program does not show what it was compiled to. Use CPU devices. "
            f"Received: {shown(step)}"
        )
    return parse_hlo(text)


def assert_communication(
    step: Callable[..., Any],
    *args: Any,
    max_collectives: int | None = None,
    max_bytes: int | None = None,
    **kwargs: Any,
) -> None:
    """Fail if a compiled step communicates more than it may; see `communication`.

    Args:
        step: the step.
        *args: its arguments.
        max_collectives: how many collectives it may have, of all kinds together.
        max_bytes: how many bytes of one device may enter them.
        **kwargs: its keyword arguments.

    Raises:
        AssertionError: with a table of what there is.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def step(x):
        ...     return px.get_replica_context().all_reduce("sum", x)
        >>> x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(100))
        >>> px.testing.assert_communication(strategy.run, step, (x,), max_collectives=1)
        >>> px.testing.assert_communication(strategy.run, step, (x,), max_bytes=100)
        Traceback (most recent call last):
        AssertionError: The step communicates 400 bytes, and 100 are allowed.
        kind        count  bytes
        all-reduce      1    400
        total           1    400
    """
    if max_collectives is None and max_bytes is None:
        raise InvalidValueError(
            "Say what to check: max_collectives, max_bytes or both. Received: neither"
        )
    report = communication(step, *args, **kwargs)
    if max_collectives is not None and report.count > max_collectives:
        raise AssertionError(
            f"The step has {report.count} collectives, and {max_collectives} are allowed.\n{report}"
        )
    if max_bytes is not None and report.bytes > max_bytes:
        raise AssertionError(
            f"The step communicates {report.bytes} bytes, and {max_bytes} are allowed.\n{report}"
        )


# -- reading HLO ---------------------------------------------------------------------------------

_KINDS = {
    **{field.name.replace("_", "-"): field.name for field in fields(Communication)},
    "ragged-all-to-all": "all_to_all",
}
_COMMENT = re.compile(r"/\*.*?\*/")
_RESULT = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(?P<dtype>[a-z]\w*)\[(?P<shape>[^\]]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")


@dataclass(frozen=True)
class _Instruction:
    name: str
    result: str
    opcode: str
    operands: tuple[str, ...]


def parse_hlo(text: str) -> Communication:
    """Count the collectives in the text of an HLO module.

    Asynchronous collectives are counted where they start.
    """
    found: dict[str, Traffic] = {}
    shapes: dict[str, str] = {}
    for line in text.splitlines():
        if line.rstrip().endswith("{"):
            shapes = {}  # another computation begins, with names of its own
        instruction = _instruction(line)
        if instruction is None:
            continue
        shapes[instruction.name] = instruction.result
        kind = _KINDS.get(instruction.opcode.removesuffix("-start"))
        if kind is not None:
            size = sum(_operand_bytes(operand, shapes) for operand in instruction.operands)
            found[kind] = found.get(kind, Traffic()) + Traffic(1, size)
    return Communication(**found)


def _instruction(line: str) -> _Instruction | None:
    """The parts of a line such as ``%x = f32[2]{0} all-reduce(%a), replica_groups={}``."""
    match = _RESULT.match(_COMMENT.sub("", line))
    if match is None:
        return None
    rest = match["rest"]
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if end < 0 or opcode is None:
        return None
    inside = rest[opcode.end() : _closing(rest, opcode.end() - 1) - 1]
    return _Instruction(match["name"], rest[:end], opcode["opcode"], tuple(_split(inside)))


def _closing(text: str, start: int) -> int:
    """The position after the bracket that closes the one at `start`; the end if there is none."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    return len(text)


def _split(text: str) -> Iterator[str]:
    """The parts between the commas that are in no bracket."""
    depth, begin = 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            yield text[begin:i].strip()
            begin = i + 1
    if text[begin:].strip():
        yield text[begin:].strip()


def _operand_bytes(operand: str, shapes: dict[str, str]) -> int:
    """The size of an operand, which is written as its name, in some dialects after its shape."""
    *shape, name = operand.split(" ")
    return _bytes(" ".join(shape) if shape else shapes.get(name.removeprefix("%"), ""))


def _bytes(shape: str) -> int:
    """The size of a shape such as ``f32[64,2]{1,0}`` or of a tuple of them."""
    total = 0
    for array in _ARRAY.finditer(shape):
        bits = _BITS.match(array["dtype"])
        width = 8 if array["dtype"] == "pred" else int(bits[1]) if bits else 0
        sizes = [int(size.strip("<= ")) for size in array["shape"].split(",") if size.strip()]
        total += math.ceil(math.prod(sizes) * width / 8)
    return total
