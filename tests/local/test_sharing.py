"""CPUs, GPUs and ports that the pods of one machine share."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ddpjob.local import LocalError, resources
from ddpjob.local.resources import Ports, cpu_share, gpu_variables, visible_gpus


@pytest.mark.parametrize(
    ("available", "nodes", "limit", "slices"),
    [
        ([0, 1], 2, None, [[0], [1]]),
        ([0, 1, 2, 3], 2, None, [[0, 1], [2, 3]]),
        ([3, 1, 2], 2, None, [[1], [2, 3]]),
        ([0, 1, 2, 3], 1, None, [[0, 1, 2, 3]]),
        ([0, 1, 2, 3], 1, 2, [[0, 1]]),
        ([0, 1, 2, 3], 1, "1500m", [[0, 1]]),
        ([0, 1, 2, 3], 1, "0", [[0]]),
        ([4, 7], 3, 8, [[4], [7], [4]]),
        ([5], 2, 1, [[5], [5]]),
    ],
)
def test_every_pod_gets_an_equal_share_of_the_cpus(
    available: list[int], nodes: int, limit: int | str | None, slices: list[list[int]]
) -> None:
    assert [cpu_share(available, rank, nodes, limit) for rank in range(nodes)] == slices


def test_each_name_has_its_own_port_and_keeps_it() -> None:
    ports = Ports()
    given = [ports.of(name) for name in ("job-0a1b2-1", "job-0a1b2-1-0", "job-0a1b2-1-1")]
    assert len(set(given)) == 3
    assert given[0] == ports.of("job-0a1b2-1")


def test_port_with_a_listener_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not resources._is_free(listener.getsockname()[1])


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(resources, "_PORTS", (port, port))
        with pytest.raises(LocalError, match="is free"):
            Ports().of("job")


def test_free_ports_are_outside_the_ephemeral_range() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if low < 32768:
        pytest.skip("this machine's kernel has another range")
    ports = Ports()
    assert max(ports.of(str(name)) for name in range(20)) < low


def test_visible_gpus_are_those_of_cuda_visible_devices(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-ab"}, tmp_path) == ["2", "GPU-ab"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, tmp_path) == ["0"]  # as CUDA reads it
    assert visible_gpus({}, tmp_path / "none") == []


@pytest.mark.parametrize(
    ("devices", "nodes", "requested", "processes", "variables"),
    [
        (["0", "1", "2", "3"], 2, 2, 2, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        (["0", "1", "2", "3"], 2, 0, 2, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        (["0", "1", "2", "3"], 2, 0, 1, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        (["MIG-a", "MIG-b"], 2, 1, 1, {"CUDA_VISIBLE_DEVICES": "MIG-b", "NCCL_HOSTID": "node-1"}),
        (["5"], 2, 0, 1, {"CUDA_VISIBLE_DEVICES": "5", "NCCL_HOSTID": "node-1"}),
        (["0", "1"], 2, 2, 2, {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_HOSTID": "node-1"}),
        (["0", "1"], 1, 0, 2, {}),  # a single node sees all, as without local mode
        ([], 2, 1, 1, {}),
        (["0", "1"], 2, 1, 1, {"CUDA_VISIBLE_DEVICES": "1"}),
        (["0"], 2, 8, 8, {"CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": "node-1"}),
    ],
)
def test_nodes_get_their_gpus_and_those_that_share_one_are_different_machines_for_nccl(
    devices: list[str], nodes: int, requested: int, processes: int, variables: dict[str, str]
) -> None:
    rank = nodes - 1
    assert gpu_variables(devices, rank, nodes, requested=requested, processes=processes) == variables
