"""The ranks of a job on a cluster: the API server reaches the launcher at the address of the pod."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ddpjob import DDPJob
from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.errors import NotAllowedError, UnavailableError
from tests.client.worlds import READS_JOBS, TIME, ClusterWorld
from tests.processes import free_port

pytestmark = pytest.mark.apiserver


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


paths = {"/ranks"}
"""What is answered; a job adds its own."""


class Launcher(BaseHTTPRequestHandler):
    """Answers as the launcher of node 0."""

    def do_GET(self) -> None:
        rank = {"rank": 0, "node": 0, "step": 7, "phase": "train", "collective": "", "age_seconds": 0.1}
        stacks = {"quiet": 0.5, "stopped": False, "answered": True, "where": "train.py:9", "stacks": "…"}
        self.says({"world_size": 1, "number": 1, "ranks": [rank | (stacks if "stacks" in self.path else {})]})

    def do_POST(self) -> None:
        self.says({"number": 1})

    def says(self, answer: Json) -> None:
        body = json.dumps(answer).encode() if self.path in paths else b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_the_ranks_come_through_the_api_server_with_the_rights_of_edit_and_not_of_view(world: ClusterWorld) -> None:
    with ThreadingHTTPServer((own_address(), 0), Launcher) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        job = run_job(world, server.server_port, ["ddprun", "train.py"])
        paths.update({f"/jobs/{job.uid}/stacks", f"/jobs/{job.uid}/stacks/1"})
        with world.user(READS_JOBS, roles=["system:aggregate-to-edit"]) as editor:
            seen = editor.ranks("mnist")
            assert ([(rank.rank, rank.step) for rank in seen.ranks], seen.attempt, seen.world_size) == ([(0, 7)], 1, 1)
            assert seen.place == editor.place
            [group] = editor.stacks("mnist").groups
            assert (group[0].does, group[0].where) == ("works in phase train", "train.py:9")
        with world.user(READS_JOBS, roles=["system:aggregate-to-view"]) as viewer:
            assert viewer.get("mnist").state == "Running"
            with pytest.raises(NotAllowedError, match="pods/proxy") as refused:
                viewer.ranks("mnist")
            with pytest.raises(NotAllowedError) as too:
                viewer.stacks("mnist")
        assert "the right to get pods/proxy, which the role edit" in refused.value.hint
        assert "the right to create pods/proxy, which the role edit" in too.value.hint
        server.shutdown()


def test_a_pod_without_a_launcher_is_explained(world: ClusterWorld) -> None:
    run_job(world, free_port(), ["torchrun", "train.py"])
    with pytest.raises(UnavailableError, match="runs under torchrun"):
        world.client.ranks("mnist")
    other = world.client.submit(DDPJob("pending", image="none", command=["ddprun", "train.py"]))
    with pytest.raises(UnavailableError, match="no rank of pending runs"):
        world.client.ranks(other)
