"""All tests run on eight logical CPU devices, made the way a user would make them."""

import gc
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

# What one of the many processes has compiled, the others find: modules of Python, and programs of JAX.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
CACHE = Path(__file__).parent / ".cache" / "programs"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Most programs run once or twice here, so compiling takes longer than running. XLA therefore makes code
# without optimizing it much; what it does to whole programs, such as partitioning, is as users have it.
# With JAX_DISABLE_MOST_OPTIMIZATIONS=0, as in `make soak`, the code is that of users too.
HURRIED = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if (
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    and HURRIED not in os.environ.get("XLA_FLAGS", "")  # given by the process that starts the others
    and version("jaxlib").startswith("0.10.")  # XLA ends processes with flags that it does not know
):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {HURRIED}".strip()

os.environ.setdefault(
    "KERAS_BACKEND", "jax"
)  # read when Keras is imported, which examples may do first

import phalanx as px  # noqa: E402

# A test may take longer on a busy machine. On CI, Hypothesis draws the same examples every time.
settings.register_profile(
    "unhurried", settings.get_profile(settings.get_current_profile_name()), deadline=None
)
settings.load_profile("unhurried")

# A shell that starts the tests in the background lets them ignore Ctrl-C, which some of them test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

px.config.set_logical_device_configuration(
    px.config.list_physical_devices("CPU")[0], [px.config.LogicalDeviceConfiguration()] * 8
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that differ between processes of pytest, which could not divide the tests then."""
    addresses = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addresses:
        raise pytest.UsageError(f"Give these cases ids without addresses: {addresses}")


def pytest_collection_finish() -> None:
    """Leave the modules and ten thousand tests alone when garbage is looked for."""
    gc.collect()
    gc.freeze()
