"""`AutoParallel`: options of its own, checked as MindSpore 2.10 does, and out of the way of others."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.errors import InvalidKeyError, InvalidTypeError, InvalidValueError, UnsupportedError
from phalanx.parallel import AutoParallel, ParallelMode, get_auto_parallel_context

ARGS = np.ones((4, 2), np.float32), np.ones((8, 4), np.float32)


def loss(w: Any, x: Any) -> Any:
    return jnp.sum((x @ w) ** 2)


def net(**options: Any) -> AutoParallel:
    return AutoParallel(loss, devices=["CPU:0", "CPU:1"], **options)


RECORDED: list[tuple[Any, type[Exception], str]] = [
    (
        lambda n: n.pipeline(stages="2"),
        InvalidTypeError,
        (
            "For 'AutoParallel.pipeline', the argument 'stages' must be int type, "
            "but got the type : <class 'str'>."
        ),
    ),
    (
        lambda n: n.pipeline(stages=0),
        InvalidValueError,
        (
            "For 'AutoParallel.pipeline', the argument 'stages' must be larger than zero, "
            "but got value: 0."
        ),
    ),
    (
        lambda n: n.pipeline(scheduler="x"),
        InvalidValueError,
        (
            "For 'AutoParallel.pipeline', the argument 'scheduler' must be "
            "'1f1b'/'gpipe'/'seqpipe'/'seqvpp'/'seqsmartvpp'/'zero_bubble_v' , but got the value : x."
        ),
    ),
    (
        lambda n: n.pipeline(scheduler=1),
        InvalidTypeError,
        (
            "For 'AutoParallel.pipeline', the argument 'scheduler' must be str type, "
            "but got the type : <class 'int'>."
        ),
    ),
    (
        lambda n: n.pipeline(interleave=1),
        InvalidTypeError,
        (
            "For 'AutoParallel.pipeline', the argument 'interleave' must be bool type, "
            "but got the type : <class 'int'>."
        ),
    ),
    (
        lambda n: n.pipeline(output_broadcast=1),
        InvalidTypeError,
        (
            "For 'AutoParallel.pipeline', the argument 'output_broadcast' must be bool type, "
            "but got the type : <class 'int'>."
        ),
    ),
    (
        lambda n: n.hsdp(0),
        InvalidValueError,
        "shard_size must be a positive integer or -1, but got 0.",
    ),
    (
        lambda n: n.hsdp("a"),
        InvalidValueError,
        "shard_size must be a positive integer or -1, but got a.",
    ),
    (
        lambda n: n.hsdp(threshold=-1),
        InvalidValueError,
        "threshold must be a positive integer or 0, but got -1.",
    ),
    (
        lambda n: n.hsdp(optimizer_level="level4"),
        InvalidValueError,
        "Optimizer level should in ['level1', 'level2', 'level3'], but got level4",
    ),
    (
        lambda n: n.dataset_strategy(None),
        InvalidValueError,
        "dataset_strategy is none in config!",
    ),
    (
        lambda n: n.dataset_strategy("x"),
        InvalidValueError,
        (
            "For 'AutoParallel.dataset_strategy', the argument 'config' must be 'full_batch' or "
            "'data_parallel', but got the value : x."
        ),
    ),
    (
        lambda n: n.dataset_strategy([(1, 8)]),
        InvalidTypeError,
        (
            "For 'AutoParallel.dataset_strategy', the argument 'config' must be str or tuple type, "
            "but got the type : <class 'list'>."
        ),
    ),
    (
        lambda n: n.dataset_strategy(([1],)),
        InvalidTypeError,
        (
            "For 'AutoParallel.dataset_strategy', the element of argument 'config' must be tuple or "
            "Layout, but got the type : <class 'list'> ."
        ),
    ),
    (
        lambda n: n.dataset_strategy(((1.0,),)),
        InvalidTypeError,
        (
            "For 'AutoParallel.dataset_strategy', the element of argument 'config' must be int type, "
            "but got the type : <class 'float'> ."
        ),
    ),
    (
        lambda n: n.comm_fusion(1),
        InvalidTypeError,
        "The parameter '1' must be <class 'dict'>, but got <class 'int'>.",
    ),
    *(
        (
            lambda n, name=name: getattr(n, name)(1),
            InvalidTypeError,
            "the argument 'file_path' must be str, but got the type : <class 'int'> .",
        )
        for name in (
            "load_param_strategy_file",
            "load_operator_strategy_file",
            "set_group_ckpt_save_file",
            "dump_local_norm",
            "transformer_opt",
        )
    ),
    (
        lambda n: n.save_operator_strategy_file("rel.json"),
        InvalidKeyError,
        "the argument 'file_path' must be an absolute path.",
    ),
    (
        lambda n: n.save_operator_strategy_file("/x.ckpt"),
        InvalidKeyError,
        "File type must be .json",
    ),
]


@pytest.mark.parametrize(("wrong", "error", "text"), RECORDED, ids=range(len(RECORDED)))
def test_recorded_answers_of_mindspore(wrong: Any, error: type[Exception], text: str) -> None:
    target = net()
    before = target.options
    with pytest.raises(error) as caught:
        wrong(target)
    assert caught.value.args[0].rstrip(".") == text.rstrip(".")
    assert target.options == before


def test_unknown_modes() -> None:
    with pytest.raises(InvalidValueError, match="the argument 'parallel_mode' must be one of"):
        AutoParallel(loss, parallel_mode="data_parallel")
    assert ParallelMode.MODE_LIST[-1] == ParallelMode.AUTO_PARALLEL


def test_options_are_in_force_while_it_is_traced_and_nowhere_else() -> None:
    seen = []

    def spying(w: Any, x: Any) -> Any:
        seen.append(get_auto_parallel_context("parallel_mode"))
        return loss(w, x)

    px.set_auto_parallel_context(parallel_mode="data_parallel")
    try:
        spy = AutoParallel(spying, devices=["CPU:0", "CPU:1"])
        spy.dataset_strategy("full_batch")
        assert float(spy(*ARGS)) == 256.0
        assert set(seen) == {"semi_auto_parallel"}
        assert get_auto_parallel_context("parallel_mode") == "data_parallel"
        assert get_auto_parallel_context("dataset_strategy") == "data_parallel"
        assert not spy.program.arguments[1].spec
    finally:
        px.reset_auto_parallel_context()


@pytest.mark.parametrize("mode", ["recursive_programming", "sharding_propagation"])
def test_methods_set_what_they_say(mode: str, tmp_path: Any) -> None:
    target = net(parallel_mode=mode)
    target.enable_fp32_communication()
    target.enable_gradients_mean()
    target.disable_gradient_fp32_sync()
    target.disable_loss_repeated_mean()
    target.disable_strategy_file_only_for_trainable_params()
    target.print_local_norm()
    target.dump_local_norm(str(tmp_path))
    target.enable_device_local_norm()
    target.comm_fusion({"openstate": False})
    target.transformer_opt("speed_up.json")  # a hint
    found = target.options
    on = (found.force_fp32_communication, found.gradients_mean, found.enable_alltoall)
    assert (*on, found.dump_local_norm, found.dump_device_local_norm) == (True,) * 5
    off = (found.gradient_fp32_sync, found.loss_repeated_mean, found.only_trainable_params)
    assert (*off, found.comm_fusion["openstate"]) == (False,) * 4
    assert found.dump_local_norm_path == str(tmp_path)
    assert target.get_pipeline_stages() == 1


def test_files_and_creation(tmp_path: Any) -> None:
    target = net(parallel_mode="dynamic_programming")
    path = str(tmp_path / "strategy.json")
    target.save_param_strategy_file(path)
    target.disable_strategy_file_only_for_trainable_params()
    target.set_group_ckpt_save_file(str(tmp_path / "groups.json"))
    target.no_init_parameters_in_compile()
    program = target.compile(*ARGS)
    made = program.create(lambda: jnp.ones((4, 2)))
    assert made.sharding == program.arguments[0]
    value, gradient = target.value_and_grad(made, ARGS[1])
    assert float(value) == 256.0
    assert gradient.sharding == made.sharding
    again = net(parallel_mode="dynamic_programming")
    again.load_operator_strategy_file(path)
    again(*ARGS)
    assert again.program.plan == program.plan


def test_stages_are_refused_when_they_are_used() -> None:
    target = net()
    target.pipeline(2)
    with pytest.raises(UnsupportedError, match="pipeline_stages=2"):
        target(*ARGS)
    with pytest.raises(InvalidValueError, match="no program before the first call"):
        _ = target.program


def test_layouts_spread_from_the_batch_if_nothing_else_is_given() -> None:
    target = net(parallel_mode="sharding_propagation")
    assert float(target(*ARGS)) == 256.0
    assert tuple(target.program.arguments[1].spec) == ("x",)
