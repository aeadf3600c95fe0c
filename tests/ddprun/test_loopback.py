"""On which addresses a training of one machine listens: the store, the launchers' port and gloo."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ddprun.distributed.topology import loopback_of
from tests.ddprun.resilience.scripts import two_nodes
from tests.ddptrain.runs import ForkServer, Run, wait_until
from tests.processes import free_port, listening

SCRIPT = """
import pathlib, sys, time
import torch, torch.distributed as dist
for start in (1, 2):  # the second group has the same store
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    pathlib.Path(sys.argv[1], f"{start}-{dist.get_rank()}").touch()
    while start == 2 and not pathlib.Path(sys.argv[1], "go").exists():
        time.sleep(0.02)
    dist.destroy_process_group()
"""
GLOO = {"GLOO_SOCKET_IFNAME": "lo"}  # by itself it takes the address of the hostname
LOOPBACK = {"127.0.0.1", "::1"}


def own_address() -> str:
    """Return an address of this machine that other machines can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


def nodes(server: ForkServer, folder: Path, address: str) -> list[Run]:
    (folder / "train.py").write_text(SCRIPT)
    env = {"PET_MASTER_ADDR": address, "DDPJOB_INPLACE_RESTARTS": 1, **GLOO}
    return two_nodes(server, folder / "train.py", folder, env=env)


def bound(runs: list[Run], folder: Path) -> dict[int, set[str]]:
    """Return where the runs listen when all have met, and let them end."""
    what = "two ranks with a second group"

    def met() -> bool:
        assert not any(run.ended for run in runs), [run.output() for run in runs]
        return (folder / "2-0").exists() and (folder / "2-1").exists()

    wait_until(met, what)
    found: dict[int, set[str]] = {}
    for run in runs:
        for port, addresses in listening(run.pid).items():
            found[port] = found.get(port, set()) | addresses
    (folder / "go").touch()
    assert [run.wait() for run in runs] == [0] * len(runs), [run.output() for run in runs]
    return found


def test_single_node_listens_on_loopback_only(ddptrain: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    argv = ("--standalone", "--nproc-per-node", 2, tmp_path / "train.py", tmp_path)
    run = ddptrain.start(*argv, env=GLOO, module="ddprun")
    found = bound([run], tmp_path)
    assert run.progress_port in found and len(found) > 2  # the store and gloo, too
    assert set.union(*found.values()) <= LOOPBACK


def test_nodes_of_one_machine_listen_on_loopback_only(ddptrain: ForkServer, tmp_path: Path) -> None:
    runs = nodes(ddptrain, tmp_path, "localhost")
    found = bound(runs, tmp_path)
    assert len(found) > 2 and set.union(*found.values()) <= LOOPBACK
    assert "all 2 launchers take part" in runs[0].output()  # they reach each other


def test_nodes_that_others_must_reach_listen_on_all_addresses(ddptrain: ForkServer, tmp_path: Path) -> None:
    runs = nodes(ddptrain, tmp_path, own_address())
    addresses = bound(runs, tmp_path).values()
    assert sum(not found.isdisjoint({"0.0.0.0", "::"}) for found in addresses) >= 2  # noqa: S104 - store and launcher
    assert "all 2 launchers take part" in runs[0].output()


def test_trainer_listens_on_loopback_only(ddptrain: ForkServer, tmp_path: Path) -> None:
    argv = ("train", "--data", "digits", "--epochs", 500, "--checkpoint-dir", tmp_path)
    for env in ({"NPROC_PER_NODE": 2}, {"NPROC_PER_NODE": 2, "MASTER_PORT": free_port()}):
        run = ddptrain.start(*argv, env=env)
        run.at_step(2)
        found = listening(run.pid)
        run.stop()
        run.wait()
        assert len(found) > 2 and set.union(*found.values()) <= LOOPBACK


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("127.3.2.1", "127.3.2.1"), ("::1", "::1"),
        ("10.0.0.1", None), ("0.0.0.0", None), ("::", None), ("localhost.example.com", None), ("", None),  # noqa: S104
    ],
)  # fmt: skip
def test_loopback_of_a_host(host: str, wanted: str | None) -> None:
    assert loopback_of(host) == wanted
