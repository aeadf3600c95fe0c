"""Trainings of a simulated run that go on by themselves: they load, make steps, save, fail and end as scripts do."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ddpjob.api.exit_codes import SIGNAL_BASE, STOPPED, SUPERSEDED
from ddpjob.api.objects import Json
from tests.builders import ended, failed
from tests.engine.test_plain_scripts import BLOCK
from tests.simulator.volume import Volume, Writer

COARSE_STEPS = 100
"""A script that reports coarsely reports each step that this number divides."""
NOTICE_SECONDS = (0.5, 10.0)
"""Time until a rank that notices the loss of its peers ends."""
OUTAGE_SECONDS = (1.0, 20.0)
"""Time in which a training fails after a shared dependency went away, or after its start while it is away."""
OUTAGE_ERRORS = (
    ("OSError", "[Errno 116] Stale file handle: '/checkpoints/latest'"),
    ("EndpointConnectionError", 'Could not connect to the endpoint URL: "https://s3.example.com/data/17"'),
    ("ClientError", "An error occurred (SlowDown) when calling the GetObject operation: Please reduce your request"),
    ("gaierror", "[Errno -3] Temporary failure in name resolution"),
)
DEVICE_ERROR = {
    "exception": "DeviceError",
    "kind": "DeviceFailed",
    "message": "CUDA error: uncorrectable ECC error encountered",
}
BUG = {"exception": "KeyError", "kind": "KeyError", "message": "'label'", "where": "train.py:31"}
Report = Mapping[str, Any]


@dataclass(frozen=True)
class Program:
    """What a script does.

    steps: of the whole training. startup_seconds: from the start of the last pod until the first step.
    end_seconds: for which each pod saves after SIGTERM; 0: it ends without a save.
    fenced: a save of an older attempt is refused, as by ``ddprun.checkpoints``.
    reports: under ddprun each step, or some steps only; "none": plain torchrun, which writes no report.
    notices: a rank ends when it has lost a peer; otherwise it hangs in a collective until SIGTERM.
    upload_seconds: for which rank 0 runs on after the others have ended.
    bug_at: the step that raises an exception each time; 0: before the first one.
    """

    steps: int = 1000
    step_seconds: float = 1.0
    startup_seconds: float = 15.0
    save_every: int = 60
    end_seconds: float = 0.0
    fenced: bool = False
    reports: Literal["exact", "coarse", "none"] = "exact"
    notices: bool = True
    upload_seconds: float = 0.0
    bug_at: int | None = None


class Training:
    """One attempt of a program: its pods, from the start of their containers to their ends. nodes: a ``Site``."""

    def __init__(self, program: Program, volume: Volume, nodes: Any, *, job: str, attempt: int, size: int) -> None:
        self.program, self.volume, self.job, self.attempt, self.size = program, volume, job, attempt, size
        self.pods: dict[int, Json] = {}
        self.ended: set[int] = set()
        self.first_step_time: float | None = None
        self.from_step = 0
        self.over_time: float | None = None
        self._nodes = nodes
        self._chance = random.Random(f"{job} {attempt}")
        self._last = 0
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def is_over(self) -> bool:
        """Whether it makes no more steps."""
        return self.over_time is not None

    @property
    def trains(self) -> bool:
        """Whether it makes steps."""
        return self.first_step_time is not None and not self.is_over

    @property
    def step(self) -> int:
        """The last completed step."""
        if self.first_step_time is None or self.is_over:
            return self._last
        made = (_time() - self.first_step_time) / self.program.step_seconds
        return min(self._reachable, self.from_step + int(made + 1e-6))

    @property
    def _reachable(self) -> int:
        """The last step that the program can complete."""
        bug = self.program.bug_at
        return self.program.steps if bug is None else max(bug - 1, 0)

    @property
    def shown(self) -> int:
        """The step that the program reports."""
        return self.step // COARSE_STEPS * COARSE_STEPS if self.program.reports == "coarse" else self.step

    def join(self, node_rank: int, pod: Json) -> None:
        """The container of a pod runs; when all do, the training begins."""
        self.pods[node_rank] = pod
        if len(self.pods) == self.size and not self.is_over:
            self._later(self.program.startup_seconds, self._begin)

    def _begin(self) -> None:
        if self._nodes.is_away():
            self.lose_dependency()
            return
        self.from_step = self._last = self.volume.load(_time(), self._writer(0))
        if self.program.bug_at == 0:
            self.fail(self._any_rank(), BUG)
            return
        self.first_step_time = _time()
        self._nodes.has_news(self)
        bug, left = self.program.bug_at, self.program.steps - self.from_step
        if bug is not None:
            self._later((bug - self.from_step) * self.program.step_seconds, self.fail, self._any_rank(), BUG)
        self._later(left * self.program.step_seconds, self._finish)
        self._later(self.program.save_every * self.program.step_seconds, self._save_each)
        for node_rank, pod in self.pods.items():
            if (seconds := self._nodes.lifetime(pod)) is not None:
                self._later(seconds, self.fail, node_rank, DEVICE_ERROR)

    def _save_each(self) -> None:
        if self._save(0):
            self._nodes.has_news(self)
            self._later(self.program.save_every * self.program.step_seconds, self._save_each)
        else:
            self.fail(0, {"kind": "Superseded", "message": "a newer run writes", "code": SUPERSEDED})

    def _save(self, node_rank: int) -> bool:
        return self.volume.save(_time(), self._writer(node_rank), self.step, fenced=self.program.fenced)

    def _finish(self) -> None:
        if not self._save(0):
            return
        self.stop()
        for node_rank in self.pods:
            seconds = self._chance.uniform(0.0, 1.0) + (0.0 if node_rank else self.program.upload_seconds)
            asyncio.get_running_loop().call_later(seconds, self._end, node_rank, self._success)

    def lose_dependency(self) -> None:
        """Fail soon, because a shared dependency is away."""
        name, message = self._chance.choice(OUTAGE_ERRORS)
        seconds = self._chance.uniform(*OUTAGE_SECONDS)
        self._later(seconds, self.fail, self._any_rank(), {"exception": name, "kind": name, "message": message})

    def fail(self, node_rank: int, report: Report, *, code: int = 1) -> None:
        """A rank in this pod fails; its peers notice, or hang."""
        if node_rank in self.ended or node_rank not in self.pods:
            return
        self.stop()
        self._end(node_rank, lambda: self._failure(node_rank, code, report))
        self._lose_peer()

    def lose(self, node_rank: int) -> None:
        """The pod's processes are gone, and nothing reports it."""
        self.ended.add(node_rank)
        self.stop()
        self._lose_peer()

    def _lose_peer(self) -> None:
        for node_rank in self.pods.keys() - self.ended if self.program.notices else ():
            seconds = self._chance.uniform(*NOTICE_SECONDS)
            asyncio.get_running_loop().call_later(seconds, self._end, node_rank, self._peer_loss)

    def terminate(self, node_rank: int, grace: float) -> None:
        """SIGTERM reaches a pod; what does not end within the grace period is killed."""
        began, seconds = self.first_step_time is not None, self._chance.uniform(0.1, 3.0)
        self.stop()
        if began and self.program.end_seconds:
            seconds = self.program.end_seconds * self._chance.uniform(0.7, 1.0)
        act = self._end_with_save if began and self.program.end_seconds else self._end_stopped
        if seconds >= grace:
            act, seconds = self._end_killed, grace
        asyncio.get_running_loop().call_later(seconds, act, node_rank)

    def _end_with_save(self, node_rank: int) -> None:
        if node_rank not in self.ended:
            self._save(node_rank)
            self._end_stopped(node_rank)

    def _end_stopped(self, node_rank: int) -> None:
        report = {"outcome": "stopped", "kind": "Stopped", "message": "stopped by SIGTERM"}
        self._end(node_rank, lambda: self._failure(node_rank, STOPPED, report))
        self._lose_peer()

    def _end_killed(self, node_rank: int) -> None:
        self._end(node_rank, lambda: ended(SIGNAL_BASE + 9, at=self._nodes.now()))
        self._lose_peer()

    def stop(self) -> None:
        """Make no more steps."""
        if not self.is_over:
            self._last, self.over_time = self.step, _time()
            for timer in self._timers:
                timer.cancel()

    def _end(self, node_rank: int, status: Callable[[], Json]) -> None:
        if node_rank not in self.ended:
            self.ended.add(node_rank)
            self._nodes.report(self.pods[node_rank], status())

    def _failure(self, node_rank: int, code: int, report: Report) -> Json:
        at = self._nodes.now()
        if self.program.reports == "none":
            is_stopped = code == STOPPED
            text = ("" if is_stopped else _traceback(node_rank, report)) + BLOCK.format(rank=node_rank, code=code)
            return ended(143 if is_stopped else 1, message=text, at=at)
        place = {"step": self.shown if self.first_step_time is not None else None, "rank": node_rank, "phase": "train"}
        flags = {"exact": self.program.reports == "exact", "fenced": self.program.fenced}
        return failed(at=at, **{"code": code, **place, **flags, **report})

    def _success(self) -> Json:
        return ended(0, at=self._nodes.now())

    def _peer_loss(self) -> Json:
        if self.program.reports == "none":
            return ended(1, message=BLOCK.format(rank=0, code=1), at=self._nodes.now())
        return failed(77, cause="peer", at=self._nodes.now(), kind="PeerLost")

    def _writer(self, node_rank: int) -> Writer:
        return Writer(self.job, self.attempt, self.pods[node_rank]["metadata"]["uid"])

    def _any_rank(self) -> int:
        return self._chance.choice(sorted(self.pods))

    def _later(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, act, *arguments))


def _traceback(rank: int, report: Report) -> str:
    file, _, line = report.get("where", "train.py:90").partition(":")
    error = f"{report.get('exception')}: {report['message']}"
    lines = ("Traceback (most recent call last):", f'  File "/workspace/{file}", line {line}, in step', error)
    return "".join(f"[rank{rank}]: {text}\n" for text in lines)


def _time() -> float:
    return asyncio.get_running_loop().time()
