"""The policy of restarts in a spec: limits, delays, and rules for single exit codes and reasons."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from ddpjob.api.limits import MAX_REASON
from ddpjob.api.model import ApiModel, Rule

_HOUR = 3_600
Reason = Annotated[str, StringConstraints(min_length=1, max_length=MAX_REASON, pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
"""A reason of ``status.failures``: one CamelCase word."""


class Backoff(ApiModel):
    """Delay before a restart: none after a first failure, then initialSeconds, doubled after each further one in a row.

    Progress ends the row.
    """

    rules: ClassVar = (
        Rule(
            "!has(self.initialSeconds) || !has(self.maxSeconds) || self.initialSeconds <= self.maxSeconds",
            "initialSeconds must not exceed maxSeconds",
            lambda backoff: (
                None in (backoff.initial_seconds, backoff.max_seconds) or backoff.initial_seconds <= backoff.max_seconds
            ),
        ),
    )

    # No defaults in the schema: the API server would store them, and later releases could not change them.
    initial_seconds: Annotated[int, Field(ge=0, le=_HOUR)] | None = None
    """Seconds before the restart after the second failure in a row. Default: 10, at most maxSeconds."""
    max_seconds: Annotated[int, Field(ge=0, le=_HOUR)] | None = None
    """Maximum delay in seconds. Default: 360, at least initialSeconds."""

    @property
    def first_and_longest(self) -> tuple[int, int]:
        """``initialSeconds`` and ``maxSeconds`` with their defaults: those of a Job of Kubernetes."""
        first, longest = self.initial_seconds, self.max_seconds
        if longest is None:
            longest = max(360, first or 0)
        return min(10, longest) if first is None else first, longest


class OnExitCodes(ApiModel):
    """Exit codes of the trainer of the pod that failed first."""

    operator: Literal["In", "NotIn"]
    """In: the rule applies to these exit codes. NotIn: to all others except 0."""
    values: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(min_length=1, max_length=255)]
    """Exit codes."""


class RestartRule(ApiModel):
    """What to do after a failure that the rule matches, instead of the default."""

    rules: ClassVar = (
        Rule(
            "has(self.onExitCodes) != has(self.onReasons)",
            "a rule has either onExitCodes or onReasons",
            lambda rule: (rule.on_exit_codes is None) != (rule.on_reasons is None),
        ),
    )

    on_exit_codes: OnExitCodes | None = None
    """The rule applies to these exit codes."""
    on_reasons: Annotated[list[Reason], Field(min_length=1, max_length=64)] | None = None
    """The rule applies to these reasons of `status.failures`, for example `[OOMKilled, Hang]`."""
    action: Literal["Restart", "RestartIgnoreLimit", "Fail"]
    """Restart: a restart that counts. RestartIgnoreLimit: one that counts only towards maxTotalRestarts. Fail: none."""


class RestartPolicy(ApiModel):
    """Restarts after a failure. A restart starts all pods again; training continues from the last checkpoint."""

    # No default in the schema: it depends on the job, and the API server would store it.
    max_restarts: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Maximum number of restarts without progress that count (docs/reference/failures.md). Planned and external losses,
    such as a drained node, do not count. Default: 12, but 3 as long as the job has not trained, unless a storage,
    network or service was away."""
    max_total_restarts: Annotated[int, Field(ge=0, le=10_000)] = 100
    """Maximum number of all restarts without progress, except after planned losses. Progress counts here from an
    attempt of 600 s on. 0: no restart of any kind."""
    backoff: Backoff | None = None
    """Delay before a restart."""
    # "rules" is the class variable with the CEL rules of a model.
    restart_rules: Annotated[list[RestartRule], Field(max_length=20)] | None = Field(default=None, alias="rules")
    """Exceptions from the default reaction to a failure (docs/reference/failures.md). The first rule that matches
    applies."""

    def limit(self, *, has_trained: bool) -> int:
        """Return ``maxRestarts`` with its default."""
        if self.max_restarts is not None:
            return self.max_restarts
        return 12 if has_trained else 3
