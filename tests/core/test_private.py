"""Private names of JAX: without one of them, the package imports, and says what no longer works."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import pytest

from phalanx.core import private
from phalanx.core.errors import UnimplementedError

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("without_private_names.py")
PAGE = ROOT / "docs" / "design" / "versions.md"

XLA, PXLA, JAXLIB = "jax._src.xla_bridge:", "jax._src.interpreters.pxla:", "jaxlib._jax:"
CONFIG, MESH = "jax._src.config:", "jax._src.mesh:"

WITHOUT: dict[tuple[str, ...], set[str]] = {
    # what is hidden, with all its homes: the features that then refuse to work
    (f"{XLA}backends_are_initialized",): set(),
    (f"{XLA}_backend_factories",): {"join"},
    (f"{XLA}make_cpu_client",): {"join"},
    (f"{XLA}_backends",): {"abandon"},
    ("jax._src.api:clean_up",): {"abandon"},
    ("jax._src.distributed:global_state",): {"join", "publish"},
    (f"{JAXLIB}get_distributed_runtime_client",): {"join"},
    (f"{JAXLIB}make_gloo_tcp_collectives",): {"join"},
    (f"{JAXLIB}get_distributed_runtime_service",): {"start"},
    ("jax._src.array:ArrayImpl",): set(),
    ("jax._src.array:ArrayImpl._arrays",): set(),
    (f"{PXLA}batched_device_put",): set(),
    ("jax.extend.core:find_top_trace", "jax._src.core:unsafe_get_current_trace"): {
        "tracing",
        "owning",
        "threads",
        "traced_threads",
    },
    ("jax.core:Tracer._trace",): {"owning"},
    ("jax.interpreters.ad:JVPTrace",): {"tracing"},
    ("jax._src.core:pytype_aval_mappings",): set(),
    ("jax._src.dtypes:canonicalize_value_handlers",): {"passing"},
    (f"{PXLA}shard_arg_handlers",): {"passing"},
    ("jax.extend.core:Primitive",): {"marking"},
    ("jax.interpreters.ad:deflinear2",): {"marking"},
    ("jax.interpreters.batching:defvectorized",): {"marking"},
    ("jax.interpreters.mlir:register_lowering",): {"marking"},
    ("jax.interpreters.partial_eval:dce_jaxpr",): set(),
    ("jax.extend.core:Literal",): {"reading"},
    ("jax.extend.core:jaxprs_in_params",): {"reading"},
    (f"{CONFIG}config_states",): set(),
    (f"{CONFIG}config_ext.unset",): set(),
    ("jax.extend.core:set_current_trace",): {"traced_threads"},
    ("jax._src.core:trace_ctx",): set(),
    (f"{CONFIG}mesh_context_manager",): set(),
    (f"{MESH}abstract_mesh_context_manager", f"{CONFIG}abstract_mesh_context_manager"): set(),
    (f"{MESH}device_context", f"{CONFIG}device_context"): set(),
    (f"{CONFIG}compute_on_context_manager",): set(),
    (f"{CONFIG}xla_metadata_context_manager",): set(),
}


@pytest.fixture(scope="module")
def outcome() -> Any:
    """What the program found that hides the names, in a process of its own."""
    names = {homes[0]: homes for homes in WITHOUT}
    public = [homes[0] for homes, failing in WITHOUT.items() if not failing]
    command = [sys.executable, "-W", "error", str(PROGRAM), json.dumps(names), json.dumps(public)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_phalanx_trains_without_all_names_that_have_a_substitute(outcome: Any) -> None:
    assert outcome["trained"] == pytest.approx([16.0, 11.0, 0.2, 0.8])


@pytest.mark.parametrize("homes", WITHOUT, ids=lambda homes: homes[0])
def test_a_missing_name_takes_away_one_feature(outcome: Any, homes: tuple[str, ...]) -> None:
    failed = outcome["failed"][homes[0]]
    assert set(failed) == WITHOUT[homes]
    for message in failed.values():
        assert homes[0].replace(":", ".") in message
        assert f"Received: JAX {jax.__version__}" in message


def test_every_name_is_hidden_once_and_on_the_page(outcome: Any) -> None:
    assert outcome["sought"] == sorted(home for homes in WITHOUT for home in homes)
    page = PAGE.read_text()
    assert [name for name in outcome["sought"] if name.replace(":", ".") not in page] == []


def test_the_package_requires_the_versions_that_messages_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert private.REQUIREMENT in project["dependencies"]


def test_a_missing_name_fails_however_it_is_used() -> None:
    missing = private.find("Something", "jax._src.core:no_such_name", "no_such_module:name")
    for use in (
        missing,
        lambda: missing.attribute,
        lambda: missing["key"],
        lambda: "key" in missing,
        lambda: isinstance(1, missing),
        lambda: list(missing),
        lambda: private.need(len, missing),
    ):
        with pytest.raises(UnimplementedError, match=r"Something needs jax\._src\.core\.no_such_name"):
            use()
    assert not hasattr(missing, "__wrapped__")
