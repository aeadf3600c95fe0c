"""``FailureFacts``: what is known of a failure, one value from the report of a program to ``ddpjob why``.

A new fact is declared here and where a program gives it: in ``EndReport``, ``LogFailure`` or ``Stall``.
"""

from typing import Annotated, Any, Self

from pydantic import Field

from ddpjob.api.limits import MAX_ADVICE, MAX_REASON
from ddpjob.api.model import WireModel
from ddpjob.api.text import shorten


class FailureFacts(WireModel):
    """Where and how a program failed, and what to do. Fields of ``status.failures`` and of ``ddpjob why -o json``."""

    attempt: int | None = None
    """Number of the attempt."""
    node_rank: int | None = None
    """node_rank of the pod that failed first."""
    rank: int | None = None
    """Global rank of the process that failed first, from the trainer's report or torchrun's in the log."""
    pod: str | None = None
    """Name of that pod. The pod and its logs are kept until the next attempt ends."""
    node_name: str | None = None
    """Kubernetes node it ran on."""
    exit_code: int | None = None
    """Exit code of the trainer."""
    signal: int | None = None
    """Signal that ended the trainer, or by torchrun's report in the log the rank that failed first."""
    step: int | None = None
    """Optimizer step at which it failed, from the trainer's report; of a script under ddprun the last completed."""
    exception: Annotated[str | None, Field(max_length=MAX_REASON)] = None
    """Type of the exception, from the trainer's report or a traceback in the log."""
    where: Annotated[str | None, Field(max_length=MAX_ADVICE)] = None
    """File and line in the user's code, from the same source."""
    hint: Annotated[str | None, Field(max_length=MAX_ADVICE)] = None
    """The usual cause, from the trainer's report or from docs/reference/failures.md."""
    next: Annotated[str | None, Field(max_length=MAX_ADVICE)] = None
    """What to do: a command, or a field to change."""
    from_program: Annotated[list[str] | None, Field(max_length=2)] = None
    """Which of `hint` and `next` are the words of the program, from its report. The rest is the operator's advice."""

    @classmethod
    def of(cls, source: object, **others: Any) -> Self:
        """Return the facts that a report or a log has, with other values for some."""
        found = {name: getattr(source, name, None) for name in FailureFacts.model_fields} | others
        return cls(**found | {"where": shorten(found["where"] or "", MAX_ADVICE) or None})

    @property
    def known(self) -> dict[str, Any]:
        """The facts by the names of their fields, for another value that has them."""
        return {name: getattr(self, name) for name in FailureFacts.model_fields}
