"""Partitioners: the recorded answers of tf.distribute, the limits, and the errors."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from phalanx.errors import PhalanxError
from phalanx.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

ALL = [FixedShardsPartitioner(2), MinSizePartitioner(4, 8), MaxSizePartitioner(8)]


# -- what tf.distribute answers --------------------------------------------------------------------


@pytest.mark.parametrize(("axis", "expected"), [(0, [2, 1]), (1, [1, 2])])
def test_fixed_shards_on_each_axis(axis, expected):
    assert FixedShardsPartitioner(num_shards=2)((10, 3), jnp.float32, axis=axis) == expected


@pytest.mark.parametrize(("max_shards", "expected"), [(4, [4, 1]), (8, [5, 1])])
def test_min_size_up_to_max_shards(max_shards, expected):
    partitioner = MinSizePartitioner(min_shard_bytes=24, max_shards=max_shards)
    assert partitioner((10, 3), jnp.float32, axis=0) == expected


@pytest.mark.parametrize(
    ("arguments", "shape", "expected"),
    [
        ((4, 2), (6, 1), [2, 1]),
        ((4, 10), (6, 1), [6, 1]),
        ((), (1000, 1000), [1, 1]),
        ((25, 8), (10, 3), [5, 1]),  # 5 shards of 24 bytes: smaller than the minimum
        ((24, 8), (10, 3), [5, 1]),
        ((1000, 8), (10, 3), [1, 1]),
    ],
)
def test_min_size(arguments, shape, expected):
    assert MinSizePartitioner(*arguments)(shape, jnp.float32) == expected


@pytest.mark.parametrize(
    ("arguments", "shape", "expected"),
    [
        ((4,), (6, 1), [6, 1]),
        ((4, 2), (6, 1), [2, 1]),
        ((1024,), (6, 1), [1, 1]),
        ((10,), (6, 1), [3, 1]),
        ((8,), (10, 3), [10, 1]),  # a row of 12 bytes does not fit, so one row per shard
        ((24,), (10, 3), [5, 1]),
        ((30,), (10, 3), [5, 1]),
    ],
)
def test_max_size(arguments, shape, expected):
    assert MaxSizePartitioner(*arguments)(shape, jnp.float32) == expected


def test_max_shards_of_zero_is_no_limit():
    assert MaxSizePartitioner(4, max_shards=0)((6, 1), jnp.float32) == [6, 1]


@pytest.mark.parametrize(
    ("shape", "axis", "fixed", "min_size", "max_size"),
    [
        ((3, 6, 2), 0, [2, 1, 1], [3, 1, 1], [3, 1, 1]),
        ((3, 6, 2), 1, [1, 2, 1], [1, 6, 1], [1, 6, 1]),
        ((3, 6, 2), -1, [1, 1, 2], [1, 1, 2], [1, 1, 2]),
        ((3, 6, 2), -2, [1, 2, 1], [1, 6, 1], [1, 6, 1]),
        ((7, 5), 0, [2, 1], [7, 1], [7, 1]),
        ((7, 5), 1, [1, 2], [1, 5], [1, 5]),
        ((6,), 0, [2], [6], [3]),
        ((1,), 0, [1], [1], [1]),
        # Empty variables. tf.distribute agrees on the first two, and divides by zero on the last.
        ((0, 3), 0, [0, 1], [1, 1], [1, 1]),
        ((0, 3), 1, [1, 2], [1, 1], [1, 1]),
        ((6, 0), 0, [2, 1], [1, 1], [1, 1]),
    ],
)
def test_each_axis_of_each_shape(shape, axis, fixed, min_size, max_size):
    answers = [partitioner(shape, jnp.float32, axis) for partitioner in ALL]
    assert answers == [fixed, min_size, max_size]


@pytest.mark.parametrize(
    ("dtype", "min_size", "max_size"),
    [
        (jnp.float32, [6, 1], [6, 1]),
        ("float32", [6, 1], [6, 1]),
        (np.dtype("float64"), [6, 1], [6, 1]),
        (jnp.bfloat16, [6, 1], [3, 1]),
        ("bfloat16", [6, 1], [3, 1]),
        (np.float16, [6, 1], [3, 1]),
        (jnp.bool_, [3, 1], [2, 1]),
        (bool, [3, 1], [2, 1]),
        (jnp.complex64, [6, 1], [6, 1]),
        (str, [6, 1], [6, 1]),
    ],
)
def test_size_follows_the_dtype(dtype, min_size, max_size):
    assert MinSizePartitioner(4, 8)((6, 2), dtype) == min_size
    assert MaxSizePartitioner(8)((6, 2), dtype) == max_size


@pytest.mark.parametrize("dtype", [str, bytes, object, "string", "str", np.str_, "S3", np.dtype("U7")])
def test_strings_count_as_bytes_per_string(dtype):
    assert MinSizePartitioner(16, 8, bytes_per_string=8)((6, 1), dtype) == [3, 1]
    assert MaxSizePartitioner(16, bytes_per_string=8)((6, 1), dtype) == [3, 1]
    assert MaxSizePartitioner(16)((6, 1), dtype) == [6, 1]


def test_python_float_is_as_wide_as_a_jax_float():
    assert MaxSizePartitioner(40)((100, 1), float) == [10, 1]
    assert MaxSizePartitioner(40)((100, 1), np.float64) == [20, 1]


@pytest.mark.parametrize("shape", [(10, 3), [10, 3], np.array([10, 3]), iter([10, 3])])
def test_any_sequence_of_sizes_is_a_shape(shape):
    assert FixedShardsPartitioner(2)(shape, jnp.float32) == [2, 1]


def test_fixed_shards_needs_to_know_only_the_size_it_splits():
    assert FixedShardsPartitioner(2)((3, None), jnp.float32) == [2, 1]


# -- properties ------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 50), min_size=1, max_size=4)
POSITIVE = st.integers(1, 500)
PARTITIONERS = st.one_of(
    st.builds(FixedShardsPartitioner, POSITIVE),
    st.builds(MinSizePartitioner, POSITIVE, POSITIVE),
    st.builds(MaxSizePartitioner, POSITIVE, st.none() | POSITIVE),
)


@st.composite
def shapes_and_axes(draw):
    shape = draw(SHAPES)
    return shape, draw(st.integers(-len(shape), len(shape) - 1))


@given(PARTITIONERS, shapes_and_axes())
def test_only_the_axis_is_split_and_never_into_more_shards_than_rows(partitioner, shape_and_axis):
    shape, axis = shape_and_axis
    shards = partitioner(shape, jnp.float32, axis)
    assert len(shards) == len(shape)
    assert 1 <= shards[axis] <= shape[axis]
    shards[axis] = 1
    assert shards == [1] * len(shape)


@given(PARTITIONERS, shapes_and_axes())
def test_negative_axes_count_from_the_end(partitioner, shape_and_axis):
    shape, axis = shape_and_axis
    assert partitioner(shape, "float32", axis) == partitioner(shape, "float32", axis % len(shape))


@given(POSITIVE, st.none() | POSITIVE, SHAPES)
def test_max_size_takes_the_fewest_shards_that_fit(max_bytes, max_shards, shape):
    shards = MaxSizePartitioner(max_bytes, max_shards)(shape, jnp.float32)[0]
    row_bytes = 4 * int(np.prod(shape[1:]))

    def largest_shard(count):
        return -(-shape[0] // count) * row_bytes

    if shards > 1:  # one shard fewer would have been too large
        assert largest_shard(shards - 1) > max_bytes
    if row_bytes <= max_bytes and shards != max_shards:
        assert largest_shard(shards) <= max_bytes


@given(POSITIVE, POSITIVE, SHAPES)
def test_min_size_stops_at_the_first_limit_it_meets(min_bytes, max_shards, shape):
    shards = MinSizePartitioner(min_bytes, max_shards)(shape, jnp.float32)[0]
    total = 4 * int(np.prod(shape))
    assert shards <= max_shards
    assert (shards - 1) * min_bytes < total  # all shards but one can have the minimum
    if shards < min(max_shards, shape[0]):
        assert shards * min_bytes >= total  # another shard would not be needed


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        # A deliberate difference: tf.distribute lets 0 pass and answers [0, 1].
        (lambda: FixedShardsPartitioner(0), "num_shards"),
        (lambda: FixedShardsPartitioner(-1), "num_shards"),
        (lambda: MinSizePartitioner(min_shard_bytes=0), "min_shard_bytes"),
        (lambda: MinSizePartitioner(max_shards=0), "max_shards"),
        (lambda: MinSizePartitioner(bytes_per_string=0), "bytes_per_string"),
        (lambda: MaxSizePartitioner(max_shard_bytes=0), "max_shard_bytes"),
        (lambda: MaxSizePartitioner(4, max_shards=-1), "max_shards"),
        (lambda: MaxSizePartitioner(4, bytes_per_string=0), "bytes_per_string"),
    ],
)
def test_limits_must_be_positive(make, argument):
    with pytest.raises(ValueError, match=rf"`{argument}` .* Received: (0|-1)$") as caught:
        make()
    assert isinstance(caught.value, PhalanxError)


@pytest.mark.parametrize("value", ["2", None, 2.5, float("inf"), float("nan"), [2]])
def test_limits_must_be_whole_numbers(value):
    for make in (FixedShardsPartitioner, MinSizePartitioner, MaxSizePartitioner):
        with pytest.raises(TypeError, match=r"whole number. Received: ") as caught:
            make(value)
        assert isinstance(caught.value, PhalanxError)


def test_a_float_that_is_whole_is_accepted():
    assert MaxSizePartitioner(1e6) == MaxSizePartitioner(1_000_000)


@pytest.mark.parametrize("axis", [2, 5, -3])
@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_axis_outside_the_shape(partitioner, axis):
    # tf.distribute raises ValueError from MinSizePartitioner and IndexError from the others.
    with pytest.raises(ValueError, match=rf"from -2 to 1\. Received: axis={axis}, shape="):
        partitioner((6, 1), jnp.float32, axis=axis)
    with pytest.raises(IndexError):
        partitioner((6, 1), jnp.float32, axis=axis)
    with pytest.raises(PhalanxError):
        partitioner((6, 1), jnp.float32, axis=axis)


@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_a_scalar_cannot_be_split(partitioner):
    with pytest.raises(IndexError, match="A scalar cannot be split"):
        partitioner((), jnp.float32)


@pytest.mark.parametrize("shape", [(None, 3), None, 6, (2.5, 3)])
@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_sizes_must_be_known(partitioner, shape):
    # tf.distribute raises ValueError from MaxSizePartitioner and TypeError from the others.
    for builtin in (TypeError, ValueError, PhalanxError):
        with pytest.raises(builtin, match=r"for example \(10, 3\)\. Received: "):
            partitioner(shape, jnp.float32)


@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_sizes_must_not_be_negative(partitioner):
    with pytest.raises(ValueError, match=r"0 or more. Received: shape=\(-1, 3\)"):
        partitioner((-1, 3), jnp.float32)


@pytest.mark.parametrize("axis", [None, 1.0, "0"])
@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_axis_must_be_an_int(partitioner, axis):
    with pytest.raises(TypeError, match="`axis` must be an int") as caught:
        partitioner((6, 1), jnp.float32, axis)
    assert isinstance(caught.value, PhalanxError)


@pytest.mark.parametrize("dtype", [None, "nope", 5])
@pytest.mark.parametrize("partitioner", ALL[1:], ids=repr)
def test_dtype_must_be_a_dtype(partitioner, dtype):
    with pytest.raises(TypeError, match=r"`dtype` must be a dtype.* Received: ") as caught:
        partitioner((6, 1), dtype)
    assert isinstance(caught.value, PhalanxError)


def test_the_base_class_has_no_rule():
    with pytest.raises(NotImplementedError, match="Received: Partitioner") as caught:
        Partitioner()((6, 1), jnp.float32)
    assert isinstance(caught.value, PhalanxError)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_partitioners_are_values(partitioner):
    assert isinstance(partitioner, Partitioner)
    copy = dataclasses.replace(partitioner)
    assert copy == partitioner
    assert hash(copy) == hash(partitioner)
    with pytest.raises(dataclasses.FrozenInstanceError):
        partitioner.max_shards = 3


def test_defaults():
    assert MinSizePartitioner() == MinSizePartitioner(262144, 1, 16)
    assert MaxSizePartitioner(1) == MaxSizePartitioner(1, None, 16)
