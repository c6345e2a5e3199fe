"""Hardware profiles, and fitting them to measured times."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

import phalanx as px
from phalanx.parallel.hardware import PROFILES, Measurements, fit, fit_link, fit_rate, profile

SIZES = [1e3, 1e5, 1e6, 1e7]


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_are_sensible(name: str) -> None:
    found = profile(name.lower())
    assert found.name == name
    assert found.device.rate("float32") <= found.device.rate("bfloat16") or name == "CPU"
    assert found.outer.beta >= found.inner.beta
    assert found.device.rate("int8") == min(map(found.device.rate, found.device.flops))


def test_topologies_of_profiles() -> None:
    assert (profile("A100").topology(16).hosts, profile("A100").topology(4).hosts) == (2, 1)
    with pytest.raises(px.errors.InvalidValueError, match="Received: 12 devices"):
        profile("A100").topology(12)
    with pytest.raises(px.errors.NotFoundError, match="Received: 'B9'"):
        profile("B9")


@given(st.floats(0, 1e-3), st.floats(1e-13, 1e-8), st.integers(2, 16))
def test_fitting_finds_the_link_that_made_the_times(alpha: float, beta: float, devices: int) -> None:
    messages = 2 * (devices - 1)
    times = [messages * alpha + beta * size for size in SIZES]
    link = fit_link(SIZES, times, messages=messages)
    for size, seconds in zip(SIZES, times, strict=True):
        assert messages * link.alpha + link.beta * size == pytest.approx(seconds, rel=1e-6)


def test_fitting_hardware() -> None:
    products = [(n, 1e-5 + n / 1e12) for n in (1e8, 1e9, 1e10)]
    copies = [(n, n / 1e10) for n in (1e6, 1e7)]
    sums = [(n, 14 * 1e-5 + 2 * 7 / 8 * n * 1e-9) for n in (1e4, 1e6, 1e7)]
    found = fit(
        Measurements("here", {"float32": products}, copies, sums, 8, 1e9, {"reduce_scatter": False})
    )
    assert found.device.rate("float32") == pytest.approx(1e12)
    assert found.device.bandwidth == pytest.approx(1e10)
    assert (found.inner.alpha, found.inner.beta) == (pytest.approx(1e-5), pytest.approx(1e-9))
    assert not found.reduce_scatter


def test_noise_never_makes_a_link_faster_than_nothing() -> None:
    link = fit_link([1e3, 1e6], [2e-3, 1e-3])  # the larger message was faster
    assert link.alpha >= 0
    assert link.beta == 0
    with pytest.raises(px.errors.InvalidValueError, match="Larger work must take longer"):
        fit_rate([1e3, 1e6], [2e-3, 1e-3])
    with pytest.raises(px.errors.InvalidValueError, match="at least two sizes"):
        fit_rate([1e3], [2e-3])
