"""Rewrites gradient tapes: the code below a tape becomes a function that is differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import libcst as cst
import libcst.matchers as m

from phalanx.cli.porting_tree import Mark, commented, dotted, full_name

__all__ = ["Tapes"]


_WITH_STEPS = "model of Keras with steps"
_STEP = m.Name("train_step") | m.Name("test_step") | m.Name("predict_step")


def _is_step(node: Any) -> bool:
    """Whether a method is a step of Keras as TensorFlow has it: of the model and the data."""
    is_step = m.matches(node, m.FunctionDef(name=_STEP))
    return is_step and len(node.params.params) == 2


class _Gradient(NamedTuple):
    """A call of ``tape.gradient``: where it stands, what it is assigned to, of which loss, by what."""

    at: int
    target: str
    loss: str
    variables: str


class Tapes(cst.CSTTransformer):
    """Turns tapes and their gradient calls into a function and `px.value_and_grad`."""

    def __init__(self, aliases: dict[str, str]) -> None:
        super().__init__()
        self._aliases = aliases
        self._taken: set[str] = set()  # names of the program
        self.marks: list[Mark] = []
        self.count = 0
        self._around: list[str] = []  # the functions and the models of Keras around the code
        self._models: set[str] = set()  # classes of the program that are models of Keras
        self._calls_steps = False  # whether the program calls steps of Keras itself

    def visit_Module(self, node: cst.Module) -> None:  # noqa: N802
        """Look which names there are."""
        self._taken = _names(node)
        self._calls_steps = bool(m.findall(node, m.Attribute(attr=_STEP)))

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802
        """A class begins."""
        bases = [
            (full_name(base.value, self._aliases) or dotted(base.value) or "") for base in node.bases
        ]
        is_model = any(base.startswith("tf.keras") or base in self._models for base in bases)
        if is_model:
            self._models.add(node.name.value)
        has_steps = is_model and not self._calls_steps and any(map(_is_step, node.body.body))
        self._around.append(_WITH_STEPS if has_steps else "model of Keras" if is_model else "class")

    def leave_ClassDef(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """A class ends."""
        self._around.pop()
        return updated_node

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        """A function begins."""
        self._around.append(node.name.value)

    def leave_FunctionDef(self, original_node: Any, updated_node: Any) -> Any:  # noqa: N802
        """A function ends; steps of Keras models that write variables get a decorator."""
        self._around.pop()
        if self._around[-1:] != [_WITH_STEPS] or not _is_step(original_node):
            return updated_node
        kept = [d for d in updated_node.decorators if not self._is_function(d.decorator)]
        first = cst.Decorator(cst.parse_expression("px.keras.stateful"))
        return updated_node.with_changes(decorators=[first, *kept])

    def _is_function(self, decorator: Any) -> bool:
        func = decorator.func if isinstance(decorator, cst.Call) else decorator
        return full_name(func, self._aliases) == "tf.function"

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
            tapes = self._tapes_of(statement)
            if tapes is None:
                result.append(statement)
                continue
            block, inside = _without_gradients(statement, tapes)
            after = self._with_names(tapes, [*inside, *rest])
            made = self._function(block, tapes, after)
            if not isinstance(made, str):
                rest = after
            if isinstance(made, str):
                mark = Mark("tf.GradientTape", made)
                self.marks.append(mark)
                result.append(commented(statement, [mark]))
            else:
                self.count += len(tapes)
                result += made
        return result

    def _with_names(self, tapes: list[str], statements: list[Any]) -> list[Any]:
        """Statements in which gradients inside expressions have names: those of lines before."""
        result: list[Any] = []
        for statement in statements:
            asked = [
                call
                for tape in tapes
                for call in m.findall(statement, m.Call(func=_gradient_of(tape)))
                if isinstance(statement, cst.SimpleStatementLine)
            ]
            is_named = m.matches(statement, m.SimpleStatementLine(body=[m.Assign(value=m.Call())]))
            if len(asked) != 1 or (is_named and statement.body[0].value is asked[0]):
                result.append(statement)
                continue
            name = "gradients"
            while name in self._taken:
                name += "_here"
            line = cst.parse_statement(f"{name} = {cst.Module([]).code_for_node(asked[0])}")
            changed = statement.deep_replace(asked[0], cst.Name(name)).with_changes(leading_lines=())
            result += [line.with_changes(leading_lines=statement.leading_lines), changed]
        return result

    def _tapes_of(self, statement: Any) -> list[str] | None:
        """The names of the tapes that a statement opens, if it opens nothing else."""
        if not isinstance(statement, cst.With):
            return None
        names = []
        for item in statement.items:
            call = item.item
            if not isinstance(call, cst.Call):
                return None
            if full_name(call.func, self._aliases) != "tf.GradientTape":
                return None
            name = item.asname.name if item.asname else None
            names.append(name.value if isinstance(name, cst.Name) else "")
        return names

    def _function(self, block: cst.With, tapes: list[str], rest: list[Any]) -> list[Any] | str:
        """The statements in place of tapes and their gradients; or why there are none."""
        reason = _unusual(block, tapes)
        if self._around[-2:] == ["model of Keras", "train_step"]:
            reason = "Keras on JAX has other steps: see px.keras.stateful, or override compute_loss"
        if reason:
            return reason
        ends = (i for i, s in enumerate(rest) if {*(self._tapes_of(s) or ())} & {*tapes})
        found = _gradients(tapes, rest[: next(ends, len(rest))])
        if isinstance(found, str):
            return found
        assigned = _assigned(block.body)
        for each in found:
            if each.loss not in assigned:
                return f"the loss {each.loss} is not computed in the block"
        again = [name for name in assigned if _reads_before_writing(block.body, name)]
        if again:
            return f"{', '.join(again)} is read and then written in the block: give it another name"
        later = {name for s in rest for name in _names(s)}
        losses = [each.loss for each in found]
        others = [name for name in assigned if name not in losses and name in later]
        function = "compute_" + "_and_".join(dict.fromkeys(losses))
        while function in self._taken:
            function += "_here"
        home = "px.keras" if _WITH_STEPS in self._around else "px"
        lines = _differentiation(home, function, found, others)
        body = [*block.body.body, cst.parse_statement(lines[0])]
        definition = cst.FunctionDef(
            name=cst.Name(function),
            params=cst.Parameters(),
            body=cst.IndentedBlock(body=body),
            leading_lines=block.leading_lines,
        )
        places = [each.at for each in found]
        over = [line for i in places for line in rest[i].leading_lines if line.comment]
        between = [s for i, s in enumerate(rest[: max(places)]) if i not in places]
        del rest[: max(places) + 1]
        rest[:] = [s for s in rest if not _deletes(s, tapes)]
        made = {*assigned}
        before = [s for s in between if not made & _names(s)]  # perhaps the list of variables
        after = [s for s in between if made & _names(s)]
        call: Any = cst.parse_statement(lines[1])
        return [*before, definition, call.with_changes(leading_lines=over), *after]


def _without_gradients(block: cst.With, tapes: list[str]) -> tuple[cst.With, list[Any]]:
    """A block up to where it asks for gradients itself, and its statements from there on."""
    body = list(block.body.body)
    for i, statement in enumerate(body):
        if any(m.findall(statement, _gradient_of(tape)) for tape in tapes) and i:
            shorter = block.body.with_changes(body=body[:i])
            return block.with_changes(body=shorter), body[i:]
    return block, []


def _gradient_of(tape: str) -> Any:
    return m.Attribute(value=m.Name(tape), attr=m.Name("gradient"))


def _names(statement: Any) -> set[str]:
    return {n.value for n in m.findall(statement, m.Name()) if isinstance(n, cst.Name)}


def _differentiation(
    home: str, function: str, found: list[_Gradient], others: list[str]
) -> tuple[str, str]:
    """The last line of the function, and the line that differentiates it."""
    bundle = f"({', '.join(others)}{',' if len(others) == 1 else ''})"
    if len(found) == 1:
        (only,) = found
        value, grads, given, name = only.loss, only.target, only.variables, "value_and_grad"
    else:
        value = f"({', '.join(each.loss for each in found)})"
        grads = f"({', '.join(each.target for each in found)})"
        given = f"[{', '.join(each.variables for each in found)}]"
        name = "values_and_grads"
    if not others:
        return f"return {value}", f"{value}, {grads} = {home}.{name}({function}, {given})()"
    return (
        f"return {value}, {bundle}",
        f"({value}, {bundle}), {grads} = {home}.{name}({function}, {given}, has_aux=True)()",
    )


def _unusual(block: cst.With, tapes: list[str]) -> str:
    """Why a tape cannot be rewritten, as far as its own block tells."""
    for item in block.items:
        call = item.item
        assert isinstance(call, cst.Call)
        for arg in call.args:
            is_persistent = arg.keyword is not None and arg.keyword.value == "persistent"
            if not is_persistent:
                return "an unwatched tape: write a function of what is watched"
    if any(m.findall(block.body, m.Attribute(value=m.Name(tape))) for tape in tapes):
        return "the tape is used while it records: write a function of what is watched"
    if m.findall(block.body, m.Return() | m.Yield() | m.Break() | m.Continue()):
        return "the code below the tape leaves it: write the loss as a function"
    return ""


def _gradients(tapes: list[str], rest: Sequence[Any]) -> list[_Gradient] | str:
    """The gradients that are asked for after the block; or why they cannot be rewritten."""
    names = m.OneOf(*(m.Name(tape) for tape in tapes)) if len(tapes) > 1 else m.Name(tapes[0])
    call = m.Call(func=m.Attribute(value=names, attr=m.Name("gradient")))
    pattern = m.SimpleStatementLine(
        body=[
            m.Assign(
                targets=[m.SaveMatchedNode(m.AssignTarget(), "target")],
                value=m.SaveMatchedNode(call, "call"),
            )
        ]
    )
    found, code = [], cst.Module([])
    for i, statement in enumerate(rest):
        if not m.findall(statement, call):
            continue
        parts = m.extract(statement, pattern)
        if parts is None:
            return "the gradient is not that of a named loss, assigned to a name"
        asked, target = parts["call"], parts["target"]
        assert isinstance(asked, cst.Call)
        assert isinstance(target, cst.AssignTarget)
        if len(asked.args) != 2 or not isinstance(asked.args[0].value, cst.Name):
            return "the gradient is not that of a named loss, assigned to a name"
        variables = code.code_for_node(asked.args[1].value)
        grads = code.code_for_node(target.target)
        found.append(_Gradient(i, grads, asked.args[0].value.value, variables))
    used = sum(len(m.findall(statement, m.Attribute(value=names))) for statement in rest)
    if not found or used != len(found):
        return f"tape.gradient is called {len(found)} times, or the tape is used otherwise"
    return found


def _deletes(statement: Any, tapes: list[str]) -> bool:
    """Whether a statement only forgets tapes."""
    names = m.OneOf(*(m.Name(tape) for tape in tapes)) if len(tapes) > 1 else m.Name(tapes[0])
    return m.matches(statement, m.SimpleStatementLine(body=[m.Del(target=names)]))


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
