"""All tests run on eight logical CPU devices, made the way a user would make them."""

import os
import signal
from pathlib import Path

from hypothesis import settings

# What one of the many processes has compiled, the others find here. JAX reads this when it is imported.
CACHE = Path(__file__).parent / ".cache" / "programs"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

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
