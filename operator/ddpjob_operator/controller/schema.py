"""Statuses that the schema of the CustomResourceDefinition refuses, because it comes from another release.

Such a write fails until an administrator applies the CRD of this release. Until then no decision about the job is
recorded, so none is carried out. /readyz and an event on the job report it.
"""

import re
from collections.abc import Sequence

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.version import __version__
from ddpjob_operator.cluster.base import ClusterError
from ddpjob_operator.controller.health import Verdict

CRD = f"{names.DDPJOBS.plural}.{names.GROUP}"
MAX_FIELDS = 3  # in a message; one is enough to find the cause

_REMEDY = f"apply manifests/crd.yaml of release {__version__} (Helm does so unless crds.install is false)"
_UNKNOWN = re.compile(r'unknown field "([^"]+)"')


def explain(fields: str) -> str:
    """Return what to say about a status of which these fields were refused."""
    return f"the CustomResourceDefinition {CRD} refuses {fields}, so nothing is done for this job: {_REMEDY}"


def verdict(refused: Sequence[tuple[Key, str]]) -> Verdict:
    """Return whether no status is refused; if one is, the line names the CRD, the fields and the remedy."""
    if not refused:
        return True, "ok"
    key, fields = refused[0]
    where = f"{key.namespace}/{key.name}" + (f" and {len(refused) - 1} more" if len(refused) > 1 else "")
    return False, f"the CustomResourceDefinition {CRD} refuses {fields} of {where}: {_REMEDY}"


def refused_fields(error: ClusterError) -> list[str]:
    """Return the fields that the schema refused; none if the request failed for another reason, such as its size."""
    # With fieldValidation=Strict. Before it, the message has the whole object, which contains text of the user.
    unknown = _UNKNOWN.findall(str(error).rpartition("strict decoding error:")[2])
    causes = [str(cause.get("field") or "") for cause in error.details.get("causes") or ()]
    wrong = [field for field in causes if field.startswith(("status", "spec"))]
    return list(dict.fromkeys([*unknown, *wrong]))
