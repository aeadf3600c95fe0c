"""Creates a job on a cluster, with the Secret of its files if it has any, so that no crash leaves half of both.

Secret without an owner ─▶ job ─▶ owner of the Secret is the job

The Secret comes first, because pods that wait for a missing one would hold their Kubernetes nodes. Until the job
owns it, a label says so: the same submission uses it again, and any later one in the namespace gives it to its job, or
deletes it if there is no such job.
"""

import contextlib
from datetime import timedelta
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import DDPJOBS, SECRETS
from ddpjob.api.objects import Json
from ddpjob.api.times import parse_time
from ddpjob.client.connection import ApiConnection, Query, RequestError, is_absent, path_of
from ddpjob.client.job import DDPJob
from ddpjob.errors import DDPJobError, InvalidJobError, UnavailableError

_STRICT = {"fieldValidation": "Strict"}
_REHEARSAL = {"dryRun": "All"}
_WITHOUT_OWNER = "without-owner"  # value of the label
_LEFT_AFTER = timedelta(hours=1)  # longer than any submission takes
_LEFT_AT_ONCE = 10  # Secrets that one submission looks at
_TRIES = 4


class Submission:
    """One job to create, with at most one Secret of its own (``with_files``)."""

    def __init__(self, connection: ApiConnection, job: DDPJob, namespace: str) -> None:
        self._connection = connection
        self._namespace = namespace
        self._body = {key: value for key, value in job.manifest.items() if key != "status"}
        self._body |= {"metadata": job.manifest["metadata"] | {"namespace": namespace}}
        self._files: Json | None = next((_in(namespace, other) for other in job.others), None)

    def rehearse(self) -> Json:
        """Return the job as the server would store it, after its admission; create nothing. Raises as ``carry_out``."""
        if self._files is not None and self._stored() is None:
            self._request("POST", path_of(SECRETS, self._namespace), self._files, **_STRICT, **_REHEARSAL)
        return self._request("POST", path_of(DDPJOBS, self._namespace), self._body, **_STRICT, **_REHEARSAL)

    def carry_out(self) -> Json:
        """Return the created job.

        Raises:
            DDPJobError: it was not created, and neither was its Secret; or it is not known whether it was.
        """
        made = self._provide() if self._files is not None else None
        try:
            job = self._connection.request(
                "POST", path_of(DDPJOBS, self._namespace), _STRICT, self._body, repeats=False
            )
        except DDPJobError as error:
            # Without a refusal the job may exist or come to exist; then its pods need the Secret.
            if made is not None and not isinstance(error, UnavailableError):
                self._delete(made)
            raise
        if self._files is not None:
            self._hand_over(job)
            with contextlib.suppress(DDPJobError):  # the job is complete; a later submission collects them
                self._collect()
        return job

    def _provide(self) -> Json | None:
        """Create the Secret, or find it as an earlier submission left it. Return it if it was created here."""
        body = _labelled(self._files or {}, _WITHOUT_OWNER)
        for _ in range(_TRIES):
            try:
                return self._request("POST", path_of(SECRETS, self._namespace), body, **_STRICT)
            except DDPJobError as error:
                if _reason(error) != "AlreadyExists":
                    raise
            if (found := self._stored()) is None:
                continue
            if _is_like(found, body) or self._job() is not None:  # that job, or one just created, is in the way
                return None
            self._delete(found)  # its job was deleted, and the garbage collector is about to delete it
        raise UnavailableError(f"the Secret {_name(body)} could not be created", "it is being deleted", "try again")

    def _hand_over(self, job: Json) -> None:
        """Make the job the owner of the Secret; without a Secret take the job back."""
        owned = _owned(self._files or {}, job)
        try:
            try:
                self._own(owned)
            except DDPJobError as error:
                if not is_absent(error, SECRETS):
                    raise
                # Another submission of the same files failed, and took its Secret back.
                self._request("POST", path_of(SECRETS, self._namespace), owned, **_STRICT)
        except DDPJobError as error:
            self._take_back(job, error)
            raise

    def _take_back(self, job: Json, error: DDPJobError) -> None:
        try:
            options = {"preconditions": {"uid": job["metadata"]["uid"]}, "propagationPolicy": "Background"}
            self._connection.request("DELETE", path_of(DDPJOBS, self._namespace, _name(job)), body=options)
        except DDPJobError:
            error.hint = f"the job {_name(job)} was created and could not be taken back"
            return
        if (found := self._stored()) is not None:
            self._delete(found)

    def _own(self, owned: Json) -> None:
        metadata = owned["metadata"]
        change = {"ownerReferences": metadata["ownerReferences"], "labels": {names.LABEL_WORKDIR: None}}
        path = path_of(SECRETS, self._namespace, metadata["name"])
        self._connection.request("PATCH", path, body={"metadata": change})

    def _collect(self) -> None:
        """Deal with Secrets that earlier submissions left: give them to their jobs, or delete them."""
        query: Query = {"labelSelector": f"{names.LABEL_WORKDIR}={_WITHOUT_OWNER}", "limit": _LEFT_AT_ONCE}
        page = self._connection.answer("GET", path_of(SECRETS, self._namespace), query)
        for left in page.body["items"]:
            if page.time is None or page.time - parse_time(left["metadata"]["creationTimestamp"]) < _LEFT_AFTER:
                continue
            job = self._job(str((left["metadata"].get("labels") or {}).get(names.LABEL_JOB_NAME)))
            if job is not None and _uses(job, _name(left)):
                self._own(_owned(left, job))
            else:
                self._delete(left)

    def _stored(self) -> Json | None:
        """Return the Secret of the same name that exists. Raises ``InvalidJobError`` if it is of another kind."""
        found = self._connection.found(SECRETS, self._namespace, _name(self._files or {}))
        if found is not None and (found["metadata"].get("labels") or {}).get(names.LABEL_JOB_NAME) != _name(self._body):
            raise InvalidJobError(
                f"there is a Secret {_name(found)}, which is not of this job",
                "submit puts the files of the job into a Secret of this name",
                "give the job another name, or delete the Secret",
            )
        return found

    def _job(self, name: str | None = None) -> Json | None:
        return self._connection.found(DDPJOBS, self._namespace, name or _name(self._body))

    def _delete(self, secret: Json) -> None:
        """Delete a Secret unless it has changed, or was replaced; a job may own it now."""
        metadata = secret["metadata"]
        version = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        path = path_of(SECRETS, self._namespace, metadata["name"])
        with contextlib.suppress(DDPJobError):
            self._connection.request("DELETE", path, body={"preconditions": version})

    def _request(self, method: str, path: str, body: Json, **query: str) -> Json:
        return self._connection.request(method, path, query, body)


def _in(namespace: str, body: Json) -> Json:
    return body | {"metadata": body["metadata"] | {"namespace": namespace}}


def _name(body: Json) -> str:
    return str(body["metadata"]["name"])


def _labelled(secret: Json, value: str) -> Json:
    metadata = secret["metadata"]
    return secret | {"metadata": metadata | {"labels": metadata["labels"] | {names.LABEL_WORKDIR: value}}}


def _owned(secret: Json, job: Json) -> Json:
    # Not as its controller, and without blockOwnerDeletion: that needs rights on the finalizers of the job.
    owner = {"apiVersion": names.API_VERSION, "kind": DDPJOBS.kind, "name": _name(job), "uid": job["metadata"]["uid"]}
    return secret | {"metadata": secret["metadata"] | {"ownerReferences": [owner]}}


def _is_like(found: Json, wanted: Json) -> bool:
    """Return whether a Secret has the files, will keep them, and has no owner that may be gone."""
    metadata: Json = found["metadata"]
    fields = ("immutable", "data")
    is_free = not metadata.get("ownerReferences") and "deletionTimestamp" not in metadata
    return is_free and all(found.get(field) == wanted[field] for field in fields)


def _uses(job: Json, secret: str) -> bool:
    pod: Json = ((job["spec"].get("template") or {}).get("spec")) or {}
    sources: list[Any] = [volume.get("secret") for volume in pod.get("volumes") or ()]
    return any(isinstance(source, dict) and source.get("secretName") == secret for source in sources)


def _reason(error: DDPJobError) -> str:
    return error.__cause__.reason if isinstance(error.__cause__, RequestError) else ""
