"""A recording without secrets, and on request without names, about which the operator would do the same."""

import json
from collections.abc import Sequence
from dataclasses import replace

from pydantic import ValidationError

from ddpjob.api.log_failure import LogFailure
from ddpjob.api.objects import Json
from ddpjob.client.bundle.manifest import Redaction
from ddpjob.client.bundle.pseudonyms import pseudonyms
from ddpjob.client.bundle.recording import Recording, Unread
from ddpjob.client.bundle.redactor import Redactor, secret_values
from ddpjob.client.bundle.replay import decisions
from ddpjob.engine.desired import is_comparable, spec_hash


def redacted(recording: Recording, *, hide_names: bool = False) -> tuple[Recording, Redaction]:
    """Return the recording as it may be given away, and what was removed.

    hide_names: replace the names of the job, its namespace, nodes, claims, images, Secrets and others by pseudonyms.
    """
    objects = [recording.job, *(recording.pods or ()), *recording.operators]
    hidden = pseudonyms(recording.job, _all_objects(recording), recording.names) if hide_names else {}
    redactor = Redactor(secret_values(objects), hidden)
    made = _redacted(recording, redactor)
    removed = redactor.removed
    return made, Redaction(
        env_values=removed["envValues"],
        annotations=removed["annotations"],
        secrets=removed["secrets"],
        names_hidden=hide_names,
        same_plan=_has_same_plan(recording, made, Redactor(secret_values(objects), hidden)),
    )


def _redacted(recording: Recording, redactor: Redactor) -> Recording:
    settings = recording.settings
    return replace(
        recording,
        job=_job(recording.job, redactor),
        pods=None if recording.pods is None else _all(recording.pods, redactor),
        former=_all(recording.former, redactor),
        service=recording.service and redactor.object(recording.service),
        policy=recording.policy and redactor.object(recording.policy),
        claims={redactor.rename(name): claim and redactor.object(claim) for name, claim in recording.claims.items()},
        events=_all(recording.events, redactor),
        operators=_all(recording.operators, redactor),
        logs={uid: log and _log_failure(log, redactor) for uid, log in recording.logs.items()},
        texts={redactor.rename(path): redactor.text(text) for path, text in recording.texts.items()},
        versions={name: redactor.rename(text) for name, text in recording.versions.items()},
        unread=[Unread(what=redactor.rename(u.what), reason=redactor.text(u.reason)) for u in recording.unread],
        settings=replace(
            settings,
            pod_namespace=redactor.rename(settings.pod_namespace),
            pod_labels={key: redactor.rename(value) for key, value in settings.pod_labels.items()},
            launcher_image=redactor.rename(settings.launcher_image),
        ),
        names=(),
    )


def _job(job: Json, redactor: Redactor) -> Json:
    """Return the job. Its recorded digest of the spec changes with the spec, so that the spec counts as unchanged."""
    made = redactor.object(job)
    recorded = (job.get("status") or {}).get("specHash")
    if not is_comparable(recorded):
        return made
    parts = zip(
        recorded.split("-"), spec_hash(job["spec"]).split("-"), spec_hash(made["spec"]).split("-"), strict=False
    )
    digest = "-".join(after if known == before else known for known, before, after in parts)
    return made | {"status": made["status"] | {"specHash": digest}}


def _all(objects: Sequence[Json], redactor: Redactor) -> list[Json]:
    return [redactor.object(one) for one in objects]


def _log_failure(log: LogFailure, redactor: Redactor) -> LogFailure:
    return replace(
        log,
        message=redactor.text(log.message),
        where=redactor.text(log.where) if log.where else log.where,
        last_line=redactor.text(log.last_line),
    )


def _has_same_plan(before: Recording, after: Recording, redactor: Redactor) -> bool:
    """Return whether the plans for both are the same, apart from texts and pseudonyms."""
    try:
        first, second = decisions(before.plan()), decisions(after.plan())
    except (ValidationError, ValueError, KeyError, TypeError):
        return False  # an object of it is not what an API server stores
    return _renamed(first, redactor) == second


def _renamed(made: Json, redactor: Redactor) -> Json:
    """Return decisions with pseudonyms in place of names."""
    status = redactor.object(made["status"]) if made["status"] is not None else None
    others = json.loads(redactor.rename(json.dumps(made | {"status": None})))
    return {**others, "status": status}


def _all_objects(recording: Recording) -> list[Json]:
    claims = [claim for claim in recording.claims.values() if claim is not None]
    single = [one for one in (recording.service, recording.policy) if one]
    several = (recording.pods or (), recording.former, recording.events, recording.operators)
    return [*(one for objects in several for one in objects), *claims, *single]
