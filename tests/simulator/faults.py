"""The faults of a simulated run: what goes wrong with the operator's requests, and with which of them."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ddpjob_operator.cluster.base import AlreadyExists, Conflict, Forbidden, NotFound, TooManyRequests, Unavailable
from tests.worlds.memory.faulty import Call, Fault, lost_answer

CRASHES = ("crash-before", "crash-after")
ERRORS = ("conflict", "throttled", "error", "timeout", "lost", "repeated", "late")
KINDS = CRASHES + ERRORS
"""What goes wrong with a request.

crash-before, crash-after: the operator's process is killed before or after the request is carried out.
conflict: 409. throttled: 429 with Retry-After. error: 500. timeout: no response, and not carried out.
lost: carried out, but the response is lost. repeated: as lost, and the client's own retry then gets a 409.
late: no response, and carried out two seconds later.
"""

LOG_KINDS = ("forbidden", "absent", "error", "throttled", "timeout", "slow", "hangs", *CRASHES)
"""What goes wrong with a request for a log, beside the above.

forbidden: 403. absent: 404. slow: the answer takes a second. hangs: the kubelet never responds.
"""
HARMLESS_FOR_LOGS = ("slow", *CRASHES)
"""After these, what the log says is still known before the verdict."""
LATE_SECONDS = 2.0
SLOW_SECONDS = 1.0
HANG_SECONDS = 60.0
FAULTY_SHARE = 0.05
"""Share of the requests that fail in a run with random faults."""
FAULTY_SHARE_OF_LOGS = 0.4
"""Share of the requests for logs that fail where logs are read with faults."""


class OperatorKilledError(BaseException):
    """The operator's process is killed during a request. Not an Exception, so no error handler catches it."""


class At(NamedTuple):
    """A fault of the given kind at one write of the operator, counted from 1."""

    kind: str
    write: int

    def __str__(self) -> str:
        return f"{self.kind}@{self.write}"

    @classmethod
    def parse(cls, text: str) -> "At":
        """Return the fault in a text such as ``lost@7``. Raises ``ValueError``."""
        kind, _, write = text.partition("@")
        if kind not in KINDS:
            raise ValueError(f"{kind} is not one of {', '.join(KINDS)}")
        return cls(kind, int(write))


Choose = Callable[[Call], str | None]
"""Returns the kind of fault of a request of the operator, or None."""


def at_writes(faults: Sequence[At]) -> Choose:
    """Return a function that injects each fault at its write."""
    kinds = {fault.write: fault.kind for fault in faults}
    writes = 0

    def choose(call: Call) -> str | None:
        nonlocal writes
        writes += call.is_write
        return kinds.get(writes) if call.is_write else None

    return choose


def now_and_then(seed: str) -> Choose:
    """Return a function that injects a random fault into one request of twenty, also of those that read."""
    chance = random.Random(seed)
    return lambda call: chance.choice(KINDS) if chance.random() < FAULTY_SHARE else None


def also_for_logs(choose: Choose, seed: str) -> Choose:
    """Return a function that injects the faults of ``choose``, and more into the requests for logs."""
    chance = random.Random(seed)

    def choose_for_logs(call: Call) -> str | None:
        if not call.reads_log:
            return choose(call)
        return chance.choice((*LOG_KINDS, "slow", "slow")) if chance.random() < FAULTY_SHARE_OF_LOGS else None

    return choose_for_logs


def fault(kind: str, call: Call) -> Fault:
    """Return the fault of a kind for one request."""
    what = f"{call.verb} {call.resource.kind}"
    conflict = Conflict(f"{what}: the object has been modified", code=409)
    silence = Unavailable(f"{what}: no response")
    twice = {"create": AlreadyExists(f"{what}: already exists", code=409), "patch_status": conflict}
    possible = {
        "crash-before": Fault(before=OperatorKilledError()),
        "crash-after": Fault(after=OperatorKilledError()),
        "throttled": Fault(before=TooManyRequests(f"{what}: busy", retry_after=0.5, code=429)),
        "error": Fault(before=Unavailable(f"{what}: etcdserver: leader changed", code=500)),
        "forbidden": Fault(before=Forbidden(f"{what}: no right", code=403)),
        "absent": Fault(before=NotFound(f"{what}: not found", code=404)),
        "slow": Fault(slow_seconds=SLOW_SECONDS),
        "hangs": Fault(before=silence, slow_seconds=HANG_SECONDS),
    }
    if call.is_write:
        possible |= {
            "conflict": Fault(before=conflict),
            "lost": lost_answer(call.verb),
            "repeated": Fault(after=twice.get(call.verb, silence)),
            "late": Fault(before=silence, late_seconds=LATE_SECONDS),
        }
    return possible.get(kind, Fault(before=silence))
