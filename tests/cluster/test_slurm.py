"""SlurmClusterResolver, and the lists that Slurm writes."""

import itertools
import os

import pytest
from hypothesis import given, settings, strategies as st

from phalanx.cluster.resolvers import SlurmClusterResolver
from phalanx.cluster.resolvers.hostlist import deal_tasks, expand_hostlist, expand_tasks_per_node
from phalanx.errors import PhalanxError

# -- node lists ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("n1", ["n1"]),
        ("a,b", ["a", "b"]),
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("n[1-6,8],m[07-12]-ib", [*(f"n{i}" for i in (1, 2, 3, 4, 5, 6, 8))]
         + [f"m{i:02}-ib" for i in range(7, 13)]),
        ("rack[0-1]n[1-2]", ["rack0n1", "rack0n2", "rack1n1", "rack1n2"]),
        ("[1-2]", ["1", "2"]),
        ("gpu-a100-[003,017].cluster.org,login", [
            "gpu-a100-003.cluster.org", "gpu-a100-017.cluster.org", "login"]),
        ("n[5]", ["n5"]),
        ("r10i1n[7-8]", ["r10i1n7", "r10i1n8"]),
    ],
)  # fmt: skip
def test_hostlists(hostlist, hosts):
    assert expand_hostlist(hostlist) == hosts


@pytest.mark.parametrize(
    "hostlist",
    ["", ",", "a,", ",a", "a,,b", "n[1-2", "n1-2]", "n[a-b]", "n[]", "n[1-]", "n[-1]", "n[1-2-3]",
     "n[3-1]", "n[1,]", "n[[1]]", "n[1]]", "a b", "n[1 - 2]", "n[٣]"],
)  # fmt: skip
def test_wrong_hostlists(hostlist):
    with pytest.raises(ValueError, match="A node list must be names") as caught:
        expand_hostlist(hostlist)
    assert isinstance(caught.value, PhalanxError)
    assert str(caught.value).endswith(f"Received: {hostlist!r}")


def width(pair):
    """Both ends of a range written as wide as its last number: what Slurm writes."""
    first, last, padded = pair
    size = len(str(last)) if padded else len(str(first))
    return str(first).zfill(size), str(last).zfill(size), size


RANGES = st.builds(
    lambda first, count, padded: width((first, first + count, padded)),
    st.integers(0, 1200),
    st.integers(0, 4),
    st.booleans(),
)
TEXTS = st.text("abcxyz-._", max_size=4)


@st.composite
def hostlists(draw):
    """An expression and the hosts that it stands for."""
    parts, hosts = [], []
    for _ in range(draw(st.integers(1, 4))):
        texts = [draw(TEXTS.filter(bool)), *draw(st.lists(TEXTS, max_size=2))]
        expression, choices = texts[0], [[texts[0]]]
        for text in texts[1:]:
            ranges = draw(st.lists(RANGES, min_size=1, max_size=3))
            written = [first if first == last else f"{first}-{last}" for first, last, _ in ranges]
            expression += f"[{','.join(written)}]{text}"
            choices.append(
                [str(n).zfill(size) for a, b, size in ranges for n in range(int(a), int(b) + 1)]
            )
            choices.append([text])
        parts.append(expression)
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return ",".join(parts), hosts


@settings(deadline=None)
@given(hostlists())
def test_hostlists_are_expanded_in_order(pair):
    hostlist, hosts = pair
    assert expand_hostlist(hostlist) == hosts


@settings(deadline=None)
@given(hostlists())
def test_what_was_expanded_stands_for_itself(pair):
    hosts = expand_hostlist(pair[0])
    assert expand_hostlist(",".join(hosts)) == hosts


@settings(deadline=None)
@given(st.text("n12,-[]x ", max_size=12))
def test_any_text_is_a_list_of_hosts_or_a_clear_error(text):
    try:
        hosts = expand_hostlist(text)
    except PhalanxError as error:
        hosts = []
        problem = str(error)
    if hosts:
        assert all(host and not set(host) & set("[], ") for host in hosts)
    else:
        assert f"Received: {text!r}" in problem


# -- tasks per node --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("3(x2),2,1", [3, 3, 2, 1]), ("16(x1)", [16])],
)
def test_tasks_per_node(text, counts):
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "3(x2", "3(2)", "x", "3 ", "1,", "-1", "2(x-1)"])
def test_wrong_tasks_per_node(text):
    with pytest.raises(ValueError, match=r"'2\(x3\),1'\. Received: ") as caught:
        expand_tasks_per_node(text)
    assert isinstance(caught.value, PhalanxError)


COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@settings(deadline=None)
@given(COUNTS, st.booleans())
def test_short_forms_mean_the_same(counts, short):
    groups = [(n, len(list(group))) for n, group in itertools.groupby(counts)]
    text = ",".join(f"{n}(x{k})" if k > 1 or not short else str(n) for n, k in groups)
    assert expand_tasks_per_node(text) == counts


@settings(deadline=None)
@given(COUNTS, st.integers(1, 6))
def test_nodes_are_dealt_tasks_in_turn(counts, at_once):
    nodes = deal_tasks(counts, at_once)
    assert [nodes.count(node) for node in range(len(counts))] == counts
    turns = [(nodes[:i].count(node) // at_once, node) for i, node in enumerate(nodes)]
    assert turns == sorted(turns)


# -- the resolver ----------------------------------------------------------------------------------

STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[1-2],m5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


@pytest.fixture
def slurm(monkeypatch):
    """Sets the variables of a job step of five tasks on three hosts, and others."""

    def set_variables(**changes):
        for name, value in {**STEP, **changes}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    set_variables()
    return set_variables


def test_a_step_in_full(slurm):
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["n1:8888", "n1:8889", "n2:8888", "n2:8889", "m5:8888"]
    }
    assert resolver.get_task_info() == (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert resolver.master() == "grpc://n2:8889"
    assert resolver.master("worker", 4) == "grpc://m5:8888"
    assert resolver.master("worker", 4, "x") == "x://m5:8888"
    assert resolver.rpc_layer == "grpc"
    assert resolver.environment == ""
    assert resolver.num_accelerators() == {"GPU": 0}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_every_rank_makes_the_same_cluster_and_finds_itself(slurm):
    for distribution in ("block", "cyclic", "plane", "cyclic:block", "block:cyclic,Pack"):
        clusters, addresses = [], []
        for rank in range(5):
            slurm(
                SLURM_PROCID=str(rank),
                SLURM_DISTRIBUTION=distribution,
                SLURM_DIST_PLANESIZE="2",
            )
            resolver = SlurmClusterResolver(jobs={"worker": 4, "ps": 1}, rpc_layer=None)
            clusters.append(resolver.cluster_spec())
            addresses.append(resolver.master())
        assert all(cluster == clusters[0] for cluster in clusters)
        tasks = clusters[0].job_tasks("ps") + clusters[0].job_tasks("worker")
        assert addresses == tasks
        assert len(set(tasks)) == 5


@pytest.mark.parametrize(
    ("distribution", "hosts"),
    [
        (None, ["n1", "n1", "n2", "n2", "m5"]),
        ("block", ["n1", "n1", "n2", "n2", "m5"]),
        ("cyclic", ["n1", "n2", "m5", "n1", "n2"]),
        ("cyclic:cyclic", ["n1", "n2", "m5", "n1", "n2"]),
        ("plane=2", ["n1", "n1", "n2", "n2", "m5"]),
    ],
)
def test_ranks_follow_slurms_distribution(slurm, distribution, hosts):
    slurm(SLURM_DISTRIBUTION=distribution, SLURM_DIST_PLANESIZE="2")
    tasks = SlurmClusterResolver().cluster_spec().job_tasks("worker")
    assert [task.partition(":")[0] for task in tasks] == hosts


def test_a_host_that_does_not_fit_the_rank(slurm):
    slurm(SLURMD_NODENAME="n2")
    assert SlurmClusterResolver().task_id == 3
    slurm(SLURMD_NODENAME="n1", SLURM_DISTRIBUTION="arbitrary")
    with pytest.raises(
        RuntimeError, match=r"Rank 3 should be on host 'n2', but runs on 'n1'"
    ) as caught:
        SlurmClusterResolver()
    assert "--distribution=block" in str(caught.value)
    # Names of another network cannot be compared.
    slurm(SLURMD_NODENAME="n1.local")
    assert SlurmClusterResolver().task_id == 3


def test_jobs_take_the_tasks_in_the_order_of_their_names(slurm):
    resolver = SlurmClusterResolver(jobs={"worker": 3, "ps": 1}, port_base=9000)
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["n1:9000"],
        "worker": ["n1:9001", "n2:9000", "n2:9001"],
    }
    assert resolver.get_task_info() == ("worker", 2)
    slurm(SLURM_PROCID="4")
    left_over = SlurmClusterResolver(jobs={"worker": 3, "ps": 1})
    assert left_over.get_task_info() == (None, None)
    assert left_over.master() == ""
    left_over.task_type, left_over.task_id = "ps", 0
    assert left_over.master() == "grpc://n1:8888"


def test_given_tasks_per_node(slurm):
    slurm(SLURM_STEP_NODELIST="b,a", SLURM_STEP_NUM_TASKS="4", SLURM_STEP_TASKS_PER_NODE=None)
    spec = SlurmClusterResolver(tasks_per_node=2).cluster_spec()
    assert spec.as_dict() == {"worker": ["b:8888", "b:8889", "a:8888", "a:8889"]}
    slurm(SLURM_STEP_NODELIST=None, SLURM_STEP_NUM_TASKS=None, SLURM_PROCID="1")
    resolver = SlurmClusterResolver(tasks_per_node={"y": 1, "x": 1})
    assert resolver.cluster_spec().as_dict() == {"worker": ["y:8888", "x:8888"]}
    assert resolver.master() == "grpc://x:8888"
    slurm(SLURM_STEP_NODELIST=None, SLURM_STEP_NUM_TASKS=None, SLURM_PROCID="2")
    outside = SlurmClusterResolver(tasks_per_node={"y": 1, "x": 1}, gpus_per_node=1)
    assert (outside.get_task_info(), outside.master()) == ((None, None), "")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(
    "missing", ["SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"]
)
def test_outside_of_a_step(slurm, missing):
    slurm(**{missing: None})
    with pytest.raises(RuntimeError, match=f"{missing} is not set.*`srun`") as caught:
        SlurmClusterResolver()
    assert isinstance(caught.value, PhalanxError)


@pytest.mark.parametrize(
    ("changes", "arguments", "builtin", "message"),
    [
        ({"SLURM_PROCID": "x"}, {}, ValueError, "SLURM_PROCID must be a whole number.* Received: 'x'"),
        ({"SLURM_PROCID": "5"}, {}, RuntimeError, "less than the number of tasks, 5. Received: 5"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, {}, ValueError, r"Received: 'n\[1-'"),
        ({"SLURM_STEP_NODELIST": "n[1-9]"}, {}, RuntimeError, "one number for each host"),
        ({"SLURM_STEP_NODELIST": "a,a,a"}, {}, RuntimeError, "each host once"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, {}, ValueError, r"Received: '2\(x'"),
        ({"SLURM_GPUS_ON_NODE": "x"}, {}, ValueError, "SLURM_GPUS_ON_NODE must be.* Received: 'x'"),
        ({}, {"jobs": {"worker": 9}}, RuntimeError, r"started: 5\..* Received: jobs=\{'worker': 9\}"),
        ({}, {"jobs": ["worker"]}, ValueError, r"`jobs` must be .* Received: \['worker'\]"),
        ({}, {"jobs": {"worker": -1}}, ValueError, "`jobs` must be a dict of numbers of tasks"),
        ({}, {"tasks_per_node": {}}, ValueError, "`tasks_per_node` must be a dict of numbers"),
        ({}, {"tasks_per_node": {"a": -1}}, ValueError, "`tasks_per_node` must be a dict of numbers"),
        ({}, {"gpus_per_node": -1}, ValueError, "`gpus_per_node` must be a whole number"),
        ({}, {"gpus_per_task": 0.5}, TypeError, "`gpus_per_task` must be a whole number"),
        ({}, {"tasks_per_node": "x"}, ValueError, "`tasks_per_node` must be"),
        ({}, {"port_base": "x"}, TypeError, "`port_base` must be a number.* Received: 'x'"),
        (
            {},
            {"gpus_per_node": 1, "gpus_per_task": 1},
            RuntimeError,
            "more GPUs than it has.* Received: gpus_per_task=1, gpus_per_node=1, 2 tasks per node",
        ),
    ],
)
def test_wrong_steps(slurm, changes, arguments, builtin, message):
    slurm(**changes)
    with pytest.raises(builtin, match=message) as caught:
        SlurmClusterResolver(**arguments)
    assert isinstance(caught.value, PhalanxError)


# -- GPUs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "arguments", "count", "visible"),
    [
        # Nothing is known: no GPUs, and nothing is set.
        ({}, {}, 0, None),
        ({}, {"gpus_per_node": 0}, 0, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}, 0, ""),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {}, 0, "NoDevFiles"),
        # Equal shares; this task is the second one of its node.
        ({}, {"gpus_per_node": 4}, 2, "2,3"),
        ({}, {"gpus_per_node": 4, "gpus_per_task": 1}, 1, "1"),
        ({}, {"gpus_per_node": 5}, 2, "2,3"),
        ({}, {"gpus_per_node": 4, "auto_set_gpu": False}, 2, None),
        ({"SLURM_GPUS_ON_NODE": "4"}, {}, 2, "2,3"),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_TASK": "1"}, {}, 1, "1"),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_TASK": "a100:1"}, {}, 1, "1"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {}, 1, "1"),
        # The GPUs that the job may use need not be the first ones.
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {}, 2, "6,7"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb", "SLURM_GPUS_ON_NODE": "2"}, {}, 1, "GPU-bb"),
        # Slurm has given each task its own already.
        ({"CUDA_VISIBLE_DEVICES": "3", "SLURM_GPUS_ON_NODE": "4"}, {}, 1, "3"),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "2"}, {}, 1, "0"),
        # More tasks than GPUs: all work without.
        ({}, {"gpus_per_node": 1}, 0, ""),
    ],
)
def test_gpus(slurm, changes, arguments, count, visible):
    slurm(**changes)
    resolver = SlurmClusterResolver(**arguments)
    assert resolver.num_accelerators() == {"GPU": count}
    assert resolver.num_accelerators("worker", 0) == {"GPU": count}
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_gpus_of_all_tasks_of_a_node_are_disjoint(slurm, monkeypatch):
    seen = []
    for rank in range(5):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        slurm(SLURM_PROCID=str(rank), SLURM_DISTRIBUTION="cyclic")
        SlurmClusterResolver(gpus_per_node=4)
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == ["0,1", "0,1", "0,1", "2,3", "2,3"]


@pytest.mark.parametrize(
    ("script", "count"),
    [
        ('echo "GPU 0: A100 (UUID: GPU-1)"; echo "GPU 1: A100 (UUID: GPU-2)"', 2),
        ('echo "No devices were found"', 0),
    ],
)
def test_gpus_are_counted_with_nvidia_smi(slurm, monkeypatch, tmp_path, script, count):
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = --list-gpus ] || exit 1\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm(SLURM_STEP_TASKS_PER_NODE="1(x3)", SLURM_STEP_NUM_TASKS="3", SLURM_PROCID="0")
    assert SlurmClusterResolver(auto_set_gpu=False).num_accelerators() == {"GPU": count}


def test_a_broken_nvidia_smi_is_reported(slurm, monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="Give `gpus_per_node`") as caught:
        SlurmClusterResolver()
    assert isinstance(caught.value, PhalanxError)
