"""Launchers restart the ranks of a script in place on all nodes, and end the attempt where that does not help."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddprun import proc
from ddprun.diagnostics import Diagnostics
from ddprun.distributed.topology import Ranks
from ddprun.launcher.agreement import Agreement
from ddprun.launcher.life_messages import Abort, End, Release, Start
from ddprun.launcher.lives import Connected, Received
from ddprun.launcher.look_inside import LookInside
from ddprun.launcher.node_progress import NodeProgress
from ddprun.launcher.orphans import Orphans
from ddprun.launcher.peers import Peers
from ddprun.launcher.processes import WorkerProcess, launcher_line
from ddprun.launcher.rank_table import NodeRanks
from ddprun.launcher.services import Services
from ddprun.launcher.supervisor import LaunchOptions, Supervisor
from ddprun.script import Script
from ddprun.settings import Settings
from ddprun.signals import STOP_SIGNALS, SignalQueue
from tests.ddprun.resilience.scripts import two_nodes
from tests.ddptrain.builders import RESUMED, SAVING, node, place, rank_state
from tests.ddptrain.runs import ForkServer, Run, Whole, assert_same_end, wait_until
from tests.processes import free_port

pytestmark = pytest.mark.together

# Continues after the step that rank 0 has written, until the file ``go`` exists.
TRAINING = """
import datetime, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import ddprun

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved, goes_on, done = folder / "step", torch.ones(1), 0
step = int(saved.read_text()) if saved.exists() else 0
print("continues after step", step, flush=True)
while goes_on:
    model(torch.ones(8, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    step, done = step + 1, done + 1
    if rank == 0:
        (folder / "new").write_text(str(step))
        (folder / "new").rename(saved)
        ddprun.report(step=step)
        goes_on[0] = 0 if (folder / "go").exists() else 1
    if done <= 4 and (folder / f"raise-{rank}").exists():
        raise ValueError("wrong")
    if (folder / f"hang-{rank}").exists():
        (folder / f"hang-{rank}").unlink()
        time.sleep(3600)
    dist.broadcast(goes_on, 0)
    time.sleep(0.02)
dist.destroy_process_group()
"""


class TwoNodes:
    """The launchers of two nodes, which share a directory."""

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        *,
        ranks: int = 1,
        grant: int = 5,
        script: str = TRAINING,
        flags: Sequence[object] = (),
        env: Mapping[str, object] = {},
    ) -> None:
        self.folder = folder
        file = folder / "train.py"
        file.write_text(script)
        of_job = {"DDPJOB_UID": "uid", "DDPJOB_ATTEMPT": 1, "DDPJOB_INPLACE_RESTARTS": grant, **env}
        argv = ("--log-dir", folder / "logs", *flags, file, folder)
        self.runs = two_nodes(server, *argv, ranks=ranks, env=of_job)

    def trains(self, life: int, more_than: int = 3) -> dict[str, Any]:
        """Wait until this life has made more than so many steps, and return the progress report."""

        def reached() -> dict[str, Any] | None:
            assert not any(run.ended for run in self.runs), self.output()
            now = self.runs[0].progress()
            if now is None or now["life"] != life or now["step"] <= more_than:
                return None
            is_timed = life == 1 or now["lives"][-1]["recoveryMilliseconds"] is not None
            return now if is_timed else None

        wait_until(lambda: "all 2 launchers take part" in self.output(), "the launchers to be connected")
        return dict(wait_until(reached, f"life {life} to make {more_than + 1} steps"))

    def kill(self, number: int, local_rank: int = 0) -> int:
        """Kill a rank of a node, and return how many steps the life has made; it may have gone on since ``trains``."""
        writer = self.runs[0].ranks()[0]
        os.kill(self.runs[number].ranks()[local_rank], signal.SIGKILL)
        wait_until(lambda: writer not in self.runs[0].ranks().values(), "rank 0 to end")
        return int((self.folder / "step").read_text())

    def finish(self) -> None:
        (self.folder / "go").touch()
        assert [run.wait() for run in self.runs] == [0, 0], self.output()

    def output(self) -> str:
        return "\n".join(run.output() for run in self.runs)


def descriptors(run: Run) -> int:
    return len(list(Path(f"/proc/{run.pid}/fd").iterdir()))


def test_killed_ranks_are_restarted_in_place_on_all_nodes(ddptrain: ForkServer, tmp_path: Path) -> None:
    nodes = TwoNodes(ddptrain, tmp_path, ranks=2)
    nodes.trains(1)
    os.mkfifo(tmp_path / "logs" / "rank-3.life-2.log")  # as on a volume that does not answer: nobody reads it
    nodes.trains(2, nodes.kill(1, 1))
    assert all(len(run.ranks()) == 2 for run in nodes.runs), "no process of the life before is left"
    before = [descriptors(run) for run in nodes.runs]
    nodes.trains(3, nodes.kill(0))
    report = nodes.trains(4, nodes.kill(1))
    # A life that left its pipes open would leave eight; a request for progress may have one.
    assert all(descriptors(run) < one + 4 for run, one in zip(nodes.runs, before, strict=True))
    assert [(life["node"], life["rank"], life["progressed"]) for life in report["lives"]] == [
        (1, 3, True), (0, 0, True), (1, 2, True),
    ]  # fmt: skip

    def times() -> list[int] | None:
        found = [life["recoveryMilliseconds"] for life in (nodes.runs[0].progress() or report)["lives"]]
        return found if all(found) else None

    assert max(wait_until(times, "the time of the last restart")) < 60_000
    nodes.finish()
    assert nodes.runs[0].message()["life"] == 4
    names = [f"rank-{rank}{life}.log" for rank in range(4) for life in ("", ".life-2", ".life-3", ".life-4")]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == sorted(names)
    assert "warning: --log-dir: " not in nodes.runs[0].output()
    assert f"warning: --log-dir: {tmp_path / 'logs'} takes no output" in nodes.runs[1].output()
    for run in nodes.runs:
        assert "restart in place 1 of 5: node 1: rank 3 was killed by SIGKILL" in run.output()
        assert run.output().count("continues after step 0") == 2
        assert run.output().count("continues after step") == 8


def test_rank_that_ends_by_itself_is_blamed_although_its_launcher_has_not_heard_of_its_end() -> None:
    rank = subprocess.Popen(["sleep", "600"])
    try:
        assert not proc.is_exiting(rank.pid)
        rank.kill()
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        assert proc.is_exiting(rank.pid)
        worker = WorkerProcess(1, rank.pid, -1, -1, Diagnostics.create(1))
        supervisor = object.__new__(Supervisor)
        supervisor._workers = [worker]
        supervisor._kill()
        assert not worker.killed_by_us
        worker.diagnostics.close()
    finally:
        rank.kill()
        rank.wait()


def test_life_that_is_ended_before_it_could_start_is_ended_by_its_own_supervisor() -> None:
    ranks = Ranks(nnodes=2, node_rank=1, world_size=2)
    peers = Peers(ranks, None)
    agreed = Agreement(ranks, peers, 5, NodeProgress(2))
    peers.life_events += [Connected(), Received(Abort(1))]
    assert agreed.turn() and agreed.must_end
    agreed.ended(healthy=True, failure=None)
    # A rank of another node has failed while this launcher did not run: it hears of both at once.
    peers.life_events += [Received(Start(2, 29500)), Received(Abort(2))]
    assert not agreed.turn()
    assert agreed.next_life is not None and not agreed.must_end
    agreed.begin(2)
    assert agreed.turn() and agreed.must_end and agreed.next_life is None


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """The supervisor of a node that trains alone, whose rank it has just killed."""
    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
    settings, peers, progress = Settings(checkpoint_dir=str(tmp_path)), Peers(Ranks(), None), NodeProgress(1)
    agreement = Agreement(Ranks(), peers, 5, progress)
    look = LookInside(Ranks(), peers, float)
    services = Services(progress, peers, NodeRanks(Ranks(), peers, progress), look, agreement, None)
    options = LaunchOptions(Script("script", "train.py", (), settings))
    found = Supervisor(settings, Ranks(), options, SignalQueue(), None, services)
    found._workers = [WorkerProcess(0, 0, -1, -1, Diagnostics.create(0), status=signal.SIGKILL, killed_by_us=True)]
    yield found
    found._workers[0].diagnostics.close()
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_signal_that_comes_with_the_next_life_reaches_its_ranks(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_empty(_: Orphans) -> bool:
        supervisor.signals.pending.append(signal.SIGTERM)  # at the moment at which the node says that it is ready
        return True

    monkeypatch.setattr(Orphans, "is_empty", property(is_empty))
    with selectors.DefaultSelector() as selector:
        supervisor._await_next_life(selector)
    assert supervisor._agreed.next_life is not None
    assert supervisor.signals.pending == [signal.SIGTERM] and supervisor.stop_signal is None


def test_signal_that_was_passed_on_ends_the_wait_for_the_files_of_a_stall(supervisor: Supervisor) -> None:
    assert not supervisor._watch._is_told_to_stop()
    supervisor.signals.pending.append(signal.SIGTERM)
    supervisor._pass_on_signals()
    assert supervisor._watch._is_told_to_stop() and not supervisor.signals.pending


def test_report_of_a_node_whose_ranks_others_have_ended(supervisor: Supervisor, tmp_path: Path) -> None:
    (tmp_path / "run-000001").mkdir()
    (tmp_path / "run-000001" / "step-000000005.json").touch()
    told = End(1, "a signal has stopped node 1")
    lost = supervisor._report_of_exit(told)
    assert (lost["code"], lost["checkpoint"]) == (77, place(1, 5))
    supervisor.stop_signal = signal.SIGTERM
    stopped = supervisor._report_of_exit(told)
    assert (stopped["code"], stopped["saved"], stopped["checkpoint"]) == (75, False, place(1, 5))
    assert stopped["message"] == "SIGTERM came, and the ranks were killed before they could save"


def test_rank_that_was_stalled_until_its_peers_gave_it_up_is_blamed(supervisor: Supervisor) -> None:
    assert supervisor._failure() is None
    supervisor._watch.states, supervisor._watch._since = [rank_state(0, collective="", phase="step")], 1.0
    failure = supervisor._failure()
    assert failure is not None and (failure.kind, failure.cause, failure.rank) == ("Hang", "own", 0)


@pytest.mark.parametrize(("step", "is_blamed"), [(0, True), (1, False)])
def test_rank_that_hung_within_a_longer_limit_than_its_peers_is_blamed(
    supervisor: Supervisor, step: int, *, is_blamed: bool
) -> None:
    """The launcher of the peers has ended the life: the rank has made no progress since all were inspected."""
    supervisor._detector.timeout = 10
    supervisor._watch.states = [rank_state(0, collective="", phase="start", step=step, collectives=0, quiet=9.0)]
    failure = supervisor._failure()
    assert (failure is not None and (failure.kind, failure.cause) == ("Hang", "own")) == is_blamed


def test_message_of_a_failed_rank_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    launcher_line("restart in place 1 of 5: node 1: \x1b[2J\udcff wrong")
    assert capsys.readouterr().out == "restart in place 1 of 5: node 1: \\x1b[2J\\udcff wrong\n"


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("node 1 is absent", "no restart in place: node 1 is absent; this attempt ends on all nodes, and "),
        ("", ""),
    ],
)
def test_line_says_why_no_life_follows(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str], reason: str, said: str
) -> None:
    supervisor._agreed.orders.append(Release(1, reason))
    assert not supervisor._agreed.obey()
    out = capsys.readouterr().out
    assert said in out if said else not out


def test_exception_at_the_same_step_ends_the_attempt_after_one_restart(ddptrain: ForkServer, tmp_path: Path) -> None:
    nodes = TwoNodes(ddptrain, tmp_path)
    nodes.trains(1, 6)
    (tmp_path / "raise-1").touch()
    nodes.kill(0)
    assert [run.wait() for run in nodes.runs] == [77, 1], nodes.output()
    peer, own = (run.message() for run in nodes.runs)
    assert (own["exception"], own["cause"], own["rank"]) == ("ValueError", "own", 1)
    assert peer["cause"] == "peer" and peer["life"] == 3
    assert (peer["root"]["node"], peer["root"]["code"], peer["root"]["exception"]) == (1, 1, "ValueError")
    assert "no restart in place: the same exception at the same step" in nodes.runs[0].output()


@pytest.mark.parametrize("lost", [0, 1])
def test_group_ends_when_a_launcher_is_killed(ddptrain: ForkServer, tmp_path: Path, lost: int) -> None:
    nodes = TwoNodes(ddptrain, tmp_path)
    nodes.trains(1)
    began = time.monotonic()
    os.kill(nodes.runs[lost].pid, signal.SIGKILL)
    other = nodes.runs[1 - lost]
    assert other.wait() == 77, other.output()
    assert time.monotonic() - began < 60
    assert f"node {lost} is lost: its connection has ended" in other.message()["message"]


# Saves and ends when a signal has come; a later life waits for the file ``meet`` before its ranks meet.
SAVING_AT_SIGTERM = """
import os, signal, sys, time
from pathlib import Path
import torch.distributed as dist, torch

folder, rank, life = Path(sys.argv[1]), os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
asked = folder / f"asked-{rank}"
signal.signal(signal.SIGTERM, lambda *_: asked.touch())
(folder / f"started-{life}-{rank}").touch()
while life != "0" and not (folder / "meet").exists():
    time.sleep(0.01)
dist.init_process_group("gloo")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
stop = torch.zeros(1)
while not stop:
    optimizer.step()
    stop[0] = asked.exists()
    dist.all_reduce(stop)
    time.sleep(0.01)
(folder / f"saved-{life}-{rank}").touch()
"""


@pytest.mark.parametrize("nnodes", [1, 2])
def test_ranks_save_when_a_stop_signal_comes_before_the_first_step_of_a_later_life(
    ddptrain: ForkServer, tmp_path: Path, nnodes: int
) -> None:
    if nnodes == 2:
        runs = TwoNodes(ddptrain, tmp_path, script=SAVING_AT_SIGTERM).runs
        wait_until(lambda: "all 2 launchers take part" in runs[0].output(), "the launchers to be connected")
    else:
        script = tmp_path / "train.py"
        script.write_text(SAVING_AT_SIGTERM)
        env = {"DDPJOB_INPLACE_RESTARTS": 5}
        runs = [ddptrain.start("--nproc-per-node", 2, script, tmp_path, env=env, module="ddprun")]
    runs[0].at_step(3)
    os.kill(runs[-1].ranks()[2 - nnodes], signal.SIGKILL)
    started = [tmp_path / f"started-1-{rank}" for rank in (0, 1)]
    wait_until(lambda: all(path.exists() for path in started), "the ranks of the second life")
    for run in runs:
        run.stop()
    wait_until(lambda: all((tmp_path / f"asked-{rank}").exists() for rank in (0, 1)), "the signal to reach the ranks")
    (tmp_path / "meet").touch()
    assert [run.wait() for run in runs] == [75] * nnodes, "\n".join(run.output() for run in runs)
    assert all((tmp_path / f"saved-1-{rank}").exists() for rank in (0, 1))
    for run in runs:
        assert run.output().count("restart in place 1 of 5") == 1 and "restart in place 2" not in run.output()


def test_hang_ends_a_life_and_its_node_is_blamed_once(ddptrain: ForkServer, tmp_path: Path) -> None:
    nodes = TwoNodes(ddptrain, tmp_path, flags=("--hang-timeout", 3))
    nodes.trains(1)
    (tmp_path / "hang-1").touch()
    report = nodes.trains(2)
    nodes.finish()
    assert [(life["node"], life["rank"], life["kind"]) for life in report["lives"]] == [(1, 1, "Hang")]
    assert nodes.runs[0].message()["life"] == 2
    for run in nodes.runs:
        assert run.output().count("restart in place 1 of 5: node 1: rank 1 (node 1) is in") == 1, run.output()


def test_weights_are_those_of_an_uninterrupted_run(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, whole: Whole
) -> None:
    port, leader = free_port(), free_port()
    argv = ("launch", *RESUMED, "--data-dir", idx, "--checkpoint-dir", tmp_path / "cut", "--chaos", "kill:3:11")
    own = {"DDPJOB_PROGRESS_PORT": leader, "DDPJOB_INPLACE_RESTARTS": 3}
    runs = [ddptrain.start(*argv, env=node(rank, port) | own) for rank in (0, 1)]
    assert [run.wait() for run in runs] == [0, 0], "\n".join(run.output() for run in runs)
    assert runs[0].message()["life"] == 2
    assert_same_end(whole(4, *SAVING).folder, tmp_path / "cut")


def test_node_that_trains_alone_is_restarted_in_place(ddptrain: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    env = {"DDPJOB_INPLACE_RESTARTS": 3}
    run = ddptrain.start(
        "--nproc-per-node", 2, "--log-dir", tmp_path / "logs", script, tmp_path, env=env, module="ddprun"
    )
    step = run.at_step(4)["step"]
    (tmp_path / "logs" / "rank-1.life-2.log").mkdir()  # a volume that takes no file for a while ends no training
    os.kill(run.ranks()[1], signal.SIGKILL)
    wait_until(lambda: (now := run.progress()) and now["life"] == 2 and now["step"] > step, "the next life")
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.output()
    assert "warning: --log-dir: " in run.output()
