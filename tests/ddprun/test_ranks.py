"""Topology from the environment, impossible values refused early, and the CPUs, memory and GPUs of a rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddprun.diagnostics import Diagnostics
from ddprun.distributed.process_group import interface_variables, join_group
from ddprun.distributed.rendezvous import parse_rendezvous_timeout
from ddprun.distributed.topology import (
    Ranks,
    free_port,
    from_flags,
    from_node_environment,
    from_rank_environment,
    needs_launch,
    route_interface,
    without_operator_rank,
)
from ddprun.errors import RanksError, TrainerError
from ddprun.heartbeat import Heartbeat, HeartbeatRecord
from ddprun.program import RankProcess
from ddprun.resources import available_cpus, oom_kills, threads_per_rank, throttled_seconds
from ddprun.signals import StopFlag
from ddptrain.config import Config
from ddptrain.device import (
    driver_version,
    processor,
    resolve_backend,
    resolve_device,
    set_numerics,
    too_few_gpus,
)
from ddptrain.program import TrainerProgram


def test_ranks_are_numbered_node_by_node() -> None:
    seen = []
    for node_rank in range(3):
        node = from_node_environment(
            {"NNODES": "3", "NODE_RANK": str(node_rank), "NPROC_PER_NODE": "2", "MASTER_ADDR": "m"}
        )
        seen += [(node.of_local_rank(local).rank, node.node_of(node.of_local_rank(local).rank)) for local in range(2)]
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        ({}, False),
        ({"NNODES": "1", "NPROC_PER_NODE": "1"}, False),
        ({"NNODES": "1", "NPROC_PER_NODE": "2"}, True),
        ({"NNODES": "2", "MASTER_ADDR": "m"}, True),
        ({"NNODES": "2", "MASTER_ADDR": "m", "RANK": "0", "WORLD_SIZE": "2"}, False),
    ],
)
def test_a_node_with_several_unstarted_ranks_needs_a_launch(env: dict[str, str], launch: bool) -> None:
    assert needs_launch(env) is launch


def test_init_process_group_has_the_limit_of_a_collective() -> None:
    seen: dict[str, HeartbeatRecord] = {}
    heartbeat = Heartbeat(on_mark=lambda place, _: seen.update({place: heartbeat.last}))
    group = join_group(
        Ranks(local_rank=0), torch.device("cpu"), "gloo",
        rendezvous_timeout=5, collective_timeout=77, stop=StopFlag(), heartbeat=heartbeat, also_alone=True,
    )  # fmt: skip
    group.close()
    assert seen["init_process_group"].limit == 77


IN_A_POD = {
    "DDPJOB_UID": "u", "NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "1", "MASTER_ADDR": "m",
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
}  # fmt: skip


def test_rank_that_the_operator_set_is_launched() -> None:
    env = without_operator_rank(IN_A_POD)
    assert needs_launch(env) and not needs_launch(IN_A_POD)
    assert from_node_environment(env).node_rank == 1
    assert from_flags(env) == from_flags({})


@pytest.mark.parametrize(
    "change",
    [
        {"TORCHELASTIC_RUN_ID": "none"},  # torchrun started this process
        {"RANK": "3", "WORLD_SIZE": "4", "NPROC_PER_NODE": "2"},
        {"RANK": "0"},  # the user's own
        {"DDPJOB_UID": None},
    ],
)
def test_rank_of_another_launcher_or_of_the_user_stays(change: dict[str, str | None]) -> None:
    env = {name: value for name, value in (IN_A_POD | change).items() if value is not None}
    assert without_operator_rank(env) == env and not needs_launch(env)


def test_torchrun_variables_set_the_rank() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    env |= {"MASTER_ADDR": "m", "MASTER_PORT": "1"}
    ranks = from_rank_environment(env)
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.node_rank, ranks.nnodes) == (5, 8, 1, 1, 2)
    assert (ranks.master_addr, ranks.master_port) == ("m", 1)


def test_an_ipv6_master_address_may_have_brackets() -> None:
    assert from_node_environment({"NNODES": "2", "MASTER_ADDR": "[::1]"}).master_addr == "::1"
    assert from_rank_environment({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "[::1]"}).master_addr == "::1"
    assert from_flags({}, init="tcp://[::1]:2", rank="0", world_size="1").master_addr == "::1"


@pytest.mark.parametrize(
    ("read", "env", "named"),
    [
        (from_node_environment, {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "m"}, "node rank 2"),
        (from_node_environment, {"NNODES": "2"}, "MASTER_ADDR"),
        (from_node_environment, {"NNODES": "0"}, "NNODES=0"),
        (from_node_environment, {"NPROC_PER_NODE": "auto"}, "NPROC_PER_NODE=auto"),
        (from_node_environment, {"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        (from_node_environment, {"NODE_RANK": "-1"}, "NODE_RANK=-1"),
        (from_rank_environment, {"RANK": "0"}, "WORLD_SIZE is not set"),
        (from_rank_environment, {"WORLD_SIZE": "2"}, "RANK is not set"),
        (from_rank_environment, {"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 does not exist"),
        (from_rank_environment, {"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x"),
    ],
)
def test_an_impossible_place_is_refused_with_the_variable_name(
    read: Callable[[dict[str, str]], Ranks], env: dict[str, str], named: str
) -> None:
    with pytest.raises(TrainerError, match=named) as caught:
        read(env)
    assert caught.value.code == 2
    assert len(caught.value.lines().splitlines()) == 3


def test_a_rank_without_local_rank_takes_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # there may be no GPU here
    ranks = from_rank_environment({"RANK": "1", "WORLD_SIZE": "2"})
    with pytest.raises(RanksError, match="LOCAL_RANK is not set"):
        resolve_device(Config(device="cuda"), ranks)


@pytest.mark.parametrize(
    ("conf", "seconds"),
    [("", 600), ("timeout=30", 30), ("a=b, timeout=7.5", 7.5), ("timeout=soon", 600), ("timeout", 600)],
)
def test_the_rendezvous_timeout_is_parsed_from_torchruns_format(conf: str, seconds: float) -> None:
    assert parse_rendezvous_timeout(conf) == seconds


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "25000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 0.25),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
        ({"proc/self/cgroup": "0::/pod/box", "sys/fs/cgroup/pod/cpu.max": "75000 100000"}, 0.75),
        ({"proc/self/cgroup": "0::/pod/box", "sys/fs/cgroup/pod/box/cpu.max": "garbage"}, None),
        ({}, None),
    ],
)
def test_the_lowest_cgroup_quota_limits_the_cpus(tmp_path: Path, files: dict[str, str], cpus: float | None) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    assert available_cpus(tmp_path) == (cpus or available_cpus(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"proc/self/cgroup": "0::/pod", "sys/fs/cgroup/pod/memory.events": "low 0\noom 3\noom_kill 2"}, 2),
        ({"proc/self/cgroup": "7:memory:/pod", "sys/fs/cgroup/memory/pod/memory.oom_control": "oom_kill 1"}, 1),
        ({"proc/self/cgroup": "7:cpu:/pod", "sys/fs/cgroup/cpu/pod/memory.oom_control": "oom_kill 1"}, 0),
        ({"sys/fs/cgroup/memory.events": "oom_kill many"}, 0),
        ({}, 0),
    ],
)
def test_oom_kills_are_counted_from_the_cgroup(tmp_path: Path, files: dict[str, str], kills: int) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    assert oom_kills(tmp_path) == kills


@pytest.mark.parametrize(
    ("files", "seconds"),
    [
        (
            {"proc/self/cgroup": "0::/pod/c", "sys/fs/cgroup/pod/cpu.stat": "nr_throttled 3\nthrottled_usec 1500000"},
            1.5,
        ),
        ({"proc/self/cgroup": "1:cpu:/", "sys/fs/cgroup/cpu/cpu.stat": "nr_periods 9\nthrottled_time 2500000000"}, 2.5),
        ({"sys/fs/cgroup/cpu.stat": "usage_usec 7\nthrottled_usec"}, 0.0),
        ({}, 0.0),
    ],
)
def test_throttled_time_is_read_from_the_cgroup(tmp_path: Path, files: dict[str, str], seconds: float) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    assert throttled_seconds(tmp_path) == seconds


def test_ranks_share_the_cpus_unless_omp_num_threads_is_set() -> None:
    assert threads_per_rank(1000, {}) == 1
    assert threads_per_rank(1, {"OMP_NUM_THREADS": "5"}) == 5
    assert threads_per_rank(1, {"OMP_NUM_THREADS": ""}) >= 1


@pytest.mark.parametrize(
    ("content", "first", "last"),
    [("32768 60999", 20768, 32767), ("1024 65535", 1024, 65535), (None, 1024, 32767), ("unlimited", 1024, 32767)],
)
def test_a_free_port_is_below_the_ephemeral_range_where_there_is_room(
    tmp_path: Path, content: str | None, first: int, last: int
) -> None:
    if content is not None:
        (tmp_path / "range").write_text(content)
    ports = {free_port(tmp_path / "range") for _ in range(20)}
    assert len(ports) > 1
    assert all(first <= port <= last for port in ports)


def test_the_interface_of_a_route_is_named_and_none_for_an_unknown_host() -> None:
    assert route_interface("127.0.0.1") == "lo"
    assert route_interface("no-such-host.invalid") is None


def test_nccl_is_given_exactly_the_interface_that_routes_to_the_master() -> None:
    assert interface_variables("eth0", 2) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert interface_variables("lo", 1) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_a_rank_that_was_forked_after_cuda_was_initialized_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(StopFlag, "installed", StopFlag)  # this process keeps its handlers
    with pytest.raises(AssertionError, match="CUDA was initialized before the fork"):
        TrainerProgram(Config()).run(RankProcess(Ranks(), Diagnostics(*[-1] * 8), -1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_cuda_without_a_gpu_is_refused_and_auto_takes_the_cpu() -> None:
    for config in (Config(device="cuda"), Config(backend="nccl")):
        with pytest.raises(RanksError, match="PyTorch finds no GPU") as caught:
            resolve_device(config, from_rank_environment({"RANK": "0", "WORLD_SIZE": "1"}))
        assert caught.value.code == 71
    assert resolve_device(Config(), from_flags({})) == torch.device("cpu")


def test_a_backend_that_cannot_work_is_refused() -> None:
    cpu = torch.device("cpu")
    assert resolve_backend("auto", cpu) == "gloo"
    with pytest.raises(RanksError, match="nccl needs CUDA devices"):
        resolve_backend("nccl", cpu)


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="this build has MPI")
def test_a_backend_that_torch_was_not_built_with_is_refused() -> None:
    with pytest.raises(RanksError, match="this PyTorch build has no mpi"):
        resolve_backend("mpi", torch.device("cpu"))


@pytest.mark.parametrize(("gpus", "chosen"), [(1, "cpu"), (2, "cuda")])
def test_auto_takes_the_cpu_for_all_ranks_if_the_gpus_are_too_few(
    monkeypatch: pytest.MonkeyPatch, gpus: int, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    both = [Ranks(nproc_per_node=2, world_size=2).of_local_rank(local) for local in range(2)]
    assert [resolve_device(Config(), ranks).type for ranks in both] == [chosen] * 2
    assert ("all ranks use the CPU" in too_few_gpus(Config(), both[0])) == (chosen == "cpu")
    if chosen == "cpu":
        with pytest.raises(RanksError, match="has no GPU"):
            resolve_device(Config(device="cuda"), both[1])


def test_the_version_of_the_driver_is_read_from_the_kernel_module(tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release\nGCC version: 12\n")
    assert driver_version(path) == "570.124.06"
    assert driver_version(tmp_path / "absent") == ""


def test_tf32_is_off_unless_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    for tf32, precision in ((True, "tf32"), (False, "ieee")):
        set_numerics(Config(tf32=tf32))
        assert torch.backends.cudnn.conv.fp32_precision == precision  # type: ignore[attr-defined]
        assert torch.backends.cuda.matmul.fp32_precision == precision


CPUINFO = "processor : 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t: 143\nmodel name\t: X\n\nprocessor : 1\n"


def test_processor_is_identified_by_vendor_family_and_model(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    assert processor(tmp_path / "cpuinfo") == "GenuineIntel 6 143"


def test_processor_falls_back_to_the_architecture(tmp_path: Path) -> None:
    assert processor(tmp_path / "absent")
    (tmp_path / "cpuinfo").write_text("Processor : ARM\n")
    assert processor(tmp_path / "cpuinfo") == processor(tmp_path / "absent")
