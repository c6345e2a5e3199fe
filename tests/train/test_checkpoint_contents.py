"""What a checkpoint holds: pytrees, keys, objects with a state, and values that do not fit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import phalanx as px
from phalanx.core.regions import Box, Flat, assemble, cut, region_of
from phalanx.train.checkpoints import directories, files
from phalanx.train.checkpoints.restoring import Restoring


class Counter:
    """An object that says itself what its state is."""

    def __init__(self) -> None:
        self.count, self.noise = 0, np.zeros(2)

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "noise": self.noise, "seen": [1, {"key": jax.random.key(3)}]}

    def restore(self, state: dict[str, Any]) -> None:
        self.count, self.noise, self.seen = state["count"], state["noise"], state["seen"]


class Kept:
    """An object whose state is any value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state(self) -> Any:
        return self.value

    def restore(self, state: Any) -> None:
        self.value = state


class Layer:
    """A layer that can be called, as most are."""

    def __init__(self) -> None:
        self.w = px.Variable([1.0, 2.0])
        self.size = 2

    def __call__(self, x: Any) -> Any:
        return x @ self.w


class Pair(NamedTuple):
    a: Any
    b: Any


def test_pytrees_keys_and_objects_with_a_state(tmp_path: Path) -> None:
    params = {"w": jnp.ones(2), "deep": (np.arange(3), Pair(jnp.zeros(1), 5))}
    state = optax.adam(0.1).init({"w": jnp.ones(2)})
    layer, counter = Layer(), Counter()
    layer.w.assign([5.0, 6.0])
    counter.count, counter.noise = 4, np.array([1.0, 2.0])
    checkpoint = px.train.Checkpoint(
        params=params, state=state, key=jax.random.key(7), layers=[layer], counter=counter
    )
    path = checkpoint.save(str(tmp_path / "ckpt"))

    other = px.train.Checkpoint(
        params={"w": jnp.zeros(2), "deep": (np.zeros(3, int), Pair(jnp.ones(1), 0))},
        state=jax.tree.map(lambda x: x + 1, state),
        key=jax.random.key(0),
        layers=[Layer()],
        counter=Counter(),
    )
    before = other.params
    other.restore(path).assert_consumed().assert_nontrivial_match()
    assert other.params is before  # a dict is changed, a tuple made anew
    assert other.params["w"].tolist() == [1.0, 1.0]
    assert isinstance(other.params["deep"][0], np.ndarray)
    assert other.params["deep"][0].tolist() == [0, 1, 2]
    assert other.params["deep"][1] == Pair(jnp.zeros(1), 5)
    jax.tree.map(np.testing.assert_array_equal, other.state, state)
    assert type(other.state[0]) is type(state[0])
    assert (jax.random.key_data(other.key) == jax.random.key_data(jax.random.key(7))).all()
    assert other.layers[0].w.numpy().tolist() == [5.0, 6.0]
    assert (other.counter.count, other.counter.noise.tolist()) == (4, [1.0, 2.0])
    assert jax.random.key_data(other.counter.seen[1]["key"]).tolist() == [0, 3]


def test_modules_of_equinox_and_flax(tmp_path: Path) -> None:
    model, linear = eqx.nn.Linear(2, 3, key=jax.random.key(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    path = px.train.Checkpoint(eqx=model, nnx=linear).write(str(tmp_path / "x"))
    shared = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    kernel = shared.kernel
    other = px.train.Checkpoint(eqx=eqx.nn.Linear(2, 3, key=jax.random.key(1)), nnx=shared)
    other.restore(path).assert_consumed()
    np.testing.assert_array_equal(other.eqx.weight, model.weight)
    np.testing.assert_array_equal(kernel[...], linear.kernel[...])
    assert other.nnx is shared


class Noise(nnx.Module):
    """A module that keeps its nnx.Rngs, which gives a stream of keys for any name, `state` too."""

    def __init__(self, seed: int) -> None:
        self.rngs = nnx.Rngs(seed)

    def __call__(self) -> jax.Array:
        return jax.random.normal(self.rngs.noise(), (3,))


def test_the_keys_of_flax_go_on_where_they_were(tmp_path: Path) -> None:
    model, other = Noise(0), Noise(1)
    model()
    path = px.train.Checkpoint(model=model).write(str(tmp_path / "x"))
    px.train.Checkpoint(model=other).restore(path).assert_consumed()
    np.testing.assert_array_equal(other(), model())


def test_a_new_value_of_an_attribute_is_saved(tmp_path: Path) -> None:
    checkpoint = px.train.Checkpoint(params=jnp.zeros(2))
    checkpoint.params = jnp.ones(2)
    checkpoint.more = jnp.full(1, 3.0)  # as in TensorFlow, attributes count
    path = checkpoint.save(str(tmp_path / "ckpt"))
    assert px.train.load_variable(path, "params").tolist() == [1.0, 1.0]
    assert px.train.load_variable(path, "more").tolist() == [3.0]


def test_an_attribute_that_is_gone_is_not_saved(tmp_path: Path) -> None:
    checkpoint = px.train.Checkpoint(w=px.Variable(1.0), ema=px.Variable(2.0), nothing=None)
    assert list(checkpoint.things()) == ["w", "ema", "save_counter"]
    checkpoint.ema = None
    path = checkpoint.write(str(tmp_path / "a"))
    assert px.train.Checkpoint(w=px.Variable(0.0), ema=px.Variable(0.0)).restore(path).missing == [
        "ema"
    ]
    checkpoint.ema = px.Variable(3.0)
    del checkpoint.ema
    path = checkpoint.write(str(tmp_path / "b"))
    assert [name for name, _ in px.train.list_variables(path)] == ["save_counter", "w"]
    checkpoint.ema = px.Variable(4.0)
    assert list(checkpoint.things()) == ["w", "ema", "save_counter"]
    with pytest.raises(AttributeError):
        del checkpoint.other


def test_a_root_that_cannot_be_changed_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    saved = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    path = px.train.Checkpoint(saved).write(str(tmp_path / "x"))
    checkpoint = px.train.Checkpoint(eqx.nn.Linear(2, 3, key=jax.random.key(1)))
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(checkpoint.root.weight, saved.weight)
    checkpoint.root = eqx.tree_at(lambda x: x.bias, checkpoint.root, jnp.full(3, 5.0))
    path = checkpoint.write(str(tmp_path / "y"))
    assert px.train.load_variable(path, "bias").tolist() == [5.0, 5.0, 5.0]
    assert px.train.Checkpoint(w=px.Variable(1.0)).root is None


def test_what_does_not_fit_is_named_by_its_path(tmp_path: Path) -> None:
    path = px.train.Checkpoint(
        a={"b": px.Variable([1.0])}, c=px.Variable(1), d=jax.random.key(0), e=jnp.ones(1), n=[1]
    ).write(str(tmp_path / "x"))
    wrong = px.train.Checkpoint(
        a={"b": px.Variable([1.0, 2.0], name="bias")},
        c=px.Variable(1.0),
        d=jax.random.key(0, impl="rbg"),
        e=Counter(),
        n=[jnp.ones(1)],
    )
    with pytest.raises(ValueError, match="does not fit") as caught:
        wrong.restore(path)
    text = str(caught.value)
    assert "'a/b' (bias) is float32[2], and float32[1] in the checkpoint" in text
    assert "'c' is float32[], and int32[] in the checkpoint" in text
    assert "'d' is uint32[4] of keys (rbg), and uint32[2] of keys (fry)" in text or "'d' is" in text
    assert "'e' is a state, and an array in the checkpoint" in text
    assert "'n/0' is float32[1], and the number 1 in the checkpoint" in text


def test_states_and_values_that_cannot_be_saved(tmp_path: Path) -> None:
    class Strange(Counter):
        def state(self) -> Any:
            return self.strange

    thing = Strange()
    checkpoint = px.train.Checkpoint(thing=thing)
    for strange in ({1: 2}, {"x": object()}, {"$array": 1}):
        thing.strange = strange  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="thing"):
            checkpoint.write(str(tmp_path / "x"))
    replicas = px.MirroredStrategy(["CPU:0", "CPU:1"]).run(
        lambda: px.get_replica_context().replica_id_in_sync_group
    )
    with pytest.raises(TypeError, match="combine it by"):
        px.train.Checkpoint(x=[replicas])


def test_arrays_of_a_state_are_no_values_of_their_own(tmp_path: Path) -> None:
    for value in ({"deep": {"noise": jnp.ones(2)}}, jnp.ones(2)):
        path = px.train.Checkpoint(a={"kept": Kept(value), "n": 1}).write(str(tmp_path / "x"))
        assert px.train.Checkpoint(a={"n": 0}).restore(path).unused == ["a/kept"]


def test_the_index_is_gone_through_as_often_for_many_values_as_for_few(tmp_path: Path) -> None:
    class Counting(dict[str, Any]):
        times = 0

        def __iter__(self) -> Any:
            self.times += 1
            return super().__iter__()

    tree = {f"n{i}": float(i) for i in range(50)} | {f"a{i}": np.zeros(1) for i in range(50)}
    saved = files.Saved(Path(px.train.Checkpoint(tree).write(str(tmp_path / "x"))))
    saved.entries, saved.values = Counting(saved.entries), Counting(saved.values)
    assert len(Restoring(saved, {}).unused) == 101
    assert saved.entries.times + saved.values.times < 10


def test_an_array_over_devices_comes_back_in_any_layout(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    value = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    specs = [PartitionSpec(*s) for s in (("x", "y"), (None, "y"), ("x",), (), (("x", "y"),))]
    for i, spec in enumerate(specs):
        array = jax.device_put(value, NamedSharding(mesh, spec))
        path = px.train.Checkpoint(a=array).write(str(tmp_path / str(i)))
        for other in specs:
            like = jax.device_put(np.zeros_like(value), NamedSharding(mesh, other))
            checkpoint = px.train.Checkpoint(a=like)
            checkpoint.restore(path)
            np.testing.assert_array_equal(checkpoint.a, value)
            assert checkpoint.a.sharding == like.sharding


@settings(max_examples=60)
@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_regions_are_cut_out_of_parts(data: st.DataObject, shape: list[int]) -> None:
    """Whatever the parts of an array are, any region of it can be assembled."""
    whole = np.arange(np.prod(shape)).reshape(shape)

    def box() -> Any:
        ranges = [tuple(sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))) for n in shape]
        return region_of(ranges, tuple(shape))

    dim = data.draw(st.integers(0, len(shape) - 1))
    at = data.draw(st.integers(0, shape[dim]))
    halves = [[(0, n) for n in shape] for _ in range(2)]
    halves[0][dim], halves[1][dim] = (0, at), (at, shape[dim])
    regions = [region_of(half, tuple(shape)) for half in halves]
    if data.draw(st.booleans()):
        regions = [Flat(0, at), Flat(at, whole.size)] if at <= whole.size else regions
    parts = [(r, lambda r=r: cut(whole, r).reshape(-1)) for r in regions]
    wanted = box()
    found = assemble(tuple(shape), whole.dtype, wanted, parts)
    np.testing.assert_array_equal(found, cut(whole, wanted))
    assert isinstance(wanted, Box | Flat)


def test_a_reader_looks_into_a_checkpoint(tmp_path: Path) -> None:
    path = px.train.Checkpoint(w=px.Variable([1.0])).save(str(tmp_path / "ckpt"))
    reader = px.train.load_checkpoint(str(tmp_path))
    assert reader.get_variable_to_dtype_map()["w"] == np.float32
    with pytest.raises(px.errors.NotFoundError, match="no such array"):
        reader.get_tensor("b")
    data = Path(path, "arrays-00000").read_bytes()
    Path(path, "arrays-00000").write_bytes(bytes(len(data)))
    with pytest.raises(px.errors.DataLossError, match="save_counter"):
        reader.verify()


# -- the way to the disk ---------------------------------------------------------------------------


def test_an_asynchronous_save_has_the_values_of_its_moment(tmp_path: Path) -> None:
    w = px.Variable(jnp.zeros(1000))

    @px.function
    def step() -> None:
        w.assign_add(jnp.ones(1000))

    seen: list[Any] = []
    options = px.train.CheckpointOptions(
        enable_async=True, experimental_write_callbacks=[seen.append, lambda: seen.append(None)]
    )
    manager = px.train.CheckpointManager(px.train.Checkpoint(w=w), str(tmp_path), 3)
    paths = []
    for _ in range(3):
        step()
        paths.append(manager.save(options=options))
    for _ in range(5):
        step()
    manager.sync()
    assert [px.train.load_variable(str(path), "w")[7] for path in paths] == [1.0, 2.0, 3.0]
    assert manager.checkpoints == paths
    assert seen == [x for path in paths for x in (path, None)]


def test_an_object_that_refuses_its_state_leaves_variables_as_they_are(tmp_path: Path) -> None:
    v, counter = px.Variable(1.0), Counter()
    path = px.train.Checkpoint(a=v, nest={"part": 5}, other={"part": counter}).save(str(tmp_path / "x"))
    v.assign(2.0)
    data = iter(px.data.Dataset.range(3))
    with pytest.raises(ValueError, match="Received: 5"):
        px.train.Checkpoint(a=v, nest={"part": data}).restore(path)
    with pytest.raises(ValueError, match="'other/part' is a number, and a state in the checkpoint"):
        px.train.Checkpoint(a=v, other={"part": 5}).restore(path)
    assert float(v) == 2.0


def test_no_object_keeps_its_state_if_another_refuses(tmp_path: Path) -> None:
    class InPlace(Counter):
        def restore(self, state: dict[str, Any]) -> None:
            self.count = state["count"]
            self.noise[:] = state["noise"]
            if self.refuses:
                raise ValueError("It is full.")

        refuses = False

    first, second, v = InPlace(), InPlace(), px.Variable(1.0)
    data = iter(px.data.Dataset.range(9))
    objects = {"a": first, "data": data, "b": second, "v": v}
    first.count = second.count = next(data) + 5
    path = px.train.Checkpoint(**objects).write(str(tmp_path / "x"))
    first.count = second.count = 1
    first.noise[:] = second.noise[:] = 3.0
    assert next(data) == 1
    v.assign(2.0)
    second.refuses = True
    with pytest.raises(ValueError, match="It is full") as caught:
        px.train.Checkpoint(**objects).restore(path)
    assert (first.count, first.noise.tolist()) == (1, [3.0, 3.0])
    assert (second.count, second.noise.tolist()) == (1, [3.0, 3.0])
    assert (float(v), next(data)) == (2.0, 2)
    first_note, second_note = caught.value.__notes__
    assert first_note.startswith("It is 'b' of the checkpoint")
    assert "did not take its own state back: It is full." in second_note


def test_an_object_without_a_state_is_restored(tmp_path: Path) -> None:
    path = px.train.Checkpoint(a=Counter()).write(str(tmp_path / "x"))
    empty = Counter()
    del empty.noise
    px.train.Checkpoint(a=empty).restore(path).assert_consumed()
    assert empty.noise.tolist() == [0.0, 0.0]


def test_a_position_of_another_dataset_is_named(tmp_path: Path) -> None:
    strategy = px.MirroredStrategy()

    def positions(rows: int) -> Any:
        dataset = px.data.Dataset.range(rows).batch(4)
        return iter(strategy.experimental_distribute_dataset(dataset))

    long, short, equal = positions(40), positions(8), positions(40)
    for _ in range(10):
        next(long)
    path = px.train.Checkpoint(data={"train": long}).save(str(tmp_path / "x"))
    with pytest.raises(ValueError, match="after 10 batches, and this dataset has 2") as raised:
        px.train.Checkpoint(data={"train": short}).restore(path)
    assert raised.value.__notes__ == [f"It is 'data/train' of the checkpoint {path}."]
    assert next(short) is not None  # it is where it was
    px.train.Checkpoint(data={"train": equal}).restore(path).assert_consumed()
    assert next(equal, None) is None


def test_a_checkpoint_is_restored_under_a_mesh_of_the_users(tmp_path: Path) -> None:
    strategy = px.MirroredStrategy()
    with strategy.scope():
        v = px.Variable(jnp.arange(4.0))
    checkpoint = px.train.Checkpoint(v=v, key=jax.random.key(3))
    path = checkpoint.save(str(tmp_path / "x"))
    v.assign(jnp.zeros(4))
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    with jax.set_mesh(mesh), strategy.scope():
        checkpoint.restore(path).assert_consumed()
        again = checkpoint.save(str(tmp_path / "y"))
    assert v.numpy().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert px.train.load_variable(again, "v").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_arrays_may_be_donated_while_they_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of JAX give their parameters to the next step, which overwrites them."""
    gate, begin = threading.Event(), directories.begin

    def when_donated(path: Path) -> Path:
        gate.wait(60)
        return begin(path)

    monkeypatch.setattr(directories, "begin", when_donated)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    params = {
        "whole": jnp.arange(6.0),
        "cut": jax.device_put(jnp.arange(6.0), NamedSharding(mesh, PartitionSpec("x"))),
    }
    counter = Counter()
    counter.noise = jnp.arange(6.0)  # type: ignore[assignment]
    checkpoint = px.train.Checkpoint(params=params, counter=counter)
    options = px.train.CheckpointOptions(enable_async=True)
    path = checkpoint.save(str(tmp_path / "ckpt"), options)
    step = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)
    jax.block_until_ready(step((params, counter.noise)))
    gate.set()
    checkpoint.sync()
    for name in ("params/whole", "params/cut", "counter/noise"):
        assert px.train.load_variable(path, name).tolist() == list(range(6))


def test_a_failure_in_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    options = px.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    (tmp_path / "file").write_text("no directory")
    checkpoint = px.train.Checkpoint(w=px.Variable(1.0))
    checkpoint.write(str(tmp_path / "file" / "x"), options)
    with pytest.raises(OSError, match="File exists"):
        checkpoint.sync()
    checkpoint.sync()
    with pytest.raises(ValueError, match="format"):
        px.train.CheckpointOptions(format="zip")
    with pytest.raises(TypeError, match="CheckpointOptions"):
        checkpoint.write(str(tmp_path / "x"), options={"enable_async": True})


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    v = px.Variable(0)
    manager = px.train.CheckpointManager(px.train.Checkpoint(v=v), str(tmp_path), 5)
    for i in range(3):
        v.assign(i)
        manager.save()
    for name, file in (("ckpt-3", "arrays-00000"), ("ckpt-2", "index.json")):
        (tmp_path / name / file).write_bytes(b"{")
    again = px.train.CheckpointManager(px.train.Checkpoint(v=v), str(tmp_path), 5)
    assert again.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert int(v) == 0
    assert "ckpt-3" in caplog.text
    (tmp_path / "ckpt-1" / "index.json").write_text("")
    with pytest.raises(px.errors.DataLossError):
        px.train.CheckpointManager(px.train.Checkpoint(v=v), str(tmp_path), 5).restore_or_initialize()


def test_a_complete_checkpoint_counts_although_it_was_not_written_down(tmp_path: Path) -> None:
    v = px.Variable(1)
    manager = px.train.CheckpointManager(px.train.Checkpoint(v=v), str(tmp_path), 2)
    manager.save()
    v.assign(2)
    px.train.Checkpoint(v=v).write(str(tmp_path / "ckpt-2"))  # as if the process had died then
    again = px.train.CheckpointManager(px.train.Checkpoint(v=v), str(tmp_path), 2)
    assert again.latest_checkpoint == str(tmp_path / "ckpt-2")


def test_bit_flips_and_truncations_are_named_and_never_loaded(tmp_path: Path) -> None:
    w = px.Variable(np.arange(50, dtype=np.float32), name="w")
    checkpoint = px.train.Checkpoint(w=w, n=[3])
    path = Path(checkpoint.write(str(tmp_path / "x")))
    w.assign(np.full(50, -1.0, np.float32))
    random = np.random.default_rng(0)
    for file in ("arrays-00000", "index.json"):
        good = (path / file).read_bytes()
        damages = [good[: random.integers(len(good))] for _ in range(10)]
        for at in random.integers(len(good), size=30):
            flipped = bytearray(good)
            flipped[at] ^= 1 << int(random.integers(8))
            damages.append(bytes(flipped))
        for damaged in damages:
            (path / file).write_bytes(damaged)
            problem = ""
            try:
                checkpoint.restore(str(path))
            except px.errors.DataLossError as error:
                problem = str(error)
            if problem:
                assert (float(w[0]), "damaged" in problem) == (-1.0, True)
            else:  # only padding between arrays, or white space, may change
                np.testing.assert_array_equal(w, np.arange(50))
                w.assign(np.full(50, -1.0, np.float32))
        (path / file).write_bytes(good)
    checkpoint.restore(str(path)).assert_consumed()


def test_arrays_of_a_state_with_one_name_are_refused(tmp_path: Path) -> None:
    """One would be lost: a key with a slash, and dicts in each other."""
    state = {"a/b": np.array([1.0]), "a": {"b": np.array([2.0])}}
    with pytest.raises(ValueError, match="'kept/a/b' twice"):
        px.train.Checkpoint(kept=Kept(state)).write(str(tmp_path / "x"))
    others = {"kept": Kept({"a": np.array([1.0])}), "kept/a": np.array([2.0])}
    for objects in (others, dict(reversed(others.items()))):
        with pytest.raises(ValueError, match="'kept/a' twice"):
            px.train.Checkpoint(**objects).write(str(tmp_path / "x"))
