"""The options of the context, against recorded answers of MindSpore 2.10."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import phalanx.errors
from phalanx.errors import InvalidOptionsError, PhalanxError
from phalanx.parallel.combinations import check_together, conflicts
from phalanx.parallel.context import (
    current_options,
    get_auto_parallel_context,
    options_in_force,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)
from phalanx.parallel.device_layout import Layout
from phalanx.parallel.options import READABLE, SETTABLE, ParallelOptions, changed, read

RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "mindspore_context.jsonl").read_text().splitlines()
]


def recorded(kind: str) -> list[dict[str, Any]]:
    return [r for r in RECORDED if r["kind"] == kind]


OTHER_ANSWERS = {
    "{'gradients_mean': None}": "None is no truth value, and is refused like any other wrong type",
    "{'dump_local_norm_path': 1}": "MindSpore's text is its C++ binding's",
    "{'dump_local_norm': 'x'}": "MindSpore's text is its C++ binding's",
    "{'strategy_ckpt_save_file': None}": "None is refused by the check of types, which says so",
    "{'all_reduce_fusion_config': [-1]}": "MindSpore's text is its C++ binding's",
    "{'comm_fusion': {'allreduce': {'mode': 'size', 'config': 'a'}}}": "a bare error of Python there",
    "{'comm_fusion': {'allreduce': {'mode': 'size', 'config': None}}}": "a bare error of Python there",
    "{'comm_fusion': {'allreduce': {'mode': 'size', 'config': 1.5}}}": "the C++ binding's text there",
}
"""Recorded answers that differ here, and why ours is better."""

NOT_READABLE_THERE = (
    "group_ckpt_save_file",
    "pipeline_config",
    "pipeline_segments",
    "parallel_optimizer_config",
)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    reset_auto_parallel_context()
    yield
    reset_auto_parallel_context()


@pytest.mark.parametrize("row", recorded("default"), ids=lambda r: r["key"])
def test_defaults(row: dict[str, Any]) -> None:
    assert get_auto_parallel_context(row["key"]) == row["value"]
    assert type(get_auto_parallel_context(row["key"])).__name__ == row["type"]


@pytest.mark.parametrize("row", recorded("set"), ids=lambda r: r["kwargs"])
def test_setting(row: dict[str, Any]) -> None:
    kwargs = ast.literal_eval(row["kwargs"])
    if row["ok"] and row["kwargs"] not in OTHER_ANSWERS:
        set_auto_parallel_context(**kwargs)
        for key, value in row["after"].items():
            if key not in NOT_READABLE_THERE:
                assert get_auto_parallel_context(key) == value
        return
    before = current_options()
    with pytest.raises(PhalanxError) as caught:
        set_auto_parallel_context(**kwargs)
    assert current_options() == before
    if row["kwargs"] in OTHER_ANSWERS:
        assert row["ok"] or row["error"] in [c.__name__ for c in type(caught.value).__mro__]
    else:
        assert row["error"] in [c.__name__ for c in type(caught.value).__mro__]
        assert str(caught.value) == row["msg"]


@pytest.mark.parametrize("row", recorded("get"), ids=lambda r: str(r["key"]))
def test_reading(row: dict[str, Any]) -> None:
    if row["key"] in NOT_READABLE_THERE:  # every key can be read here
        get_auto_parallel_context(row["key"])
        return
    with pytest.raises(ValueError, match="is not recognized!") as caught:
        get_auto_parallel_context(row["key"])
    assert str(caught.value) == row["msg"]


def test_all_keys_of_mindspore_are_there() -> None:
    (keys,) = recorded("keys")
    assert set(keys["settable"]) == set(SETTABLE)
    assert set(keys["gettable"]) | set(keys["set_only"]) <= set(READABLE)
    for key in READABLE:
        get_auto_parallel_context(key)


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="too many positional arguments"):
        set_auto_parallel_context("auto_parallel")


@pytest.mark.parametrize("wrong", [{"parallel_mode": "bogus"}, {"nosuch": 1}])
def test_nothing_is_set_if_one_option_is_wrong(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bogus|nosuch"):
        set_auto_parallel_context(device_num=8, **wrong)
    assert get_auto_parallel_context("device_num") == 1


def test_levels_and_accumulation_exclude_each_other() -> None:
    set_auto_parallel_context(parallel_optimizer_config={"gradient_accumulation_shard": True})
    (row,) = recorded("cross")
    with pytest.raises(ValueError, match="grad_accumulation shard") as caught:
        set_auto_parallel_context(parallel_optimizer_config={"optimizer_level": "level3"})
    assert str(caught.value) == row["msg"]


def test_reset_is_complete() -> None:
    set_auto_parallel_context(
        dataset_strategy=((1, 8), (1, 8)), comm_fusion={"allreduce": {"mode": "size", "config": 32}}
    )
    reset_auto_parallel_context()
    assert current_options() == ParallelOptions()
    set_auto_parallel_context(full_batch=True)
    assert get_auto_parallel_context("dataset_strategy") == "full_batch"
    assert get_auto_parallel_context("full_batch_is_set")


def test_what_is_read_cannot_change_the_context() -> None:
    get_auto_parallel_context("comm_fusion")["allreduce"]["mode"] = "bogus"
    assert get_auto_parallel_context("comm_fusion")["allreduce"]["mode"] == "auto"


def test_a_block_has_options_of_its_own() -> None:
    with options_in_force(changed(current_options(), {"pipeline_stages": 4})):
        assert get_auto_parallel_context("pipeline_stages") == 4
        set_auto_parallel_context(device_num=2)
    assert get_auto_parallel_context("pipeline_stages") == 1
    assert get_auto_parallel_context("device_num") == 2


# -- layouts ------------------------------------------------------------------------------------

LAYOUTS: dict[str, Any] = {
    "ok": lambda: Layout((2, 2, 2), ("dp", "sp", "mp"))("dp", "mp"),
    "ok_tuple": lambda: Layout((2, 2, 2), ("dp", "sp", "mp"))(("dp", "sp"), "None", "mp"),
    "ok_tuple_none": lambda: Layout((2, 2, 2), ("dp", "sp", "mp"))(("dp", "None"), "mp"),
    "list devmat": lambda: Layout([2, 2], ("a", "b")),  # type: ignore[arg-type]
    "list alias": lambda: Layout((2, 2), ["a", "b"]),  # type: ignore[arg-type]
    "len mismatch": lambda: Layout((2, 2), ("a",)),
    "nonint": lambda: Layout((2, 2.0), ("a", "b")),  # type: ignore[arg-type]
    "nonstr": lambda: Layout((2, 2), ("a", 1)),  # type: ignore[arg-type]
    "empty alias": lambda: Layout((2, 2), ("a", "")),
    "None alias": lambda: Layout((2, 2), ("a", "None")),
    "dup alias": lambda: Layout((2, 2), ("a", "a")),
    "interleaved not last": lambda: Layout((2, 2), ("interleaved_parallel", "a")),
    "rank_list ok": lambda: Layout((2, 2), ("a", "b"), [3, 2, 1, 0])("a", "b"),
    "rank_list tuple": lambda: Layout((2, 2), ("a", "b"), (3, 2, 1, 0)),  # type: ignore[arg-type]
    "rank_list len": lambda: Layout((2, 2), ("a", "b"), [0, 1]),
    "rank_list str": lambda: Layout((2, 2), ("a", "b"), [0, 1, 2, "3"]),  # type: ignore[list-item]
    "unknown axis": lambda: Layout((2, 2), ("a", "b"))("c"),
    "dup axis": lambda: Layout((2, 2), ("a", "b"))("a", "a"),
    "dup axis in tuple": lambda: Layout((2, 2), ("a", "b"))(("a", "b"), "b"),
    "to_dict before call": lambda: Layout((2, 2), ("a", "b")).to_dict(),
    "None obj": lambda: Layout((2, 2), ("a", "b"))(None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("row", recorded("layout"), ids=lambda r: r["case"])
def test_layouts(row: dict[str, Any]) -> None:
    if row["case"] == "zero":  # which MindSpore does not check
        with pytest.raises(ValueError, match="at least 1"):
            Layout((0, 2), ("a", "b"))
        return
    if row["ok"]:
        assert json.loads(json.dumps(LAYOUTS[row["case"]]().to_dict())) == row["value"]
        return
    with pytest.raises(PhalanxError) as caught:
        LAYOUTS[row["case"]]()
    assert row["error"] in [c.__name__ for c in type(caught.value).__mro__]
    assert str(caught.value) == row["msg"]


def test_layouts_in_dataset_strategy() -> None:
    layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
    set_auto_parallel_context(dataset_strategy=(layout("dp", "None"), layout(("dp", "mp"), "None")))
    (row,) = recorded("dataset_strategy_layout")
    assert json.loads(json.dumps(get_auto_parallel_context("dataset_strategy"))) == row["value"]
    (row,) = recorded("dataset_strategy_mixed")
    with pytest.raises(TypeError) as caught:
        set_auto_parallel_context(dataset_strategy=(layout("dp", "None"), (1, 2)))
    assert str(caught.value) == row["msg"]
    (row,) = recorded("dataset_strategy_interleaved")
    virtual = Layout((2, 2), ("dp", "interleaved_parallel"))
    with pytest.raises(ValueError, match="interleaved") as wrong:
        set_auto_parallel_context(dataset_strategy=(virtual("dp", "None"),))
    assert str(wrong.value) == row["msg"]


# -- combinations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_num": 8, "pipeline_stages": 3, "parallel_mode": "semi_auto_parallel"}, "divided by"),
        ({"device_num": 2}, "is for one device"),
        ({"device_num": 16, "parallel_mode": "data_parallel"}, "there are 8 devices"),
        ({"global_rank": 8, "parallel_mode": "data_parallel"}, "not below"),
        ({"full_batch": True, "parallel_mode": "data_parallel"}, "full_batch could only be used"),
        ({"parameter_broadcast": True, "parallel_mode": "auto_parallel"}, "parameter broadcast"),
        ({"enable_parallel_optimizer": True}, "parallel optimizer is not supported in stand_alone"),
        (
            {"strategy_ckpt_load_file": "strategy.json", "parallel_mode": "data_parallel"},
            "strategy_ckpt_load_file could only be used",
        ),
        (
            {
                "parallel_mode": "auto_parallel",
                "search_mode": "dynamic_programming",
                "pipeline_stages": 2,
            },
            "pipeline_stages needs",
        ),
        (
            {
                "parallel_mode": "auto_parallel",
                "search_mode": "dynamic_programming",
                "auto_pipeline": True,
            },
            "auto_pipeline needs",
        ),
        (
            {
                "parallel_mode": "data_parallel",
                "enable_parallel_optimizer": True,
                "optimizer_weight_shard_size": 16,
            },
            "optimizer_weight_shard_size",
        ),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], words: str) -> None:
    chosen = changed(ParallelOptions(), options)
    with pytest.raises(InvalidOptionsError, match=words):
        check_together(chosen, 8)


def test_accumulation_and_levels_that_are_set_one_after_the_other() -> None:
    """MindSpore looks at one order of the two only."""
    chosen = changed(ParallelOptions(), {"parallel_mode": "data_parallel"})
    for config in ({"optimizer_level": "level3"}, {"gradient_accumulation_shard": True}):
        chosen = changed(chosen, {"parallel_optimizer_config": config})
    with pytest.raises(InvalidOptionsError, match="needs optimizer_level='level2', and it is 'level3'"):
        check_together(chosen, 8)


@given(st.sampled_from(["semi_auto_parallel", "auto_parallel"]), st.sampled_from([1, 2, 4, 8]))
def test_what_goes_together(mode: str, count: int) -> None:
    chosen = changed(
        ParallelOptions(), {"parallel_mode": mode, "device_num": count, "full_batch": True}
    )
    assert conflicts(chosen, 8) == []


@given(
    st.dictionaries(st.sampled_from(SETTABLE), st.one_of(st.none(), st.integers(), st.text(max_size=3)))
)
def test_changes_count_all_or_not_at_all(changes: dict[str, Any]) -> None:
    before = ParallelOptions()
    try:
        after = changed(before, changes)
    except PhalanxError:
        assert before == ParallelOptions()
    else:
        assert all(key in SETTABLE for key in changes)
        for key in READABLE:
            read(after, key)


NOT_OURS = {
    "version": "says what was recorded",
    "partial": "options that are set although another is wrong: here none is",
    "partial_unknown": "the same",
    "dataset_strategy_after_reset": "a reset that forgets something: ours is complete",
    "full_batch_sets_dataset_strategy": "the same, after that reset",
    "costmodel_default": "weights of bytes; `px.parallel.Hardware` has seconds",
}
"""Recorded answers that are not wanted here, and why."""


def test_every_recorded_answer_is_compared_or_named() -> None:
    compared = {"default", "set", "get", "keys", "cross", "layout", "set_positional"}
    compared |= {f"dataset_strategy_{n}" for n in ("layout", "mixed", "interleaved")}
    compared |= {"algo_default", "algo_set", "comm_fusion_reset"}
    assert {row["kind"] for row in RECORDED} == compared | set(NOT_OURS)
    assert len(RECORDED) == 292


def test_fusion_is_reset() -> None:
    (row,) = recorded("comm_fusion_reset")
    set_auto_parallel_context(comm_fusion={"allreduce": {"mode": "size", "config": 32}})
    assert get_auto_parallel_context("comm_fusion") == row["before"]
    reset_auto_parallel_context()
    assert get_auto_parallel_context("comm_fusion") == row["after"]


def test_errors_are_public() -> None:
    assert {"InvalidKeyError", "InvalidOptionsError"} <= set(phalanx.errors.__all__)
