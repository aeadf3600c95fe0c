"""CPUs, GPUs and ports that the pods of one machine share."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ddpjob.local import LocalError, resources
from ddpjob.local.resources import Ports, cpu_limit, cpu_share, gpu_limit, gpu_share, visible_gpus
from tests.local.builders import a_container, a_pod


@pytest.mark.parametrize(
    ("available", "nodes", "limit", "slices"),
    [
        ([0, 1], 2, None, [[0], [1]]),
        ([0, 1, 2, 3], 2, None, [[0, 1], [2, 3]]),
        ([3, 1, 2], 2, None, [[1], [2, 3]]),
        ([0, 1, 2, 3], 1, None, [[0, 1, 2, 3]]),
        ([0, 1, 2, 3], 1, 2, [[0, 1]]),
        ([4, 7], 3, 8, [[4], [7], [4]]),
        ([5], 2, 1, [[5], [5]]),
    ],
)
def test_every_pod_gets_an_equal_share_of_the_cpus(
    available: list[int], nodes: int, limit: int | None, slices: list[list[int]]
) -> None:
    assert [cpu_share(available, rank, nodes, limit) for rank in range(nodes)] == slices


def test_pod_has_a_cpu_limit_only_if_all_containers_have_one() -> None:
    small, large = ({"resources": {"limits": {"cpu": amount}}} for amount in ("300m", "1500m"))
    assert cpu_limit(a_pod(a_container(**small), a_container("b", **large))) == 2
    assert cpu_limit(a_pod(a_container(**small), a_container("b"))) is None
    assert cpu_limit(a_pod(a_container(**small))) == 1


def test_pods_share_the_rendezvous_port_and_have_own_progress_ports() -> None:
    shared = Ports(rendezvous=29500, progress=29501)
    first, second, later = "job-0a1b2-1-0", "job-0a1b2-1-1", "job-0a1b2-2-0"
    assert shared.of(first, 29500) == shared.of(second, 29500) != shared.of(later, 29500)
    assert len({shared.of(pod, 29501) for pod in (first, second, later)}) == 3
    assert shared.of(first, 29501) == shared.of(first, 29501)
    assert shared.of(first, 8080) == 8080


def test_port_with_a_listener_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        assert not resources._is_free(listener.getsockname()[1])


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        monkeypatch.setattr(resources, "_candidates", lambda: (port, port))
        with pytest.raises(LocalError, match="is free"):
            resources.free_port(set())


def test_free_port_is_outside_the_ephemeral_range() -> None:
    with socket.socket() as outgoing:
        outgoing.bind(("127.0.0.1", 0))
        ephemeral = outgoing.getsockname()[1]
    low = int(resources._RANGE_FILE.read_text().split()[0])
    if low <= 2048:
        pytest.skip("this machine's kernel leaves no ports below its own range")
    taken: set[int] = set()
    for _ in range(20):
        taken.add(resources.free_port(taken))
    assert len(taken) == 20
    assert max(taken) < low <= ephemeral


def test_visible_gpus_are_those_of_cuda_visible_devices(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-ab"}, tmp_path) == ["2", "GPU-ab"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []
    assert visible_gpus({}, tmp_path / "none") == []


@pytest.mark.parametrize(
    ("devices", "wanted", "shares"),
    [
        (["0", "1", "2", "3"], 2, [["0", "1"], ["2", "3"]]),
        (["0", "1"], 1, [["0"], ["1"]]),
        (["5"], 1, [["5"], ["5"]]),
        (["0", "1"], 0, [[], []]),
        ([], 2, [[], []]),
        (["0"], 8, [["0"], ["0"]]),
    ],
)
def test_pods_get_the_gpus_of_their_limits_and_share_if_there_are_too_few(
    devices: list[str], wanted: int, shares: list[list[str]]
) -> None:
    assert [gpu_share(devices, rank, wanted) for rank in range(2)] == shares


def test_container_without_a_gpu_limit_gets_no_gpu() -> None:
    assert gpu_limit(a_container(resources={"limits": {"nvidia.com/gpu": 2}})) == 2
    assert gpu_limit(a_container(resources={"limits": {"nvidia.com/gpu": "2"}})) == 2
    assert gpu_limit(a_container(resources={"limits": {"amd.com/gpu": 1, "nvidia.com/mig-1g.5gb": 2}})) == 3
    assert gpu_limit(a_container(resources={"limits": {"nvidia.com/gpu": "500m"}})) == 0
    assert gpu_limit(a_container()) == 0
