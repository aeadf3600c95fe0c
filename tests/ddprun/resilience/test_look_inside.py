"""The stacks of all ranks of two nodes, and a profile of their steps, from the port of node 0."""

from __future__ import annotations

import base64
import gzip
import json
import mmap
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ddpjob.client.profile import take_profile
from ddpjob.client.stacks import take_stacks
from ddpjob.errors import UnavailableError
from ddprun import shared_text
from ddprun.diagnostics import Diagnostics
from ddprun.distributed.topology import Ranks
from ddprun.heartbeat import Heartbeat
from ddprun.launcher import look_inside
from ddprun.launcher.look_inside import LookInside
from ddprun.launcher.peers import NodeFindings, Peers
from ddprun.launcher.processes import WorkerProcess
from ddprun.reporting.http_port import Request
from ddprun.shared_text import SharedText
from ddprun.step_profile import SIZE, TRACE_AT
from tests.ddprun.resilience.scripts import two_nodes
from tests.ddprun.resilience.test_rank_table import answer
from tests.ddptrain.runs import ForkServer, Run, wait_until

UID = "6dd7fe46-4d5a-4a4c-9de3-0a4a1b3b7c11"
HEAD = {"job": "mnist", "namespace": "default", "place": "here", "attempt": 1}
HANGS = """
import os, sys
import torch
import torch.distributed as dist
from dataset import wait_for

dist.init_process_group("gloo")
if dist.get_rank() == 3:
    wait_for(sys.argv[1])
dist.all_reduce(torch.ones(1))
"""
DATASET = """
import os, time

def wait_for(file):
    while not os.path.exists(file):
        time.sleep(0.05)
"""
TRAINS = """
import hashlib, os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, end = dist.get_rank(), sys.argv[1]
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
done = torch.zeros(1)
while not done:
    optimizer.zero_grad()
    if rank == 1:
        time.sleep(0.02)
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    steps = globals().get("steps", 0) + 1
    done = torch.tensor([float(steps == int(end) if end.isdigit() else os.path.exists(end))])
    dist.all_reduce(done)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("ended", steps, hashlib.sha256(weights).hexdigest())
"""


class Asked:
    """Sends requests as a client does."""

    def __init__(self, run: Run, uid: str = UID) -> None:
        self._run, self._uid = run, uid

    def __call__(self, method: str, path: str) -> bytes:
        url = f"http://127.0.0.1:{self._run.progress_port}/jobs/{self._uid}/{path}"
        request = urllib.request.Request(url, method=method)
        with urllib.request.urlopen(request, timeout=10) as found:  # noqa: S310
            return bytes(found.read())


def test_stacks_show_the_rank_in_its_own_code_and_the_ranks_that_wait_for_it(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(HANGS)
    (tmp_path / "dataset.py").write_text(DATASET)
    flags = tuple(("--log-dir", tmp_path / f"logs-{node}") for node in (0, 1))
    runs = two_nodes(ddptrain, script, go, ranks=2, env={"DDPJOB_UID": UID}, flags=flags)
    ask = Asked(runs[0])
    wait_until(lambda: len(answer(runs[0], "ranks").get("ranks", [])) == 4, "all ranks are known")

    def places() -> list[tuple[str, str | None, list[int]]]:
        assert not runs[0].ended, runs[0].output()
        seen = take_stacks(HEAD, ask)
        return [(group[0].does, group[0].where, [rank.rank for rank in group]) for group in seen.groups]

    waits, works = f"train.py:{HANGS.count(chr(10))}", f"dataset.py:{DATASET.count(chr(10))}"
    expected = [("waits in all_reduce", waits, [0, 1, 2]), ("works in phase start", works, [3])]
    wait_until(lambda: places() == expected, "the groups")
    assert "wait_for" in take_stacks(HEAD, ask).ranks[3].stacks
    with ThreadPoolExecutor() as clients:
        tables = [clients.submit(take_stacks, HEAD, ask) for _ in range(4)]
        assert all(len(table.result().ranks) == 4 for table in tables), "clients at the same time share an inspection"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        Asked(runs[0], UID[:-1] + "2")("POST", "stacks")
    pid = runs[1].ranks()[1]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: take_stacks(HEAD, ask).ranks[3].stopped, "the rank is stopped")
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(UnavailableError, match="no step of an optimizer is known"):
        take_profile(HEAD, ask, 5, tmp_path / "trace.gz", timeout=60, on_progress=None)
    go.touch()
    assert [run.wait() for run in runs] == [0, 0]
    assert not list(tmp_path.rglob("*stack*")), "it is no stall, so no file is written"


def test_a_profile_has_the_steps_of_all_ranks_and_the_training_loses_none(ddptrain: ForkServer, tmp_path: Path) -> None:
    script, go, to = tmp_path / "train.py", tmp_path / "go", tmp_path / "trace.json.gz"
    script.write_text(TRAINS)
    runs = two_nodes(ddptrain, script, go, env={"DDPJOB_UID": UID})

    def has_steps() -> bool:
        assert not runs[0].ended, runs[0].output()
        rows = answer(runs[0], "ranks").get("ranks", [])
        return len(rows) == 2 and all(row["stepSeconds"] for row in rows)

    wait_until(has_steps, "the ranks make steps")
    found = take_profile(HEAD, Asked(runs[0]), 5, to, timeout=100, on_progress=None)
    assert [(rank.rank, rank.node, rank.state, rank.steps) for rank in found.ranks] == [
        (0, 0, "done", 5), (1, 1, "done", 5),
    ]  # fmt: skip
    assert len({rank.first for rank in found.ranks}) == 1, "both begin at the same step"
    assert found.not_aligned == [] and abs(found.clock_offsets[1]) < 0.5, "the nodes share the clock of this machine"
    quick, late = found.ranks
    assert quick.waits_for == 1 and (quick.wait_seconds or 0) > (late.wait_seconds or 0)
    assert {wait.collective for wait in found.waits} == {"gloo:all_reduce"}
    events: list[dict[str, Any]] = json.loads(gzip.decompress(to.read_bytes()))["traceEvents"]
    steps = [(event["pid"], event["name"]) for event in events if event["name"].startswith("ProfilerStep#")]
    assert sorted(steps) == [(rank, f"ProfilerStep#{step}") for rank in (0, 1) for step in range(1, 6)]
    go.touch()
    assert [run.wait() for run in runs] == [0, 0]
    ending = next(line for line in runs[0].output().splitlines() if "ended" in line).split("ended ")[1]
    again = two_nodes(ddptrain, script, ending.split()[0])
    assert [run.wait() for run in again] == [0, 0]
    assert f"ended {ending}" in again[0].output(), "the same steps without a profile have the same result"


class Node0:
    """The only launcher of a job, with a rank whose answers this test writes."""

    def __init__(self) -> None:
        self.peers = Peers(Ranks(), None)
        self.look = LookInside(Ranks(), self.peers, lambda: 10.0, {"DDPJOB_UID": UID})
        self.start()

    def start(self) -> None:
        self.worker = WorkerProcess(0, os.getpid(), -1, -1, Diagnostics.create(0))
        Heartbeat(self.worker.diagnostics.memory()).mark("train", 7)
        self._said = SharedText(memoryview(mmap.mmap(self.worker.diagnostics.profile, SIZE))[: shared_text.SIZE])
        self.look.follow([self.worker])

    def ask(self, method: str, path: str) -> dict[str, Any]:
        found = self.look.answer(Request(method.encode(), f"/jobs/{UID}/{path}".encode(), {}, b"", 0))
        assert found is not None
        return found[1]

    def say(self, number: int, state: str, trace: bytes = b"") -> None:
        os.pwrite(self.worker.diagnostics.profile, trace, TRACE_AT)
        self._said.write(json.dumps({"number": number, "state": state, "bytes": len(trace)}))

    def states(self, number: int) -> list[str]:
        return [row["state"] for row in self.ask("GET", f"profile/{number}")["ranks"]]


@pytest.fixture
def node() -> Iterator[Node0]:
    node = Node0()
    yield node
    node.worker.diagnostics.close()


def test_ranks_that_were_started_again_were_not_asked(node: Node0) -> None:
    number = node.ask("POST", "profile/5/60")["number"]
    assert node.states(number) == ["asked"]
    node.look.follow(())
    node.worker.diagnostics.close()
    node.start()
    assert node.states(number) == ["ended"]
    assert node.states(node.ask("POST", "profile/5/60")["number"]) == ["asked"], "a new profile may begin at once"


def test_traces_are_kept_while_a_client_reads_them_and_then_deleted(
    node: Node0, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, trace = node.ask("POST", "profile/5/1")["number"], b"x" * 3000
    assert node.ask("POST", "profile/5/1")["refused"][0] == "another profile runs"
    node.say(number, "done", trace)

    def part() -> bytes:
        return base64.b64decode(node.ask("GET", f"profile/{number}/0/2000")["data"])

    assert part() == trace[2000:]
    assert "a client reads" in node.ask("POST", "profile/5/1")["refused"][0] and part() == trace[2000:]
    monkeypatch.setattr(look_inside, "_READING", -60.0)
    monkeypatch.setattr(node.look, "_until", 1.0)  # the time of the profile is over for long
    node.look.turn()
    assert part() == trace[2000:], "it was read a moment ago"
    monkeypatch.setattr(look_inside, "_KEPT", -60.0)
    node.look.turn()
    assert part() == b"" and os.fstat(node.worker.diagnostics.profile).st_blocks * 512 <= SIZE
    assert "number" in node.ask("POST", "profile/5/1"), "nobody reads any longer"


def test_a_client_gets_only_an_inspection_that_has_begun_after_its_request(node: Node0) -> None:
    def inspected() -> None:
        node.peers.give(NodeFindings(0))
        node.look.take(node.peers.findings())
        node.peers.settle("")

    node.peers.ask()
    number = node.ask("POST", "stacks")["number"]
    inspected()
    assert "ranks" not in node.ask("GET", f"stacks/{number}") and node.look.wants_stacks
    node.peers.ask(is_look=True)
    assert not node.look.wants_stacks
    inspected()
    assert node.ask("GET", f"stacks/{number}")["ranks"] == []
    assert "ranks" not in node.ask("GET", f"stacks/{node.ask('POST', 'stacks')['number']}")


def test_answers_have_a_limit_of_rows(node: Node0, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_inside, "MOST_RANKS", 0)
    found = node.ask("GET", f"profile/{node.ask('POST', 'profile/5/1')['number']}")
    assert (found["omittedRanks"], found["ranks"], found["missingNodes"]) == (1, [], [])
