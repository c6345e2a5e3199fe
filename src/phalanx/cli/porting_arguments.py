"""Arguments of TensorFlow's array functions, which NumPy's functions call otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

__all__ = ["ported_arguments", "without_last_comma"]

_LISTED = {
    "range": "start:start limit:stop delta:step dtype:dtype",
    "concat": "values:arrays axis:axis",
    "stack": "values:arrays axis:axis",
    "reshape": "tensor:a shape:shape",
    "transpose": "a:a perm:axes",
    "tile": "input:A multiples:reps",
    "repeat": "input:a repeats:repeats axis:axis",
    "expand_dims": "input:a axis:axis",
    "squeeze": "input:a axis:axis",
    "matmul": "a:a b:b",
    "cast": "x:a dtype:dtype",
    "constant": "value:a dtype:dtype",
    "convert_to_tensor": "value:a dtype:dtype",
    "identity": "input:a",
    "argmax": "input:a axis:axis",
    "argmin": "input:a axis:axis",
    "cumsum": "x:a axis:axis",
    "sort": "values:a axis:axis",
    "argsort": "values:a axis:axis",
    "zeros": "shape:shape dtype:dtype",
    "ones": "shape:shape dtype:dtype",
    "fill": "dims:shape value:fill_value",
    "zeros_like": "input:a dtype:dtype",
    "ones_like": "input:a dtype:dtype",
    "eye": "num_rows:N num_columns:M dtype:dtype",
    "linspace": "start:start stop:stop num:num axis:axis",
    "where": "condition:condition x:x y:y",
    "clip_by_value": "t:arr clip_value_min:min clip_value_max:max",
    "pad": "tensor:array paddings:pad_width",
    "one_hot": "indices:x depth:num_classes axis:axis dtype:dtype",
    "gather": "params:a indices:indices axis:axis",
    "norm": "tensor:x ord:ord axis:axis keepdims:keepdims",
    "softmax": "logits:x axis:axis",
    "log_softmax": "logits:x axis:axis",
    "leaky_relu": "features:x alpha:negative_slope",
    "gelu": "features:x approximate:approximate",
    "einsum": "",
    "tensordot": "a:a b:b axes:axes",
    "makedirs": "path:name",
    "mkdir": "path:name",
    "sparse_softmax_cross_entropy_with_logits": "labels:labels logits:logits",
    "softmax_cross_entropy_with_logits": "labels:labels logits:logits axis:axis",
    "sigmoid_cross_entropy_with_logits": "labels:labels logits:logits",
}
_LISTED |= dict.fromkeys(
    [f"reduce_{x}" for x in ("sum", "mean", "max", "min", "prod", "all", "any", "std", "variance")]
    + ["reduce_logsumexp"],
    "input_tensor:a axis:axis keepdims:keepdims",
)
_LISTED |= dict.fromkeys(["relu", "elu", "silu", "softplus"], "features:x")
_KEYWORDS = {name: dict(pair.split(":") for pair in pairs.split()) for name, pairs in _LISTED.items()}
_DEFAULTS = dict.fromkeys(["argmax", "argmin", "cumsum"], ("axis", "axis", "0")) | {
    "gather": ("axis", "axis", "0"),
    "leaky_relu": ("alpha", "negative_slope", "0.2"),
    "gelu": ("approximate", "approximate", "False"),
    "makedirs": ("", "exist_ok", "True"),
    "mkdir": ("", "exist_ok", "True"),
}
"""Where the counterpart has another default: the argument, its name there, TensorFlow's default."""
_WITHOUT_MEANING = ("name", "output_type", "out_type")  # JAX has one dtype of indices
_OTHER_ORDER = {
    f"{kind}_cross_entropy_with_logits": ("labels", "logits")
    for kind in ("sparse_softmax", "softmax", "sigmoid")
}
"""Functions whose counterpart takes its arguments in another order: they get their names."""


def ported_arguments(full: str, args: Sequence[cst.Arg]) -> tuple[list[cst.Arg], str | None]:
    """The arguments of a call of an array function, and what is left to do.

    Args:
        full: the function's name in TensorFlow, such as ``tf.math.argmax``.
        args: what it is called with.
    """
    name = full.rpartition(".")[2]
    known = _KEYWORDS.get(name, {"axis": "axis", "keepdims": "keepdims", "dtype": "dtype"})
    kept, strange = [], []
    for arg in args:
        if arg.keyword is None:
            kept.append(arg)
        elif arg.keyword.value in known:
            kept.append(arg.with_changes(keyword=cst.Name(known[arg.keyword.value])))
        elif arg.keyword.value not in _WITHOUT_MEANING:
            kept.append(arg)
            strange.append(arg.keyword.value)
    given = [arg.keyword.value for arg in args if arg.keyword is not None]
    is_known = not any(arg.star for arg in args)
    if name in _DEFAULTS and is_known:
        theirs, ours, value = _DEFAULTS[name]
        before = 2 if name == "gather" else 1  # arguments that stand before it
        if theirs not in given and (not theirs or len(args) - len(given) <= before):
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            kept = [arg.with_changes(comma=comma) for arg in kept]
            kept.append(_named(cst.Arg(cst.parse_expression(value)), ours))
    if name in _OTHER_ORDER and is_known:
        names = [*_OTHER_ORDER[name], *("" for _ in kept)]
        kept = [
            _named(a, n) if a.keyword is None and n else a for a, n in zip(kept, names, strict=False)
        ]
    reason = f"the counterpart has no argument {strange[0]}" if strange else None
    return without_last_comma(kept), reason


def _named(arg: cst.Arg, name: str) -> cst.Arg:
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return arg.with_changes(keyword=cst.Name(name), equal=equal)


def without_last_comma(args: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Arguments of which the last one has no comma behind it."""
    return [*args[:-1], args[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)] if args else []
