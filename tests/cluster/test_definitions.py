"""ClusterDef, JobDef and ServerDef as messages."""

import copy
import pickle

import pytest
from hypothesis import given, settings, strategies as st

from phalanx.cluster import ClusterDef, ClusterSpec, JobDef, ServerDef
from phalanx.errors import PhalanxError

CLUSTER = ClusterSpec(
    {"worker": ["a:1", "b\"\n\\'é\x01\x7f:1"], "ps": {2: "c:1", 300: "d:1"}, "e": []}
).as_cluster_def()
SERVER = ServerDef(
    cluster=CLUSTER,
    job_name="worker",
    task_index=1,
    protocol="grpc",
    port=-5,
    replica=3,
    default_session_config=b"\x10\x02",
)

# Made by TensorFlow 2.21 from the same cluster and server. The order of tasks on the wire is free.
TENSORFLOW_CLUSTER = (
    b'\n\x03\n\x01e\n\x17\n\x02ps\x12\x08\x08\xac\x02\x12\x03d:1\x12\x07\x08\x02\x12\x03c:1\n"'
    b"\n\x06worker\x12\x0f\x08\x01\x12\x0bb\"\n\\'\xc3\xa9\x01\x7f:1\x12\x07\x08\x00\x12\x03a:1"
)
TENSORFLOW_SERVER = (
    b"\nB" + TENSORFLOW_CLUSTER + b'\x12\x06worker\x18\x01"\x02\x10\x02*\x04grpc0'
    b"\xfb\xff\xff\xff\xff\xff\xff\xff\xff\x01@\x03"
)
TENSORFLOW_TEXT = r"""job {
  name: "e"
}
job {
  name: "ps"
  tasks {
    key: 2
    value: "c:1"
  }
  tasks {
    key: 300
    value: "d:1"
  }
}
job {
  name: "worker"
  tasks {
    key: 0
    value: "a:1"
  }
  tasks {
    key: 1
    value: "b\"\n\\\'é\001\177:1"
  }
}
"""

# -- what people write -----------------------------------------------------------------------------


def test_a_cluster_is_built_piece_by_piece():
    cluster = ClusterDef()
    job = cluster.job.add()
    job.name = "worker"
    job.tasks[1] = "b:1"
    job.tasks[0] = b"a:1"
    cluster.job.add(name="ps", tasks={0: "c:1"})
    assert [job.name for job in cluster.job] == ["worker", "ps"]
    assert dict(cluster.job[0].tasks) == {0: "a:1", 1: "b:1"}
    assert ClusterSpec(cluster).as_dict() == {"worker": ["a:1", "b:1"], "ps": ["c:1"]}


def test_a_server_is_built_piece_by_piece():
    server = ServerDef(protocol="grpc")
    server.cluster.CopyFrom(CLUSTER)
    server.job_name = "ps"
    server.task_index = 2
    assert server == ServerDef(cluster=CLUSTER, job_name="ps", task_index=2, protocol="grpc")
    assert server.cluster.job[1].tasks[2] == "c:1"


def test_parts_are_copies():
    job = JobDef(name="worker", tasks={0: "a:1"})
    cluster = ClusterDef(job=[job])
    cluster.job.append(job)
    server = ServerDef(cluster=cluster)
    job.name = "changed"
    cluster.job[0].tasks[0] = "changed:1"
    del cluster.job[1]
    assert [j.name for j in server.cluster.job] == ["worker", "worker"]
    assert server.cluster.job[0].tasks == {0: "a:1"}
    assert len(cluster.job) == 1


def test_dicts_stand_for_messages():
    assert ClusterDef(job=[{"name": "e"}]).job[0] == CLUSTER.job[0]
    server = ServerDef(cluster={"job": [{"name": "ps", "tasks": {"0": "c:1"}}]})
    assert server.cluster == ClusterDef(job=[JobDef(name="ps", tasks={0: "c:1"})])


def test_jobs_are_a_list():
    jobs = ClusterDef(job=[JobDef(name=name) for name in "abc"]).job
    assert len(jobs) == 3
    assert [job.name for job in jobs[1:]] == ["b", "c"]
    jobs.extend([JobDef(name="d")])
    jobs.insert(0, JobDef(name="z"))
    assert jobs.pop().name == "d"
    jobs.remove(JobDef(name="b"))
    jobs[0] = JobDef(name="y")
    assert [job.name for job in jobs] == ["y", "a", "c"]
    jobs[1:] = [JobDef(name="x")]
    assert jobs == [JobDef(name="y"), JobDef(name="x")]
    assert jobs != [JobDef(name="y")]
    assert jobs != "yx"


def test_tasks_are_a_dict_in_order():
    tasks = JobDef(tasks={"2": "c:1", 0: "a:1"}).tasks
    tasks.update({1: "b:1"})
    assert list(tasks.items()) == [(0, "a:1"), (1, "b:1"), (2, "c:1")]
    assert tasks.pop(1) == "b:1"
    del tasks[2]
    assert tasks == {0: "a:1"}
    assert repr(tasks) == "{0: 'a:1'}"
    assert tasks.get(7) is None
    with pytest.raises(KeyError):
        tasks[7]
    assert list(tasks) == [0]


def test_merging_adds_to_jobs_and_tasks_and_replaces_the_rest():
    job = JobDef(name="a", tasks={0: "a:1", 1: "b:1"})
    job.MergeFrom(JobDef(tasks={1: "x:1", 2: "c:1"}))
    assert job == JobDef(name="a", tasks={0: "a:1", 1: "x:1", 2: "c:1"})
    server = ServerDef(cluster=ClusterDef(job=[job]), port=1, protocol="grpc")
    server.MergeFrom(ServerDef(cluster=CLUSTER, port=2, default_session_config=b"x"))
    assert [job.name for job in server.cluster.job] == ["a", "e", "ps", "worker"]
    assert (server.port, server.protocol, server.default_session_config) == (2, "grpc", b"x")


def test_fields_are_cleared():
    server = copy.deepcopy(SERVER)
    assert server.HasField("cluster")
    server.ClearField("cluster")
    assert not server.HasField("cluster")
    assert server.HasField("port")
    server.Clear()
    assert server == ServerDef()


def test_none_is_the_default():
    assert ServerDef(cluster=None, job_name=None, port=None, protocol=None) == ServerDef()


def test_equality():
    assert JobDef(name="a") != ClusterDef()
    assert JobDef(name="a") != "a"
    assert JobDef(tasks={0: "a:1"}) != JobDef(tasks={1: "a:1"})
    assert SERVER == copy.deepcopy(SERVER) == pickle.loads(pickle.dumps(SERVER))
    with pytest.raises(TypeError, match="unhashable"):
        hash(SERVER)


# -- forms -----------------------------------------------------------------------------------------


def test_text_is_protobufs():
    assert str(CLUSTER) == TENSORFLOW_TEXT
    indented = "".join(f"  {line}\n" for line in TENSORFLOW_TEXT.splitlines())
    assert str(SERVER) == (
        f"cluster {{\n{indented}}}\n"
        'job_name: "worker"\ntask_index: 1\ndefault_session_config {\n  # 2 bytes\n}\n'
        'protocol: "grpc"\nport: -5\nreplica: 3\n'
    )
    assert str(JobDef()) == ""


def test_repr_makes_the_message_again():
    for message in (CLUSTER, SERVER, JobDef(), CLUSTER.job[1]):
        assert eval(repr(message)) == message


def test_bytes_of_tensorflow_are_read():
    assert ClusterDef.FromString(TENSORFLOW_CLUSTER) == CLUSTER
    assert ServerDef.FromString(TENSORFLOW_SERVER) == SERVER


def test_bytes_are_those_of_tensorflow_up_to_the_order_of_tasks():
    assert sorted(CLUSTER.SerializeToString()) == sorted(TENSORFLOW_CLUSTER)
    assert sorted(SERVER.SerializeToString()) == sorted(TENSORFLOW_SERVER)
    assert JobDef(name="ps", tasks={0: "a:1"}).SerializeToString() == (
        b"\n\x02ps\x12\x07\x08\x00\x12\x03a:1"
    )


def test_other_messages_travel_along():
    class Config:
        def SerializeToString(self):
            return b"\x10\x02"

        def __str__(self):
            return "threads: 2\n"

    server = ServerDef(default_session_config=Config())
    assert ServerDef.FromString(server.SerializeToString()).default_session_config == b"\x10\x02"
    assert str(server) == "default_session_config {\n  threads: 2\n}\n"


def test_unknown_fields_are_left_out():
    unknown = b"\x79" + b"12345678" + b"\x7d" + b"1234" + b"\x78\x05" + b"\x7a\x01x"
    assert JobDef.FromString(b"\n\x01a" + unknown) == JobDef(name="a")


def test_parsing_replaces_and_merging_adds():
    job = JobDef(name="a", tasks={0: "a:1"})
    assert job.ParseFromString(JobDef(name="b").SerializeToString()) == 3
    assert job == JobDef(name="b")
    assert job.MergeFromString(JobDef(tasks={1: "c:1"}).SerializeToString()) == 9
    assert job == JobDef(name="b", tasks={1: "c:1"})


NAMES = st.text(max_size=8)
TASKS = st.dictionaries(st.integers(0, 2**31 - 1), NAMES, max_size=4)
JOBS = st.lists(st.builds(lambda n, t: JobDef(name=n, tasks=t), NAMES, TASKS), max_size=3)
INTS = st.integers(-(2**31), 2**31 - 1)
SERVERS = st.builds(
    lambda jobs, name, index, protocol, port, replica, config: ServerDef(
        cluster=ClusterDef(job=jobs),
        job_name=name,
        task_index=index,
        protocol=protocol,
        port=port,
        replica=replica,
        default_session_config=config,
    ),
    JOBS,
    NAMES,
    INTS,
    NAMES,
    INTS,
    INTS,
    st.none() | st.binary(max_size=5),
)


@settings(deadline=None)
@given(SERVERS)
def test_every_form_gives_the_message_back(server):
    assert ServerDef.FromString(server.SerializeToString()) == server
    assert eval(repr(server)) == server
    assert pickle.loads(pickle.dumps(server)) == server
    other = ServerDef(job_name="other", port=1)
    other.CopyFrom(server)
    assert other == server


@settings(deadline=None)
@given(SERVERS, SERVERS)
def test_merging_bytes_is_merging_messages(one, other):
    by_message, by_bytes = copy.deepcopy(one), copy.deepcopy(one)
    by_message.MergeFrom(other)
    by_bytes.MergeFromString(other.SerializeToString())
    assert by_bytes == by_message
    assert ServerDef.FromString(one.SerializeToString() + other.SerializeToString()) == by_message


def mutated(data):
    return st.builds(
        lambda at, piece: data[:at] + piece + data[at + len(piece) :],
        st.integers(0, len(data)),
        st.binary(max_size=3),
    )


@settings(deadline=None)
@given(st.binary(max_size=40) | mutated(TENSORFLOW_CLUSTER) | mutated(TENSORFLOW_SERVER))
def test_any_bytes_are_a_message_or_a_clear_error(data):
    for kind in (JobDef, ClusterDef, ServerDef):
        message = kind(**({"name": "kept"} if kind is JobDef else {}))
        before = copy.deepcopy(message)
        failure = None
        try:
            message.MergeFromString(data)
        except (ValueError, TypeError) as error:
            failure = error
        if failure is None:
            assert kind.FromString(message.SerializeToString()) == message
        else:
            assert isinstance(failure, PhalanxError)
            assert "Received: " in str(failure)
            assert message == before, "a failure changed the message"


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "builtin", "message"),
    [
        (lambda: JobDef(name=1), TypeError, "`name` of a JobDef must be a string. Received: 1"),
        (lambda: JobDef(name=b"\xff"), ValueError, "`name` of a JobDef must be text in UTF-8"),
        (lambda: JobDef(name="\ud800"), ValueError, "`name` of a JobDef must be text in UTF-8"),
        (lambda: JobDef(tasks={0: 1}), TypeError, "A task address of a JobDef must be a string"),
        (lambda: JobDef(tasks="a:1"), TypeError, "The tasks of a JobDef must be a list"),
        (lambda: JobDef(tasks={2**31: "a:1"}), ValueError, "index of a JobDef .* Received: 2147483648"),
        (lambda: JobDef().tasks.update({-1: "a:1"}), ValueError, "task index .* Received: -1"),
        (lambda: JobDef().tasks.update({0: 5}), TypeError, "task address .* Received: 5"),
        (lambda: ClusterDef(job=["worker"]), TypeError, "A job .* a JobDef. Received: 'worker'"),
        (lambda: ClusterDef(job=JobDef()), TypeError, "`job` of a ClusterDef must be a list"),
        (lambda: ClusterDef().job.append("x"), TypeError, "must be a JobDef. Received: 'x'"),
        (lambda: ClusterDef().job.add(nam="x"), ValueError, r"\['name', 'tasks'\]. Received: 'nam'"),
        (lambda: ClusterDef(job=[{"nam": 1}]), TypeError, r"\['name', 'tasks'\]. Received: 'nam'"),
        (
            lambda: ServerDef(cluster=ClusterSpec({})),
            TypeError,
            r"must be a ClusterDef; a ClusterSpec gives one with `as_cluster_def\(\)`",
        ),
        (lambda: ServerDef(port="x"), TypeError, "`port` of a ServerDef .* Received: 'x'"),
        (lambda: ServerDef(port=2**31), ValueError, "whole number of 32 bits. Received: 2147483648"),
        (lambda: ServerDef(default_session_config=5), TypeError, "must be None, a message"),
        (lambda: setattr(JobDef(), "nam", "x"), AttributeError, "A JobDef has the fields"),
        (lambda: JobDef().ClearField("x"), AttributeError, "A JobDef has the fields"),
        (lambda: JobDef().MergeFrom(ClusterDef()), TypeError, "A JobDef is needed"),
        (lambda: JobDef().CopyFrom("x"), TypeError, "A JobDef is needed. Received: 'x'"),
        (lambda: JobDef.FromString("x"), TypeError, "must be bytes. Received: 'x'"),
        (lambda: JobDef.FromString(b"\xff"), ValueError, "not a serialized message"),
        (lambda: JobDef.FromString(b"\n\x02a"), ValueError, "not a serialized message"),
        (lambda: JobDef.FromString(b"\x00\x01"), ValueError, "not a serialized message"),
        (lambda: JobDef.FromString(b"\x0b"), ValueError, "not a serialized message"),
        (lambda: JobDef.FromString(b"\x08\x01"), TypeError, "`name` of a serialized JobDef"),
    ],
)
def test_wrong_use_is_explained(act, builtin, message):
    with pytest.raises(builtin, match=message) as caught:
        act()
    assert isinstance(caught.value, PhalanxError)
    assert "Received: " in str(caught.value)
