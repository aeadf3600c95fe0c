"""Phase one of a reconcile: what is there now, as one value that ``plan`` can be asked about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpjob.api.wire import Json
from ddpjob.engine.actions import Problem


@dataclass(frozen=True)
class Observed:
    """What the reconcile sees of one job, apart from the job itself.

    pods: every pod that carries the job's uid label, as the API server gave it (dicts).
    service, claim: the job's Service and the claim of its claimTemplate, or None when not seen.
    problems: what the last attempt to act could not create.
    progress: rank 0's last answer to ``GET /progress`` of this attempt (trainer-interface.md), or None.
    progress_pod: name of the pod that gave it, so that a late answer of an old attempt is not believed.
    live: pods come from a LIST made in this reconcile, not from a cache.
    """

    pods: tuple[Json, ...] = ()
    service: Json | None = None
    claim: Json | None = None
    problems: tuple[Problem, ...] = ()
    progress: Json | None = None
    progress_pod: str | None = None
    live: bool = False


def observe(
    job: Mapping[str, Any],
    pods: Sequence[Json],
    *,
    service: Json | None = None,
    claim: Json | None = None,
    problems: Sequence[Problem] = (),
    progress: Json | None = None,
    progress_pod: str | None = None,
    live: bool = False,
) -> Observed:
    """Keep what belongs to this very job: same uid as controller owner, in a stable order.

    A pod of a deleted job of the same name, or one that merely carries our labels, is not ours.
    """
    uid = job["metadata"]["uid"]
    ours = sorted((pod for pod in pods if owner_uid(pod) == uid), key=lambda pod: str(pod["metadata"]["name"]))
    return Observed(tuple(ours), service, claim, tuple(problems), progress, progress_pod, live)


def owner_uid(obj: Mapping[str, Any]) -> str | None:
    """The uid of an object's controlling owner, or None when it has none."""
    for reference in obj.get("metadata", {}).get("ownerReferences") or ():
        if reference.get("controller"):
            return str(reference.get("uid"))
    return None
