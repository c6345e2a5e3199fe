"""Arguments that make no sense are refused with our errors when a plan is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import phalanx as px

D = px.data.Dataset
R = D.range(6)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: R.padded_batch(2, 1.5), "padded_shapes"),
        (lambda: R.padded_batch(2, object()), "padded_shapes"),
        (lambda: D.from_tensor_slices([[1], [2, 3]]).padded_batch(2, 10**30), "padded_shapes"),
        (lambda: R.padded_batch(2, None, object()), "padding value"),
        (lambda: R.padded_batch(2, None, 10**30), "padding value"),
        (lambda: R.shuffle(np.array([1, 2])), "buffer_size"),
        (lambda: R.interleave(lambda x: R, np.array([1, 2])), "cycle_length"),
        (lambda: R.interleave(lambda x: R, 10**30), "cycle_length"),
        (lambda: R.take(10**30), "count"),
        (lambda: D.from_tensors(10**30), "Elements are made of"),
        (lambda: D.range(3, output_type="nonsense"), "output_type"),
        (lambda: D.sample_from_datasets(5), "list of datasets"),  # type: ignore[arg-type]
        (lambda: D.sample_from_datasets(R), "list of datasets"),  # type: ignore[arg-type]
        (lambda: D.choose_from_datasets(None, R), "list of datasets"),  # type: ignore[arg-type]
        (lambda: D.sample_from_datasets([R, R], weights="ab"), "weights"),
        (lambda: D.sample_from_datasets([R], rerandomize_each_iteration=3), "rerandomize"),  # type: ignore[arg-type]
        (lambda: D.from_generator(list, output_types=np.int32, output_shapes=3), "output_shapes"),
        (lambda: D.from_generator(list, output_types=(np.int32,), output_shapes=[()]), "output_shapes"),
        (lambda: D.from_generator(list, output_types="nonsense"), "output_types"),
    ],
)
def test_bad_arguments_are_refused_at_once(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(px.PhalanxError, match=match):
        make()


def test_endlessly_many_parallel_calls_do_not_need_endlessly_many_threads() -> None:
    assert [int(x) for x in R.map(lambda x: x, num_parallel_calls=10**9)] == list(range(6))


def test_seeds_may_have_any_size() -> None:
    assert len(list(R.shuffle(6, seed=10**30))) == 6
