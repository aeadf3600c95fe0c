"""The ranks of a job on a cluster: a real launcher, which the API server reaches at the address of the pod."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from ddpjob import DDPJob
from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.errors import NotAllowedError, UnavailableError
from tests.client.worlds import READS_JOBS, TIME, ClusterWorld
from tests.processes import end, eventually, free_port, spawn

pytestmark = pytest.mark.apiserver
SCRIPT = """
import itertools, time
import ddprun
for step in itertools.count(1):
    ddprun.report(step=step)
    time.sleep(0.05)
"""


def own_address() -> str:
    """Return an address of this machine that is not of the loopback, at which an API server refuses pods."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but the loopback")
        return str(probe.getsockname()[0])


def run_job(world: ClusterWorld, port: int, command: list[str]) -> DDPJob:
    """Submit a job whose node 0 has its pod at this machine's address."""
    job = DDPJob("mnist", image="none", command=command, rendezvous={"progressPort": port})
    made = world.client.submit(job)
    current = {"number": 1, "phase": "Running", "startTime": TIME}
    world.patch(made, state="Running", attempt=1, currentAttempt=current)
    core, pod = f"/api/v1/namespaces/{world.namespace}/pods", names.pod_name("mnist", str(made.uid), 1, 0)
    spec: Json = {"containers": [{"name": names.TRAINER_CONTAINER, "image": "none"}]}
    world.plane.request("POST", core, {"metadata": {"name": pod}, "spec": spec})
    status = {"phase": "Running", "podIP": own_address(), "podIPs": [{"ip": own_address()}]}
    world.plane.request("PATCH", f"{core}/{pod}/status", {"status": status})
    return made


def test_the_ranks_come_through_the_api_server_with_the_rights_of_edit_and_not_of_view(
    world: ClusterWorld, tmp_path: Path
) -> None:
    port = free_port()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ranks = {"NPROC_PER_NODE": "2", "PET_NPROC_PER_NODE": "2", "MASTER_ADDR": own_address()}
    env = {**os.environ, "DDPJOB_PROGRESS_PORT": str(port), **ranks}
    launcher = spawn([sys.executable, "-m", "ddprun", script], tmp_path / "log", env)
    try:
        job = run_job(world, port, ["ddprun", "train.py"])
        with world.user(READS_JOBS, roles=["system:aggregate-to-edit"]) as editor:

            def measured() -> bool:
                try:
                    return all(rank.step_seconds for rank in editor.ranks(job).ranks)
                except UnavailableError:
                    return False  # the launcher starts, or the roles are not in effect

            eventually("the ranks have a speed", measured, timeout=120)
            seen = editor.ranks("mnist")
            assert ([rank.rank for rank in seen.ranks], seen.attempt, seen.world_size) == ([0, 1], 1, 2)
            assert seen.place == editor.place
        with world.user(READS_JOBS, roles=["system:aggregate-to-view"]) as viewer:
            assert viewer.get("mnist").state == "Running"
            with pytest.raises(NotAllowedError, match="pods/proxy") as refused:
                viewer.ranks("mnist")
        assert "the right to get pods/proxy, which the role edit" in refused.value.hint
    finally:
        end(launcher)


def test_a_pod_without_a_launcher_is_explained(world: ClusterWorld) -> None:
    run_job(world, free_port(), ["torchrun", "train.py"])
    with pytest.raises(UnavailableError, match="runs under torchrun"):
        world.client.ranks("mnist")
    other = world.client.submit(DDPJob("pending", image="none", command=["ddprun", "train.py"]))
    with pytest.raises(UnavailableError, match="no rank of pending runs"):
        world.client.ranks(other)
