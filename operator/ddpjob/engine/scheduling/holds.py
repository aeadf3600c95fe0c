"""Holds: an admission that a job could not use, so that the job stays out of its queue until something has changed.

The annotation ``ddpjob.dev/held`` of the Workload records what was admitted to what, because the admission itself ends
with the quota. Without it the job would be admitted, give the quota back and be admitted again (decision 0052).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.pods import is_object_name
from ddpjob.api.text import shorten
from ddpjob.engine.observed import Unknown
from ddpjob.engine.scheduling.base import MAX_TEXT
from ddpjob.engine.state import JobState

NOT_READ_YET = Unknown("it was not read yet", is_final=False)
_MAX_FLAVORS = 64


class Hold(NamedTuple):
    """What the annotation has, as JSON.

    job: what the job was. flavors: what each flavor of the admission was. why: the reason, for the status.
    """

    job: str
    flavors: Mapping[str, str]
    why: str


def is_active(workload: Json) -> bool:
    """Whether Kueue may admit the Workload."""
    return workload["spec"].get("active") is not False


def new_hold(s: JobState, flavors: Iterable[str], why: str) -> Hold | None:
    """Return the hold of an admission with these flavors; None if one of them does not answer, which says nothing."""
    found = {name: _flavor(s, name) for name in flavors}
    known = {name: flavor for name, flavor in found.items() if flavor is not None}
    return Hold(_edition(s), known, shorten(why, MAX_TEXT)) if len(known) == len(found) else None


def recorded_hold(workload: Json) -> Hold | None:
    """Return the hold of an inactive Workload; None if it has none, or one that someone has edited."""
    if is_active(workload):
        return None
    annotations = workload["metadata"].get("annotations") or {}
    try:
        hold = Hold(**json.loads(str(annotations.get(names.ANNOTATION_HELD) or "")))
        flavors = {name: str(flavor) for name, flavor in hold.flavors.items() if is_object_name(name)}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return Hold(str(hold.job), flavors, str(hold.why)) if len(flavors) <= _MAX_FLAVORS else None


def why_held(s: JobState, workload: Json) -> str:
    """Return why the job stays out of its queue; empty if it need not, or if it or a flavor has changed."""
    if (hold := recorded_hold(workload)) is None or hold.job != _edition(s):
        return ""
    if any(_flavor(s, name) not in (known, None) for name, known in hold.flavors.items()):
        return ""
    todo = "correct this, or change the job or the label of its queue, or suspend and resume it"
    return f"{shorten(hold.why, MAX_TEXT)}. The job has given its quota back; to let it wait again, {todo}"


def _edition(s: JobState) -> str:
    return json.dumps([s.job.generation, *(s.labels.get(label, "") for label in names.LABELS_OF_QUEUES)])


def _flavor(s: JobState, name: str) -> str | None:
    """Return what identifies what a flavor adds to pods; empty if it does not exist, None if it is not known now."""
    found = s.observed.found.get((names.FLAVORS, name), NOT_READ_YET)
    if isinstance(found, Unknown):
        return "" if found.is_final else None
    spec = found.get("spec") or {}
    added = json.dumps([spec.get("nodeLabels") or {}, spec.get("tolerations") or []], sort_keys=True)
    return hashlib.sha256(added.encode()).hexdigest()[:16]
