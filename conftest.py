"""All tests run on eight logical CPU devices, made the way a user would make them."""

import signal

from hypothesis import settings

import phalanx as px

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
