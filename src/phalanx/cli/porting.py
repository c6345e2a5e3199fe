"""Rewrites a tf.distribute program: names, imports and gradient tapes; marks what it cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m

from phalanx.cli.porting_keras import lifted_models
from phalanx.cli.porting_names import counterpart
from phalanx.cli.porting_tapes import Tapes
from phalanx.cli.porting_tree import Mark, commented, dotted, full_name

__all__ = ["Mark", "Ported", "port"]

_IMPORTS = {
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "optax": "import optax",
    "px": "import phalanx as px",
    "keras": "import keras",
}
_MARK = "# PORT: "
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
    aliases = _aliases(module)
    fits = bool(m.findall(module, m.Call(func=m.Attribute(attr=m.Name("compile") | m.Name("fit")))))
    tapes = Tapes(aliases)
    module = module.visit(tapes)
    module, models = lifted_models(module, aliases)
    names = _Names(aliases, fits and not models, fits and bool(models))
    module = module.visit(names)
    marks = [*tapes.marks, *names.marks]
    module = _with_imports(module, names.needed, names.keeps_tensorflow)
    return Ported(module.code, names.renamed, tapes.count, models, marks)


# -- names -----------------------------------------------------------------------------------------


def _aliases(module: cst.Module) -> dict[str, str]:
    """The local names of parts of TensorFlow, with what they stand for."""
    found: dict[str, str] = {}
    for node in m.findall(module, m.Import() | m.ImportFrom()):
        if isinstance(node, cst.Import):
            for alias in node.names:
                path = dotted(alias.name) or ""
                if path.split(".")[0] == "tensorflow":
                    local = alias.evaluated_alias or path.split(".")[0]
                    found[local] = "tf" + path.removeprefix("tensorflow") if alias.asname else "tf"
        elif isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
            path = dotted(node.module) or ""
            if path.split(".")[0] == "tensorflow":
                for alias in node.names:
                    local = alias.evaluated_alias or alias.evaluated_name
                    found[local] = f"tf{path.removeprefix('tensorflow')}.{alias.evaluated_name}"
    return found


def _as_node(path: str) -> cst.BaseExpression:
    return cst.parse_expression(path)


class _Names(cst.CSTTransformer):
    """Replaces names, and puts a comment over statements with names that have no counterpart."""

    def __init__(self, aliases: dict[str, str], fits: bool, both: bool = False) -> None:
        super().__init__()
        self._aliases, self._fits, self._both = aliases, fits, both
        self.renamed, self.marks = 0, list[Mark]()
        self.needed: set[str] = set()
        self.keeps_tensorflow = False
        self._pending: list[Mark] = []
        self._loops = 0

    def _ours(self, full: str) -> str | None:
        """What to write for a name of TensorFlow."""
        if full.startswith("tf.keras") and (self._fits or not full.startswith(_KERAS_PARTS)):
            return "keras" + full.removeprefix("tf.keras")
        known, rest = counterpart(full)
        if known is not None and known.ours is not None:
            return known.ours + rest
        if full.startswith("tf.keras"):
            return "keras" + full.removeprefix("tf.keras")
        reason = "no counterpart is known" if known is None else known.note
        self._pending.append(Mark(full, reason))
        return None

    def _replaced(self, node: Any) -> Any:
        full = full_name(node, self._aliases)
        if full is None or full == "tf":
            return node
        ours = self._ours(full)
        if ours is None:
            self.keeps_tensorflow = True
            return node
        self.renamed += 1
        self.needed.add(ours.split(".")[0])
        return _as_node(ours)

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802
        return full_name(node, self._aliases) is None  # the outermost attribute is replaced as a whole

    def leave_Attribute(  # noqa: N802
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Replace a dotted name."""
        if full_name(original_node, self._aliases) is None:
            return updated_node
        return self._replaced(original_node)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:  # noqa: N802
        """Replace a name that was imported from a part of TensorFlow."""
        if self._aliases.get(original_node.value, "tf") == "tf":
            return updated_node
        return self._replaced(original_node)

    def visit_Arg(self, node: cst.Arg) -> bool:  # noqa: N802
        return True

    def visit_Arg_keyword(self, node: cst.Arg) -> None:  # noqa: N802
        """Keywords are no names."""

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: N802
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: N802
        return False

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:  # noqa: N802
        """A loop over ``tf.range`` is one over ``px.range``."""
        call = original_node.iter
        if isinstance(call, cst.Call) and full_name(call.func, self._aliases) == "tf.range":
            assert isinstance(updated_node.iter, cst.Call)
            self.needed.add("px")
            return updated_node.with_changes(
                iter=updated_node.iter.with_changes(func=_as_node("px.range"))
            )
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        """Arguments that differ, and ``.numpy()``, which arrays of JAX do not have."""
        full = full_name(original_node.func, self._aliases)
        if full in ("tf.random.normal", "tf.random.uniform"):
            return self._random(full, updated_node)
        if full == "tf.function":
            kept = [arg for arg in updated_node.args if _is_kept_by_function(arg)]
            return updated_node.with_changes(args=_without_last_comma(kept))
        if full == "tf.print":
            return updated_node.with_changes(args=self._format(updated_node.args))
        is_numpy = m.matches(original_node, m.Call(func=m.Attribute(attr=m.Name("numpy")), args=[]))
        if is_numpy and isinstance(updated_node.func, cst.Attribute):
            self.needed.add("np")
            return cst.Call(_as_node("np.asarray"), [cst.Arg(updated_node.func.value)])
        return updated_node

    def _random(self, full: str, call: cst.Call) -> cst.Call:
        """Random numbers need a key."""
        self.needed |= {"px"}
        named = {arg.keyword.value for arg in call.args if arg.keyword is not None}
        if len([arg for arg in call.args if arg.keyword is None]) > 1 or named - _OF_RANDOM[full]:
            self._pending.append(Mark(full, "takes a key, a shape and a dtype: multiply and add"))
        key = cst.Arg(_as_node("px.random.next_key()"), comma=_COMMA)
        kept = [arg for arg in call.args if arg.keyword is None or arg.keyword.value != "seed"]
        return call.with_changes(args=[key, *_without_last_comma(kept)])

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
        return _without_last_comma([start, *values])

    def _marked(self, node: Any) -> Any:
        if not self._pending:
            return node
        marks, self._pending = list(dict.fromkeys(self._pending)), []
        self.marks += marks
        return commented(node, marks)

    def leave_SimpleStatementLine(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Put the marks of a statement over it."""
        compiles = m.Call(func=m.Attribute(attr=m.Name("compile")))
        if self._both and m.findall(original_node, compiles):
            reason = "the program also has a loop of its own, whose optimizers and losses these are"
            self._pending.append(Mark("model.compile", reason))
        return self._marked(updated_node)

    def leave_FunctionDef(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Put the marks of a function's head over it."""
        return self._marked(updated_node)

    def leave_ClassDef(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Put the marks of a class's head over it."""
        return self._marked(updated_node)

    def leave_With(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Put the marks of a with statement over it."""
        return self._marked(updated_node)


_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
_OF_RANDOM = {
    "tf.random.normal": {"shape", "dtype", "seed"},
    "tf.random.uniform": {"shape", "minval", "maxval", "dtype", "seed"},
}


def _is_kept_by_function(arg: cst.Arg) -> bool:
    """Whether `px.function` has this argument of ``tf.function``; the others only tune TensorFlow."""
    return arg.keyword is None or arg.keyword.value == "input_signature"


def _without_last_comma(args: Sequence[cst.Arg]) -> list[cst.Arg]:
    return [*args[:-1], args[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)] if args else []


# -- imports ---------------------------------------------------------------------------------------


def _with_imports(module: cst.Module, needed: set[str], keeps_tensorflow: bool) -> cst.Module:
    """The imports of TensorFlow replaced by those that the program needs now."""
    code = module.code
    if "px." in code:
        needed.add("px")
    present = {line.strip() for line in code.splitlines()}
    lines = sorted({_IMPORTS[name] for name in needed if name in _IMPORTS} - present)
    if "keras" in needed:
        lines = ['os.environ.setdefault("KERAS_BACKEND", "jax")', *lines]
        lines = lines if "import os" in present else ["import os", *lines]
    new = [cst.parse_statement(line) for line in lines]
    body: list[Any] = []
    done = False
    for statement in module.body:
        if not _imports_tensorflow(statement):
            body.append(statement)
            continue
        if keeps_tensorflow:
            body.append(statement)
        if not done:
            head = statement.leading_lines
            body += [s.with_changes(leading_lines=head) if i == 0 else s for i, s in enumerate(new)]
            done = True
    return module.with_changes(body=body if done else [*new, *module.body])


def _imports_tensorflow(statement: Any) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    for node in statement.body:
        if isinstance(node, cst.ImportFrom) and (dotted(node.module) or "").startswith("tensorflow"):
            return True
        if isinstance(node, cst.Import):
            return any((dotted(alias.name) or "").startswith("tensorflow") for alias in node.names)
    return False
