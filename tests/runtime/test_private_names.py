"""Private names of JAX: without one of them, the package imports, and says what no longer works."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from phalanx.errors import UnimplementedError
from phalanx.runtime import compat, private_names

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("without_private_names.py")
PAGE = ROOT / "docs" / "design" / "versions.md"

XLA, PXLA, JAXLIB = "jax._src.xla_bridge:", "jax._src.interpreters.pxla:", "jaxlib._jax:"
CONFIG, MESH = "jax._src.config:", "jax._src.mesh:"
BY_JAX = ("jax._src.core:pytype_aval_mappings",)  # without it, JAX does not even ask Phalanx

OPTIONAL: dict[tuple[str, ...], str] = {
    # a name, with all its homes: a feature that uses it, and works without it
    (f"{XLA}backends_are_initialized",): "backends",
    ("jax._src.array:ArrayImpl",): "arrays",
    ("jax._src.array:ArrayImpl._arrays",): "arrays",
    ("jax._src.array:ArrayImpl._fully_replicated_shard",): "arrays",
    (f"{JAXLIB}array_result_handler",): "arrays",
    (f"{PXLA}batched_device_put",): "arrays",
    ("jax.interpreters.partial_eval:dce_jaxpr",): "reading",
    (f"{CONFIG}config_states",): "threads",
    (f"{CONFIG}config_ext.unset",): "threads",
    (f"{CONFIG}mesh_context_manager",): "threads",
    (f"{MESH}abstract_mesh_context_manager", f"{CONFIG}abstract_mesh_context_manager"): "threads",
    (f"{MESH}device_context", f"{CONFIG}device_context"): "threads",
    (f"{CONFIG}compute_on_context_manager",): "threads",
    (f"{CONFIG}xla_metadata_context_manager",): "threads",
    ("jax._src.core:trace_ctx",): "traced_threads",
}
NEEDED: dict[tuple[str, ...], str] = {
    # a name, with all its homes: the feature that says that it is missing
    (f"{XLA}_backend_factories",): "join",
    (f"{XLA}make_cpu_client",): "join",
    ("jax._src.distributed:global_state",): "join",
    (f"{JAXLIB}get_distributed_runtime_client",): "join",
    (f"{JAXLIB}make_gloo_tcp_collectives",): "join",
    (f"{JAXLIB}get_distributed_runtime_service",): "start",
    ("jax.extend.backend:backends",): "end",
    ("jax._src.api:clean_up",): "end",
    ("jax.extend.backend:clear_backends",): "stay",
    ("jax.extend.core:find_top_trace", "jax._src.core:unsafe_get_current_trace"): "tracing",
    ("jax.core:Tracer._trace",): "owning",
    BY_JAX: "passing",
    ("jax._src.dtypes:canonicalize_value_handlers",): "passing",
    (f"{PXLA}shard_arg_handlers",): "passing",
    ("jax.extend.core:Primitive",): "marking",
    ("jax.interpreters.ad:deflinear2",): "marking",
    ("jax.interpreters.batching:defvectorized",): "marking",
    ("jax.interpreters.mlir:register_lowering",): "marking",
    ("jax.extend.core:Literal",): "reading",
    ("jax.extend.core:jaxprs_in_params",): "reading",
    ("jax.extend.core:set_current_trace",): "traced_threads",
}


@pytest.fixture(scope="module")
def outcome() -> Any:
    """What the program found that hides the names, in a process of its own."""
    order = json.dumps([list(OPTIONAL.items()), list(NEEDED.items())])
    command = [sys.executable, "-W", "error", str(PROGRAM)]
    done = subprocess.run(
        command, check=False, input=order, capture_output=True, text=True, timeout=300
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_phalanx_trains_without_all_names_that_it_can_do_without(outcome: Any) -> None:
    assert outcome["trained"] == pytest.approx([16.0, 10.8, 0.2, 0.8])


def test_some_names_are_not_missed(outcome: Any) -> None:
    assert {homes[0]: outcome["problems"][homes[0]] for homes in OPTIONAL} == dict.fromkeys(
        homes[0] for homes in OPTIONAL
    )


@pytest.mark.parametrize("homes", NEEDED, ids=lambda homes: homes[0])
def test_the_others_are_missed_where_they_are_used(outcome: Any, homes: tuple[str, ...]) -> None:
    message = outcome["problems"][homes[0]]
    assert message is not None
    if homes == BY_JAX:
        assert "is of type" in message
    else:
        assert f"needs {homes[0].replace(':', '.')}, which JAX" in message
        assert f"Received: JAX {jax.__version__}" in message


def test_every_name_is_hidden_once_and_on_the_page(outcome: Any) -> None:
    assert outcome["sought"] == sorted(home for homes in (*OPTIONAL, *NEEDED) for home in homes)
    page = PAGE.read_text()
    assert [name for name in outcome["sought"] if name.replace(":", ".") not in page] == []


def test_the_package_requires_the_versions_that_messages_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert private_names.REQUIREMENT in project["dependencies"]


def test_a_missing_name_fails_however_it_is_used() -> None:
    missing = private_names.find("Something", "jax._src.core:no_such_name", "no_such_module:name")
    for use in (
        missing,
        lambda: missing.attribute,
        lambda: missing["key"],
        lambda: "key" in missing,
        lambda: isinstance(1, missing),
        lambda: list(missing),
        lambda: private_names.need(len, missing),
    ):
        with pytest.raises(UnimplementedError, match=r"Something needs jax\._src\.core\.no_such_name"):
            use()
    assert not hasattr(missing, "__wrapped__")


def test_the_parts_of_a_scan_are_counted_in_programs_of_any_version() -> None:
    def scan(a: jax.Array, x: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, row: ((carry[0] + a, row), row), (x[0], x[0]), x)

    *_, eqn = (
        e for e in jax.make_jaxpr(scan)(1.0, jax.numpy.zeros(3)).eqns if e.primitive.name == "scan"
    )
    assert compat.scan_counts(eqn) == (1, 2)
    with pytest.raises(UnimplementedError, match="the parameter num_consts of scan"):
        compat.scan_counts(SimpleNamespace(params={}))
