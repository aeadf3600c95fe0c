"""``ddpjob ui`` on a real API server, which is away for a while, and with the rights of its user alone."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from ddpjob.api import names
from tests.cli.program import Program
from tests.cli.test_on_cluster import user
from tests.client.worlds import TIME, ClusterWorld
from tests.processes import eventually
from tests.ui.conftest import Pages, served
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import Fault, FaultProxy

pytestmark = pytest.mark.apiserver
AWAY = "does not answer"


@pytest.fixture
def world(control_plane: ControlPlane, namespace: str, proxy: FaultProxy) -> Iterator[ClusterWorld]:
    made = ClusterWorld(control_plane, namespace)
    with made.client:
        yield made


def on_cluster(ddpjob: Program, world: ClusterWorld, proxy: FaultProxy) -> Program:
    """Return the program with all rights, behind the proxy."""
    config = world.plane.kubeconfig(name=f"{world.namespace}-ui", server=proxy.server, namespace=world.namespace)
    return Program(ddpjob.folder, ddpjob.environment | {"KUBECONFIG": str(config)})


def test_a_job_is_followed_while_the_api_server_is_away_and_back(
    ddpjob: Program, world: ClusterWorld, proxy: FaultProxy
) -> None:
    job = world.client.submit(world.job("mnist"))
    world.run(job)
    with served(on_cluster(ddpjob, world, proxy)) as pages:
        page = f"jobs/{world.namespace}/mnist"
        has(pages, page, ">Running<")
        eventually("the watch is open", lambda: any("watch=true" in seen.path.lower() for seen in proxy.seen))
        proxy.rule = lambda request: Fault(status=503)
        proxy.cut()
        has(pages, page, AWAY)
        has(pages, "", AWAY)
        assert ">Running<" in pages(page).text, "what was seen last stays"
        progress = {"display": "7", "step": 7, "loss": "0.5", "lastHeartbeatTime": TIME}
        world.patch(job, progress=progress, state="Running")
        proxy.rule = lambda request: None
        has(pages, page, "step 7")
        assert AWAY not in pages(page).text
        world.plane.request("DELETE", f"{names.DDPJOBS.path(world.namespace)}/mnist")
        eventually("it is not listed", lambda: "mnist" not in pages().text)


def test_pages_of_all_jobs_send_no_request_beside_the_watch(
    ddpjob: Program, world: ClusterWorld, proxy: FaultProxy
) -> None:
    for number in range(20):
        world.client.submit(world.job(f"job-{number}"))
    with served(on_cluster(ddpjob, world, proxy)) as pages:
        has(pages, "", "job-19")
        eventually("the watch is open", lambda: any("watch=true" in seen.path.lower() for seen in proxy.seen))
        before = len(proxy.seen)
        for _ in range(5):
            assert "job-7" in pages("?q=job-7").text
        assert len(proxy.seen) == before, "pages send no request"


def test_a_user_without_rights_is_told_so(ddpjob: Program, world: ClusterWorld) -> None:
    with user(ddpjob, world, "stranger").started("ui", "--no-browser") as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert [line[:7] for line in said.splitlines()] == ["error: ", "hint:  ", "next:  "]
    assert "not allowed" in said


def has(pages: Pages, path: str, text: str) -> None:
    """Wait until a page has a text."""

    def found() -> bool:
        try:
            return text in pages(path).text
        except http.client.HTTPException:
            return False

    eventually(f"{path or 'the page of all jobs'} has {text!r}", found, timeout=120)
