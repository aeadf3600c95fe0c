"""Random lifecycles: pods run, fail and disappear, users suspend and resume, the operator is killed between writes.

The invariants are those a user relies on; hypothesis looks for an order of events that breaks one.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ddpjob.api import names
from tests.builders import World, a_job, ended, is_idle, running

NODES = 3
MAX_RESTARTS = 2
ranks = st.integers(0, NODES - 1)


class Lives(RuleBasedStateMachine):
    """One job, and the events that can happen to it."""

    @initialize(suspended=st.booleans())
    def begin(self, suspended: bool) -> None:
        self.world = World(a_job(numNodes=NODES, suspend=suspended, restartPolicy={"maxRestarts": MAX_RESTARTS}))
        self.highest_attempt = 0
        self.final: dict[str, Any] | None = None

    def pods_now(self) -> dict[int, dict[str, Any]]:
        attempt = str(self.world.status.get("attempt") or 0)
        pods = [p for p in self.world.pods.values() if p["metadata"]["labels"][names.LABEL_ATTEMPT] == attempt]
        return {int(pod["metadata"]["labels"][names.LABEL_NODE_RANK]): pod for pod in pods}

    @rule()
    def reconcile(self) -> None:
        self.world.reconcile()

    @rule(writes=st.integers(0, NODES + 3))
    def crash_amid_a_reconcile(self, writes: int) -> None:
        self.world.reconcile(crash_after=writes)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule(rank=ranks)
    def run(self, rank: int) -> None:
        pod = self.pods_now().get(rank)
        if pod and pod["status"]["phase"] == "Pending":
            pod["status"] = running()

    @rule(rank=ranks, code=st.sampled_from([0, 0, 1, 77, 137]))
    def end(self, rank: int, code: int) -> None:
        pod = self.pods_now().get(rank)
        if pod and pod["status"]["phase"] == "Running":
            pod["status"] = ended(code, at=self.world.now)

    @rule(rank=ranks)
    def vanish(self, rank: int) -> None:
        pod = self.pods_now().get(rank)
        if pod:
            del self.world.pods[pod["metadata"]["name"]]

    @rule(suspend=st.booleans())
    def suspend(self, suspend: bool) -> None:
        self.world.job["spec"]["suspend"] = suspend

    @rule(seconds=st.integers(1, 1000))
    def wait(self, seconds: int) -> None:
        self.world.forward(seconds)

    @precondition(lambda self: not self.world.job["spec"]["suspend"])
    @rule()
    def left_in_peace_the_job_runs_or_is_finished(self) -> None:
        for _ in range(3):
            self.world.settle()
            self.world.forward(700)
        self.world.settle()
        for rank in range(NODES):
            self.run(rank)
        self.world.settle()
        assert self.world.status["state"] in ("Running", "Succeeded", "Failed")

    @invariant()
    def the_attempt_never_goes_back(self) -> None:
        attempt = int(self.world.status.get("attempt") or 0)
        assert attempt >= self.highest_attempt
        self.highest_attempt = attempt

    @invariant()
    def the_budget_is_never_overdrawn(self) -> None:
        status = self.world.status
        assert status.get("restartsCountedTowardsLimit", 0) <= MAX_RESTARTS
        failures = status.get("failures", [])
        shown = len([f for f in failures if f["action"] == "Restart"])
        assert shown == status.get("restarts", 0) or (shown < status["restarts"] and len(failures) == 5)

    @invariant()
    def no_pod_is_of_an_attempt_that_was_not_recorded(self) -> None:
        attempts = [int(attempt) for attempt in self.world.attempts()]
        assert max(attempts, default=0) <= int(self.world.status.get("attempt") or 0)

    @invariant()
    def an_end_is_an_end(self) -> None:
        status = self.world.status
        finished = [c for c in status.get("conditions", []) if c["type"] == "Finished" and c["status"] == "True"]
        if self.final is not None:
            assert status == self.final
        elif finished:
            self.final = status

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for _ in range(3):
                self.world.settle()
                self.world.forward(700)
            self.world.settle()
            assert is_idle(self.world.reconcile())


Lives.TestCase.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
TestLives = Lives.TestCase
