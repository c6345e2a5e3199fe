"""Rewrites a tf.distribute program: names, imports and gradient tapes; marks what it cannot do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m

from phalanx.cli.porting_names import counterpart

__all__ = ["Mark", "Ported", "port"]

_IMPORTS = {
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "optax": "import optax",
    "px": "import phalanx as px",
    "keras": "import keras",
}
_KERAS_PARTS = ("tf.keras.metrics", "tf.keras.losses", "tf.keras.optimizers")


@dataclass(frozen=True)
class Mark:
    """Something that a person must look at."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


@dataclass
class Ported:
    """A rewritten program: its text, how many names changed, and what is left to do."""

    text: str
    renamed: int = 0
    tapes: int = 0
    marks: list[Mark] = field(default_factory=list)


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
    tapes = _Tapes(aliases)
    module = module.visit(tapes)
    names = _Names(aliases, fits)
    module = module.visit(names)
    marks = [*tapes.marks, *names.marks]
    module = _with_imports(module, names.needed, names.keeps_tensorflow)
    return Ported(module.code, names.renamed, tapes.count, marks)


# -- names -----------------------------------------------------------------------------------------


def _dotted(node: cst.BaseExpression | None) -> str | None:
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = _dotted(node.value)
        return None if before is None else f"{before}.{node.attr.value}"
    return None


def _aliases(module: cst.Module) -> dict[str, str]:
    """The local names of parts of TensorFlow, with what they stand for."""
    found: dict[str, str] = {}
    for node in m.findall(module, m.Import() | m.ImportFrom()):
        if isinstance(node, cst.Import):
            for alias in node.names:
                path = _dotted(alias.name) or ""
                if path.split(".")[0] == "tensorflow":
                    local = alias.evaluated_alias or path.split(".")[0]
                    found[local] = "tf" + path.removeprefix("tensorflow") if alias.asname else "tf"
        elif isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
            path = _dotted(node.module) or ""
            if path.split(".")[0] == "tensorflow":
                for alias in node.names:
                    local = alias.evaluated_alias or alias.evaluated_name
                    found[local] = f"tf{path.removeprefix('tensorflow')}.{alias.evaluated_name}"
    return found


def _full(node: Any, aliases: dict[str, str]) -> str | None:
    """The name of TensorFlow that an expression is."""
    path = _dotted(node)
    if path is None:
        return None
    first, _, rest = path.partition(".")
    start = aliases.get(first)
    return None if start is None else f"{start}.{rest}" if rest else start


def _as_node(path: str) -> cst.BaseExpression:
    return cst.parse_expression(path)


class _Names(cst.CSTTransformer):
    """Replaces names, and puts a comment over statements with names that have no counterpart."""

    def __init__(self, aliases: dict[str, str], fits: bool) -> None:
        super().__init__()
        self._aliases, self._fits = aliases, fits
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
        full = _full(node, self._aliases)
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
        return _full(node, self._aliases) is None  # the outermost attribute is replaced as a whole

    def leave_Attribute(  # noqa: N802
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Replace a dotted name."""
        if _full(original_node, self._aliases) is None:
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
        if isinstance(call, cst.Call) and _full(call.func, self._aliases) == "tf.range":
            assert isinstance(updated_node.iter, cst.Call)
            self.needed.add("px")
            return updated_node.with_changes(
                iter=updated_node.iter.with_changes(func=_as_node("px.range"))
            )
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        """Arguments that differ, and ``.numpy()``, which arrays of JAX do not have."""
        full = _full(original_node.func, self._aliases)
        if full in ("tf.random.normal", "tf.random.uniform"):
            self.needed |= {"px"}
            key = cst.Arg(_as_node("px.random.next_key()"), comma=_COMMA)
            return updated_node.with_changes(args=[key, *updated_node.args])
        is_numpy = m.matches(original_node, m.Call(func=m.Attribute(attr=m.Name("numpy")), args=[]))
        if is_numpy and isinstance(updated_node.func, cst.Attribute):
            self.needed.add("np")
            return cst.Call(_as_node("np.asarray"), [cst.Arg(updated_node.func.value)])
        return updated_node

    def _marked(self, node: Any) -> Any:
        if not self._pending:
            return node
        marks, self._pending = list(dict.fromkeys(self._pending)), []
        self.marks += marks
        return _commented(node, marks)

    def leave_SimpleStatementLine(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """Put the marks of a statement over it."""
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


def _commented(node: Any, marks: Iterable[Mark]) -> Any:
    lines = [cst.EmptyLine(comment=cst.Comment(f"# PORT: {mark}")) for mark in marks]
    return node.with_changes(leading_lines=[*node.leading_lines, *lines])


# -- gradient tapes --------------------------------------------------------------------------------


class _Tapes(cst.CSTTransformer):
    """Turns a tape and its gradient call into a function and `px.value_and_grad`."""

    def __init__(self, aliases: dict[str, str]) -> None:
        super().__init__()
        self._aliases = aliases
        self.marks: list[Mark] = []
        self.count = 0

    def leave_IndentedBlock(  # noqa: N802
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """Rewrite the tapes among the statements of a block."""
        return updated_node.with_changes(body=self._rewritten(updated_node.body))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:  # noqa: N802
        """Rewrite the tapes at the top."""
        return updated_node.with_changes(body=self._rewritten(updated_node.body))

    def _rewritten(self, statements: Sequence[Any]) -> list[Any]:
        result: list[Any] = []
        rest = list(statements)
        while rest:
            statement = rest.pop(0)
            tape = self._tape_of(statement)
            if tape is None:
                result.append(statement)
                continue
            made = self._function(statement, tape, rest)
            if isinstance(made, str):
                mark = Mark("tf.GradientTape", made)
                self.marks.append(mark)
                result.append(_commented(statement, [mark]))
            else:
                self.count += 1
                result += made
        return result

    def _tape_of(self, statement: Any) -> str | None:
        """The name of the tape that a statement opens."""
        if not isinstance(statement, cst.With) or len(statement.items) != 1:
            return None
        item = statement.items[0]
        call = item.item
        if not isinstance(call, cst.Call) or _full(call.func, self._aliases) != "tf.GradientTape":
            return None
        name = item.asname.name if item.asname else None
        return name.value if isinstance(name, cst.Name) else ""

    def _function(self, block: cst.With, tape: str, rest: list[Any]) -> list[Any] | str:
        """The statements in place of a tape and its gradient; or why there are none."""
        gradient = m.Call(func=m.Attribute(value=m.Name(tape), attr=m.Name("gradient")))
        calls = [call for statement in rest for call in m.findall(statement, gradient)]
        call_of_tape = block.items[0].item
        assert isinstance(call_of_tape, cst.Call)
        if call_of_tape.args:
            return "a persistent or unwatched tape: write one function for each gradient"
        if m.findall(block.body, m.Attribute(value=m.Name(tape))):
            return "the tape is used while it records: write a function of what is watched"
        if len(calls) != 1:
            return f"tape.gradient is called {len(calls)} times: write one function for each gradient"
        at = next((i for i, s in enumerate(rest) if m.findall(s, gradient)), 0)
        found = m.extract(
            rest[at],
            m.SimpleStatementLine(
                body=[m.Assign(targets=[m.SaveMatchedNode(m.AssignTarget(), "target")], value=gradient)]
            ),
        )
        call = calls[0]
        assert isinstance(call, cst.Call)
        if found is None or len(call.args) != 2 or not isinstance(call.args[0].value, cst.Name):
            return "the gradient is not that of a named loss, assigned to a name"
        loss, variables = call.args[0].value.value, call.args[1].value
        body = block.body
        assigned = _assigned(body)
        if loss not in assigned:
            return f"the loss {loss} is not computed in the block"
        again = [name for name in assigned if _reads_before_writing(body, name)]
        if again:
            return f"{', '.join(again)} is read and then written in the block: give it another name"
        later = {n.value for s in rest for n in m.findall(s, m.Name()) if isinstance(n, cst.Name)}
        others = [name for name in assigned if name != loss and name in later]
        target = found["target"]
        assert isinstance(target, cst.AssignTarget)
        code = cst.Module([])
        grads, given = code.code_for_node(target.target), code.code_for_node(variables)
        function = f"compute_{loss}"
        last, first, aux = f"return {loss}", loss, ""
        if others:
            bundle = ", ".join(others) + ("," if len(others) == 1 else "")
            last, first, aux = f"return {loss}, ({bundle})", f"({loss}, ({bundle}))", ", has_aux=True"
        lines = [*body.body, cst.parse_statement(last)]
        definition = cst.FunctionDef(
            name=cst.Name(function),
            params=cst.Parameters(),
            body=cst.IndentedBlock(body=lines),
            leading_lines=block.leading_lines,
        )
        step = f"{first}, {grads} = px.value_and_grad({function}, {given}{aux})()"
        between = rest[:at]
        del rest[: at + 1]
        return [definition, cst.parse_statement(step), *between]


def _assigned(body: Any) -> list[str]:
    names: dict[str, None] = {}
    for node in m.findall(body, m.AssignTarget() | m.AugAssign() | m.AnnAssign()):
        target = node.target  # type: ignore[attr-defined]
        for name in [target] if isinstance(target, cst.Name) else m.findall(target, m.Name()):
            if isinstance(target, cst.Name | cst.Tuple) and isinstance(name, cst.Name):
                names[name.value] = None
    return list(names)


def _reads_before_writing(body: Any, name: str) -> bool:
    """Whether a name that a block writes has its value from before the block at first."""
    for statement in body.body:
        for assign in m.findall(statement, m.AugAssign(target=m.Name(name))):
            return assign is not None
        values = m.findall(statement, m.Assign(targets=[m.AssignTarget(target=m.Name(name))]))
        if values:
            return any(
                bool(m.findall(value.value, m.Name(name)))  # type: ignore[attr-defined]
                for value in values
            )
        if m.findall(statement, m.Name(name)):
            return not any(name in _assigned(cst.IndentedBlock([statement])) for _ in (0,))
    return False


# -- imports ---------------------------------------------------------------------------------------


def _with_imports(module: cst.Module, needed: set[str], keeps_tensorflow: bool) -> cst.Module:
    """The imports of TensorFlow replaced by those that the program needs now."""
    code = module.code
    if "px." in code:
        needed.add("px")
    present = {line.strip() for line in code.splitlines()}
    lines = sorted({_IMPORTS[name] for name in needed if name in _IMPORTS} - present)
    if "keras" in needed:
        lines = ["import os", 'os.environ.setdefault("KERAS_BACKEND", "jax")', *lines]
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
        if isinstance(node, cst.ImportFrom) and (_dotted(node.module) or "").startswith("tensorflow"):
            return True
        if isinstance(node, cst.Import):
            return any((_dotted(alias.name) or "").startswith("tensorflow") for alias in node.names)
    return False
