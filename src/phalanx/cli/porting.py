"""Rewrites a tf.distribute program: names, imports and gradient tapes; marks what it cannot do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m

from phalanx.cli.porting_arguments import ported_arguments, without_last_comma
from phalanx.cli.porting_imports import aliases_of, bound_names, with_imports
from phalanx.cli.porting_keras import (
    compiles,
    gone_from_models,
    has_loop,
    keras_call,
    lifted_models,
    with_new_name_of_rate,
)
from phalanx.cli.porting_layers import SeededLayers
from phalanx.cli.porting_names import counterpart
from phalanx.cli.porting_tapes import Tapes
from phalanx.cli.porting_tree import Mark, commented, dotted, full_name

__all__ = ["Mark", "Ported", "port"]

_MARK = "# PORT: "
_BACKEND = m.MatchRegex("['\"]KERAS_BACKEND['\"]")
_COUNTING = ("tf.keras.metrics", "tf.keras.optimizers")
_KERAS_PARTS = ("tf.keras.metrics", "tf.keras.losses", "tf.keras.optimizers")


@dataclass
class Ported:
    """A rewritten program: its text, how much changed, and what is left to do."""

    text: str
    renamed: int = 0
    tapes: int = 0
    models: int = 0
    marks: list[Mark] = field(default_factory=list)

    @property
    def places(self) -> list[tuple[int, str]]:
        """The lines with marks, and what they say."""
        lines = enumerate(self.text.splitlines(), 1)
        return [(i, line.partition(_MARK)[2]) for i, line in lines if line.lstrip().startswith(_MARK)]


def port(text: str) -> Ported:
    r"""Rewrite the text of a program.

    Examples:
        >>> print(port("import tensorflow as tf\nx = tf.reduce_sum(y)\n").text)
        import jax.numpy as jnp
        x = jnp.sum(y)
        <BLANKLINE>
    """
    module = cst.parse_module(text)
    aliases = aliases_of(module)
    fit = m.Call(func=m.Attribute(attr=m.Name("fit")))
    fits = bool(m.findall(module, fit)) or any(map(compiles, m.findall(module, m.Call())))
    tapes = Tapes(aliases)
    module = module.visit(tapes)
    module, models = lifted_models(module, aliases)
    layers = SeededLayers(module, aliases)
    module = module.visit(layers)
    loops = bool(models) or has_loop(module, aliases)
    names = _Names(aliases, fits and not loops, fits and loops, bound_names(module))
    module = module.visit(names)
    needed = names.needed | ({"keras"} if layers.count else set())
    module, more = with_imports(module, needed, names.keeps_tensorflow)
    marks = [*tapes.marks, *layers.marks, *names.marks, *more]
    return Ported(module.code, names.renamed, tapes.count, models, marks)


# -- names -----------------------------------------------------------------------------------------


def _as_node(path: str) -> cst.BaseExpression:
    return cst.parse_expression(path)


class _Names(cst.CSTTransformer):
    """Replaces names, and puts a comment over statements with names that have no counterpart."""

    def __init__(self, aliases: dict[str, str], fits: bool, both: bool, bound: set[str]) -> None:
        super().__init__()
        self._aliases, self._fits, self._both = aliases, fits, both
        self.renamed, self.marks = 0, list[Mark]()
        self.needed: set[str] = set()
        self.keeps_tensorflow = False
        self._compiles = 0  # how many calls of Model.compile are around the code
        self._pending: list[Mark] = []
        self._no_names = set[cst.CSTNode]()  # attributes, keywords and what is being defined
        self._outer: list[dict[str, str]] = []  # the aliases around the functions around the code
        self._twice = {name for name in bound if aliases.get(name, "tf") != "tf"}

    def _ours(self, full: str) -> str | None:
        """What to write for a name of TensorFlow."""
        known, rest = counterpart(full)
        keeps = (self._fits or self._compiles > 0) and full.startswith(_KERAS_PARTS)
        part = ".".join(full.split(".")[:3])
        if known is None and not keeps and part in _COUNTING and "." in full.removeprefix(part):
            reason = f"px.{part.split('.')[2]} does not have it, and Keras's own works with fit only"
            self._pending.append(Mark(full, reason))
        if full.startswith("tf.keras") and (known is None or (keeps and not known.always)):
            old = re.compile(r"^tf\.keras\.optimizers\.(legacy|experimental)\b")
            return "keras" + old.sub("tf.keras.optimizers", full).removeprefix("tf.keras")
        if known is not None and known.ours is not None:
            return known.ours + rest
        reason = "no counterpart is known" if known is None else known.note
        self._pending.append(Mark(full, reason))
        return None

    def _replaced(self, node: Any) -> Any:
        full = full_name(node, self._aliases)
        if full is None or full == "tf":
            return node
        first = (dotted(node) or "").partition(".")[0]
        if first in self._twice:
            reason = "the program gives this name another meaning: rename one of them"
            self._pending.append(Mark(first, reason))
        ours = self._ours(full)
        if ours is None:
            self.keeps_tensorflow = True
            return node
        self.needed.add(ours.split(".")[0])
        if ours == dotted(node):
            return node
        self.renamed += 1
        return _as_node(ours)

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802
        """Replace the outermost attribute as a whole; what follows other things is no name."""
        self._no_names.add(node.attr)
        return full_name(node, self._aliases) is None

    def leave_Attribute(  # noqa: N802
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Replace a dotted name."""
        if full_name(original_node, self._aliases) is None:
            if (gone := gone_from_models(original_node)) is not None:
                self._pending.append(Mark(original_node.attr.value, gone))
            return with_new_name_of_rate(updated_node)
        return self._replaced(original_node)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:  # noqa: N802
        """Replace a name that was imported from a part of TensorFlow."""
        is_root = self._aliases.get(original_node.value, "tf") == "tf"
        if is_root or original_node in self._no_names:
            return updated_node
        return self._replaced(original_node)

    def visit_Arg(self, node: cst.Arg) -> None:  # noqa: N802
        """Keywords are no names."""
        if node.keyword is not None:
            self._no_names.add(node.keyword)

    def visit_Param(self, node: cst.Param) -> None:  # noqa: N802
        """Parameters are no names of TensorFlow."""
        self._no_names.add(node.name)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:  # noqa: N802
        """A name that is assigned is none of TensorFlow."""
        self._no_names.add(node.target)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802
        """A class begins."""
        self._no_names.add(node.name)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        """A function begins, whose own names hide those around it."""
        self._no_names.add(node.name)
        self._enter(node)

    def visit_Lambda(self, node: cst.Lambda) -> None:  # noqa: N802
        """A function begins."""
        self._enter(node)

    def leave_Lambda(self, original_node: cst.Lambda, updated_node: cst.Lambda) -> cst.Lambda:  # noqa: N802
        """A function ends."""
        self._aliases = self._outer.pop()
        return updated_node

    def _enter(self, node: cst.CSTNode) -> None:
        self._outer.append(self._aliases)
        hidden = bound_names(node)
        self._aliases = {name: full for name, full in self._aliases.items() if name not in hidden}

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: N802
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: N802
        return False

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:  # noqa: N802
        """Keras runs on JAX, also where a program asks for another backend."""
        backend = m.SubscriptElement(slice=m.Index(value=m.SimpleString(value=_BACKEND)))
        target = m.AssignTarget(target=m.Subscript(slice=[backend]))
        if m.matches(original_node, m.Assign(targets=[target], value=m.SimpleString())):
            return updated_node.with_changes(value=cst.SimpleString('"jax"'))
        return updated_node

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> Any:  # noqa: N802
        """A loop over ``tf.range`` is one over ``px.range``."""
        call = original_node.iter
        if isinstance(call, cst.Call) and full_name(call.func, self._aliases) == "tf.range":
            assert isinstance(updated_node.iter, cst.Call)
            self.needed.add("px")
            loop = updated_node.iter.with_changes(func=_as_node("px.range"))
            updated_node = updated_node.with_changes(iter=loop)
        return self._marked(updated_node)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        """What is made in a call of ``compile`` is for Keras alone."""
        self._compiles += compiles(node)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        """Arguments that differ, and ``.numpy()``, which arrays of JAX do not have."""
        if compiles(original_node):
            self._compiles -= 1
            if self._both and any(m.matches(arg.value, m.Name()) for arg in original_node.args):
                why = "the program also has a loop of its own, whose optimizers and losses these are"
                self._pending.append(Mark("model.compile", why))
        full = full_name(original_node.func, self._aliases)
        if full in ("tf.random.normal", "tf.random.uniform"):
            return self._random(full, updated_node)
        if full == "tf.function":
            kept = [arg for arg in updated_node.args if _is_kept_by_function(arg)]
            return updated_node.with_changes(args=without_last_comma(kept))
        if full == "tf.print":
            return updated_node.with_changes(args=self._format(updated_node.args))
        if full is not None and full.startswith("tf.keras."):
            return keras_call(full, updated_node)
        if full is not None and self._is_array_function(full):
            args, reason = ported_arguments(full, updated_node.args)
            if reason is not None:
                self._pending.append(Mark(full, reason))
            return updated_node.with_changes(args=args)
        is_numpy = m.matches(original_node, m.Call(func=m.Attribute(attr=m.Name("numpy")), args=[]))
        if is_numpy and isinstance(updated_node.func, cst.Attribute):
            self.needed.add("np")
            return cst.Call(_as_node("np.asarray"), [cst.Arg(updated_node.func.value)])
        return updated_node

    @staticmethod
    def _is_array_function(full: str) -> bool:
        known, rest = counterpart(full)
        ours = None if known is None or rest else known.ours
        parts = ("jnp.", "jax.nn.", "jax.lax.", "optax.", "os.")
        return ours is not None and ours.startswith(parts) and not full.startswith("tf.keras")

    def _random(self, full: str, call: cst.Call) -> cst.Call:
        """Random numbers need a key."""
        self.needed |= {"px"}
        named = {arg.keyword.value for arg in call.args if arg.keyword is not None}
        if len([arg for arg in call.args if arg.keyword is None]) > 1 or named - _OF_RANDOM[full]:
            self._pending.append(Mark(full, "takes a key, a shape and a dtype: multiply and add"))
        key = cst.Arg(_as_node("px.random.next_key()"), comma=_COMMA)
        kept = [arg for arg in call.args if arg.keyword is None or arg.keyword.value != "seed"]
        return call.with_changes(args=[key, *without_last_comma(kept)])

    def _format(self, args: Sequence[cst.Arg]) -> list[cst.Arg]:
        """The arguments of ``jax.debug.print``: a format string, and values."""
        text, values = [], []
        for arg in args:
            if arg.keyword is not None:
                continue
            if isinstance(arg.value, cst.SimpleString) and isinstance(arg.value.evaluated_value, str):
                text.append(arg.value.evaluated_value.replace("{", "{{").replace("}", "}}"))
            elif isinstance(arg.value, cst.FormattedString):
                self._pending.append(Mark("tf.print", "give a format string, and values after it"))
                return list(args)
            else:
                text.append("{}")
                values.append(arg.with_changes(comma=_COMMA))
        start = cst.Arg(cst.SimpleString(repr(" ".join(text))), comma=_COMMA)
        return without_last_comma([start, *values])

    def _marked(self, node: Any) -> Any:
        if not self._pending:
            return node
        marks, self._pending = list(dict.fromkeys(self._pending)), []
        self.marks += marks
        return commented(node, marks)

    def leave_SimpleStatementLine(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Put the marks of a statement over it."""
        return self._marked(updated_node)

    def leave_FunctionDef(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Put the marks of a function's head over it."""
        self._aliases = self._outer.pop()
        return self._marked(updated_node)

    def leave_ClassDef(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Put the marks of a class's head over it."""
        return self._marked(updated_node)

    def leave_With(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Put the marks of a with statement over it."""
        return self._marked(updated_node)

    leave_If = leave_While = leave_Try = leave_With  # noqa: N815 - `if x: y` has no line for y


_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
_OF_RANDOM = {
    "tf.random.normal": {"shape", "dtype", "seed"},
    "tf.random.uniform": {"shape", "minval", "maxval", "dtype", "seed"},
}


def _is_kept_by_function(arg: cst.Arg) -> bool:
    """Whether `px.function` has this argument of ``tf.function``; the others only tune TensorFlow."""
    return arg.keyword is None or arg.keyword.value == "input_signature"
