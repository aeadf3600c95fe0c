"""A job as the cache stores it: encoded, because a decoded spec takes up to 60 times the memory of its JSON.

A thousand jobs of a tenant must not take the memory of the operator. Metadata that the operator does not use, for
example annotations of 256 KiB, is left out, and so is the spec of a job whose spec is too large (``cluster.job_json``).
"""

import zlib
from typing import NamedTuple

from ddpjob.api.objects import Json
from ddpjob_operator.cluster.job_json import METADATA, finalizers_in_use, labels_in_use
from ddpjob_operator.cluster.kubernetes import decode, encode

_LONG_BYTES = 4096
"""A longer spec is compressed."""


class StoredJob(NamedTuple):
    """One job. ``head`` is the JSON of all but spec and resourceVersion; ``state`` is status.state.

    spec: the JSON of the spec, compressed if it is long; the number of its bytes if it was too large to be kept.
    """

    state: str
    version: str
    head: bytes
    spec: bytes | int

    def has_content_of(self, other: "StoredJob") -> bool:
        """Return whether both differ at most in the resourceVersion, for example after an annotation was changed."""
        return (self.head, self.spec) == (other.head, other.spec)


def stored(job: Json) -> StoredJob:
    """Return what is stored of a job."""
    given = job.get("spec") or {}
    head = {key: value for key, value in job.items() if key != "spec"}
    head["metadata"] = {
        key: value for key, value in job["metadata"].items() if key in METADATA and key != "resourceVersion"
    }
    if labels := head["metadata"].pop("labels", None):
        head["metadata"] |= {"labels": used} if (used := labels_in_use(labels)) else {}
    if head["metadata"].pop("finalizers", None) and (kept := finalizers_in_use(job["metadata"])):
        head["metadata"]["finalizers"] = kept
    state = str((job.get("status") or {}).get("state") or "New")
    spec = given if isinstance(given, int) else given.encode() if isinstance(given, str) else encode(given)
    if not isinstance(spec, int) and len(spec) > _LONG_BYTES:
        spec = zlib.compress(spec, 1)
    return StoredJob(state, job["metadata"].get("resourceVersion", ""), encode(head), spec)


def restored(job: StoredJob) -> Json:
    """Return a job as JSON, with its decoded spec, or with the size of a spec that was too large."""
    body = decode(job.head)
    body["metadata"]["resourceVersion"] = job.version
    if isinstance(job.spec, int):
        body["spec"] = job.spec
    else:
        body["spec"] = decode(job.spec if job.spec.startswith(b"{") else zlib.decompress(job.spec))
    return body
