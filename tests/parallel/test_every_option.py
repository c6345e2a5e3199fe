"""Every option of the context acts: the test that shows it, and what no other test shows."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from phalanx.errors import InvalidOptionsError, InvalidTypeError, InvalidValueError, NotFoundError
from phalanx.parallel import Plan, load_mindspore_strategy, parallelize
from phalanx.parallel.options import SETTABLE
from phalanx.parallel.strategy_messages import decoded_groups

ARGS = {"a": np.ones((8, 8), np.float32), "b": np.ones((8, 4), np.float32)}, np.ones((16, 8), "f")
FOUR = jax.devices()[:4]

SHOWN = {
    "all_reduce_fusion_config": "test_parallelizing::test_options_say_which_gradients_travel_together",
    "auto_parallel_search_mode": "test_every_option::test_names_of_the_search",
    "auto_pipeline": "test_the_number_of_stages_is_chosen_if_asked_for",
    "comm_fusion": "test_gradient_options::test_fusion_of_slices",
    "dataset_strategy": "test_parallelizing::test_batches_are_cut_as_the_dataset_strategy_says",
    "device_num": "test_parallelizing::test_the_context_says_what_is_not_given",
    "dump_device_local_norm": "test_gradient_options::test_local_norms",
    "dump_local_norm": "test_gradient_options::test_local_norms",
    "dump_local_norm_path": "test_gradient_options::test_local_norms",
    "enable_alltoall": "test_parallelizing::test_given_layouts_change_without_all_to_all_too",
    "enable_parallel_optimizer": "test_gradient_options::test_a_parallel_optimizer_in_data_parallel",
    "force_fp32_communication": "test_parallelizing::test_sums_over_devices_in_32_bits",
    "full_batch": "test_every_option::test_full_batch",
    "global_rank": "test_every_option::test_files_of_groups",
    "grad_accumulation_step": "test_options::test_setting",  # 1, or an error, as in MindSpore
    "gradient_fp32_sync": "test_gradient_options::test_gradient_fp32_sync",
    "gradients_mean": "test_parallelizing::test_sums_are_the_default_as_in_mindspore",
    "group_ckpt_save_file": "test_every_option::test_files_of_groups",
    "init_param_in_compile": "test_every_option::test_where_parameters_are_made",
    "loss_repeated_mean": "test_gradient_options::test_a_loss_that_is_repeated",
    "optimizer_weight_shard_size": "test_gradient_options::test_a_parallel_optimizer_in_data_parallel",
    "parallel_mode": "test_parallelizing::test_every_mode_equals_one_device",
    "parallel_optimizer_config": "test_gradient_options::test_gradient_accumulation_shard",
    "parameter_broadcast": "test_gradient_options::test_parameters_are_broadcast_before_the_first_step",
    "pipeline_config": "test_segments_are_chunks",
    "pipeline_result_broadcast": "test_attributes_of_layers_say_stages_and_results_are_broadcast",
    "pipeline_segments": "test_segments_are_chunks",
    "pipeline_stages": "test_layers_are_cut_by_name",
    "search_mode": "test_every_option::test_names_of_the_search",
    "sharding_propagation": "test_every_option::test_names_of_the_search",
    "strategy_ckpt_config": "test_every_option::test_strategy_files",
    "strategy_ckpt_load_file": "test_every_option::test_strategy_files",
    "strategy_ckpt_save_file": "test_every_option::test_strategy_files",
}
HINTS = {
    "auto_parallel_new_interface": "there is one interface",
    "communi_parallel_mode": "XLA schedules collectives",
    "optimizer_weight_shard_aggregated_save": "checkpoints always have whole arrays",
}
"""Options that can only be hints; the guide lists them."""
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "parallel.md"


def loss(params: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ params["a"]) @ params["b"])


def test_every_option_is_shown_or_a_hint() -> None:
    assert {*SHOWN, *HINTS} == set(SETTABLE)
    for place in SHOWN.values():
        module, _, name = place.rpartition("::")
        module = module or "pipelines.test_cells"
        assert hasattr(importlib.import_module(f"tests.parallel.{module}"), name), place
    text = GUIDE.read_text()
    assert all(f"`{name}`" in text for name in SETTABLE)
    (line,) = [line for line in text.splitlines() if "hints without effect" in line]
    assert all(f"`{name}`" in line for name in HINTS)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "recursive_programming"),
        ({"search_mode": "dynamic_programming"}, "exact"),
        ({"auto_parallel_search_mode": "dynamic_programming"}, "exact"),
        ({"auto_parallel_search_mode": "sharding_propagation"}, "sharding_propagation"),
        ({"sharding_propagation": True}, "sharding_propagation"),
    ],
    ids=str,
)
def test_names_of_the_search(options: Any, mode: str) -> None:
    program = parallelize(loss, ARGS, parallel_mode="auto_parallel", devices=FOUR, **options)
    assert program.plan is not None
    assert program.plan.mode == mode


def test_full_batch() -> None:
    for mode in ("semi_auto_parallel", "auto_parallel"):
        program = parallelize(loss, ARGS, parallel_mode=mode, devices=FOUR, full_batch=True)
        assert program.arguments[1].spec == P()


@pytest.mark.parametrize("name", ["strategy.json", "strategy.ckpt"])
def test_strategy_files(name: str, tmp_path: Path) -> None:
    """In JSON and in protobuf; with inputs, if these are asked for; and for a mode that has no plan."""
    path = str(tmp_path / name)
    where: Any = {"devices": FOUR, "search_mode": "dynamic_programming"}
    plans = []
    for trained in (True, False):
        config = {"save_file": path, "only_trainable_params": trained}
        saved = parallelize(
            loss, ARGS, parallel_mode="auto_parallel", strategy_ckpt_config=config, **where
        )
        read = load_mindspore_strategy(path)
        assert set(read.parameters) == ({"a", "b"} if trained else {"a", "b", "arg1"})
        assert read.operators["dot_general"][0] == saved.plan.operators[0].strategy[0]  # type: ignore[union-attr]
        plans.append(saved.plan)
    assert Path(path).stat().st_mode & 0o777 == 0o600
    loaded = parallelize(
        loss, ARGS, parallel_mode="auto_parallel", strategy_ckpt_load_file=path, **where
    )
    assert loaded.plan == plans[-1]
    given: Any = {"a": (1, 4), "b": (2, 2)}
    layouts = parallelize(
        loss,
        ARGS,
        parallel_mode="semi_auto_parallel",
        parameter_plan=given,
        devices=FOUR,
        strategy_ckpt_save_file=path,
    ).layouts
    again = parallelize(
        loss, ARGS, parallel_mode="semi_auto_parallel", devices=FOUR, strategy_ckpt_load_file=path
    )
    assert {n: again.held(again.place(*ARGS)[0][n]).shape for n in layouts} == {
        "a": (8, 2),
        "b": (4, 2),
    }


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
def test_layouts_of_a_strategy_file_that_do_not_fit_are_left_out(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MindSpore writes the slots of its optimizers into the file, and networks change."""
    item = {"dev_matrix": [2, 2], "tensor_map": [1, 0], "tensor_shape": [8, 8]}
    wide = {"dev_matrix": [3], "tensor_map": [-1, 0], "tensor_shape": [8, 6]}
    path = tmp_path / f"{mode}.json"
    items = {"a": item, "b": wide, f"moments.{mode}": item}
    path.write_text(json.dumps({"parallel_strategy_item": {}, "parallel_layout_item": items}))
    program = parallelize(
        loss, ARGS, parallel_mode=mode, devices=FOUR, strategy_ckpt_load_file=str(path)
    )
    assert program.layouts["a"] == P("d0", "d1")
    notes = caplog.messages if program.plan is None else program.plan.notes
    assert f"moments.{mode} of the strategy file is not in the program." in notes
    assert any(note.startswith("The strategy file's layout of b is left out.") for note in notes)
    with pytest.raises(InvalidValueError, match="no parameter of this name"):
        parallelize(loss, ARGS, parallel_mode=mode, devices=FOUR, parameter_plan={"moments": (2, 2)})


def test_bad_strategy_files(tmp_path: Path) -> None:
    path = tmp_path / "bad.ckpt"
    path.write_bytes(b"\xff\xfehello")
    where: Any = {"parallel_mode": "auto_parallel", "devices": FOUR}
    with pytest.raises(InvalidValueError, match="Load strategy checkpoint failed"):
        parallelize(loss, ARGS, strategy_ckpt_load_file=str(path), **where)
    with pytest.raises(NotFoundError, match="CheckPoint file is not found"):
        parallelize(loss, ARGS, strategy_ckpt_load_file=str(tmp_path / "none.ckpt"), **where)


def test_plans_of_other_programs_are_kept_where_they_fit(tmp_path: Path) -> None:
    where: Any = {"parallel_mode": "auto_parallel", "devices": FOUR}
    plan = parallelize(loss, ARGS, parameter_plan={"a": P(None, "x")}, **where).plan
    assert plan is not None
    plan.save(tmp_path / "plan.json")
    params = {"a": ARGS[0]["a"], "b": np.ones((8, 6), "f")}
    program = parallelize(loss, (params, ARGS[1]), plan=str(tmp_path / "plan.json"), **where)
    assert isinstance(program.plan, Plan)
    assert program.layouts["a"] == P(None, "x")
    assert any("its shape is [8, 4] there, [8, 6] here" in note for note in program.plan.notes)
    assert any("another program" in note for note in program.plan.notes)


def test_what_a_plan_lacks_is_searched(tmp_path: Path) -> None:
    """A file of which entries are missing, by its path; everything else is kept."""
    where: Any = {"parallel_mode": "auto_parallel", "devices": FOUR}
    plan = parallelize(loss, ARGS, parameter_plan={"a": P(None, "x")}, **where).plan
    assert plan is not None
    data = json.loads(plan.to_json())
    data["order"].remove("b")
    del data["parameters"]["b"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    program = parallelize(loss, ARGS, plan=path, **where)
    assert set(program.layouts) == {"a", "b"}
    assert program.layouts["a"] == P(None, "x")
    assert program.plan is not None
    assert any("not complete" in note for note in program.plan.notes)
    with pytest.raises(InvalidTypeError, match="Received: 5"):
        parallelize(loss, ARGS, plan=5, **where)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["groups.json", "groups.ckpt"])
def test_files_of_groups(name: str, tmp_path: Path) -> None:
    """Cut in two over four devices: each part is on two of them."""
    path = tmp_path / name
    parallelize(
        loss,
        ARGS,
        parallel_mode="semi_auto_parallel",
        parameter_plan={"a": (2, 1)},
        devices=FOUR,
        group_ckpt_save_file=str(path),
        global_rank=2,
    )
    if name.endswith(".json"):
        data = json.loads(path.read_text())
        groups, restored = data["parameter_groups"]["a"], data["restore_rank_list"]
        assert sorted(map(len, groups)) == [2, 2]
    else:
        found, restored = decoded_groups(path.read_bytes())
        groups = [ranks for ranks in found.values() if len(ranks) == 2]
    assert restored in groups
    assert 2 in restored


def test_where_parameters_are_made() -> None:
    """In parts, by a program; or by the function itself, and then placed."""
    seen = []

    def make() -> Any:
        seen.append(isinstance(jnp.ones(()) + 1, jax.core.Tracer))
        return {name: jnp.ones(x.shape) for name, x in ARGS[0].items()}

    for inside in (True, False):
        program = parallelize(
            loss,
            ARGS,
            parallel_mode="semi_auto_parallel",
            parameter_plan={"a": (4, 1)},
            devices=FOUR,
            init_param_in_compile=inside,
        )
        seen.clear()
        made = program.create(make)
        assert made["a"].sharding == program.arguments[0]["a"]
        assert all(seen) == inside


@pytest.mark.parametrize("mode", ["stand_alone", "semi_auto_parallel", "auto_parallel"])
def test_programs_of_whole_arrays_do_not_communicate(mode: str) -> None:
    def wrong(params: Any, x: Any) -> Any:
        return jax.lax.psum(loss(params, x), "replica")

    with pytest.raises(InvalidOptionsError, match="communicates along an axis by itself"):
        parallelize(wrong, ARGS, parallel_mode=mode, devices=FOUR)
