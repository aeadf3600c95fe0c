"""Finds the job to convert in the documents of a file, and makes the DDPJob."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.spec import DDPJobSpec
from ddpjob.convert import KINDS, pytorchjob, trainjob
from ddpjob.convert.fields import ANY, Difference, walk
from ddpjob.errors import InvalidJobError

SOURCES = dict(zip(KINDS, (pytorchjob.VERSION, trainjob.VERSION), strict=True))
_NOT_KEPT = ("kubectl.kubernetes.io/last-applied-configuration",)
_OF_OBJECTS = {"name": str, "generateName": str, "labels": dict, "annotations": dict, "*": ANY}


@dataclass(frozen=True)
class Conversion:
    """A DDPJob, and what of its source did not carry over."""

    job: Json
    notes: tuple[Difference, ...]


def convert(documents: Sequence[Json]) -> Conversion:
    """Return the DDPJob for the one PyTorchJob or TrainJob among the documents of a file.

    documents: a TrainJob's runtime may be among them.

    Raises:
        InvalidJobError: there is no such job, or several, or no DDPJob can be made of it.
    """
    source = _source(documents)
    notes: list[Difference] = []
    walk(source, {"metadata": _OF_OBJECTS, "spec": dict, "*": ANY}, "", notes)
    metadata = _metadata(source, notes)
    if source["kind"] == "PyTorchJob":
        spec = pytorchjob.spec_of_pytorchjob(source, notes)
    else:
        runtimes = [document for document in documents if str(document.get("kind")) in trainjob.RUNTIMES]
        spec = trainjob.spec_of_trainjob(source, runtimes, notes)
    if names.LABEL_QUEUE in metadata.get("labels", {}) and spec.pop("suspend", False):
        field = "spec.runPolicy.suspend" if source["kind"] == "PyTorchJob" else "spec.suspend"
        notes.append(Difference(field, "the operator asks Kueue before each attempt, and needs no suspended job"))
    order = [field.alias or name for name, field in DDPJobSpec.model_fields.items() if name != "template"]
    spec = {key: spec[key] for key in [*order, "template"] if spec.get(key) not in (None, {}, [])}
    job = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": metadata, "spec": spec}
    return Conversion(job, tuple(dict.fromkeys(notes)))


def _source(documents: Sequence[Json]) -> Json:
    found = [document for document in documents if str(document.get("kind")) in SOURCES]
    kinds = ", ".join(str(document.get("kind")) for document in documents) or "nothing"
    if len(found) != 1:
        raise InvalidJobError(
            f"it must hold exactly one PyTorchJob or TrainJob, and it holds {len(found)}",
            f"it contains {kinds}",
            "put each job into its own file; the runtime of a TrainJob may be in the same file",
        )
    (source,) = found
    if source.get("apiVersion") != SOURCES[source["kind"]]:
        raise InvalidJobError(
            f"apiVersion {source.get('apiVersion')} of {source['kind']} is not known",
            f"{SOURCES[source['kind']]} can be converted",
            "convert it to that version first",
        )
    return source


def _metadata(source: Json, notes: list[Difference]) -> Json:
    """Return name, namespace, labels and annotations; the name must suit a DDPJob, or it is refused later."""
    given = source.get("metadata") or {}
    annotations = {key: value for key, value in (given.get("annotations") or {}).items() if key not in _NOT_KEPT}
    kept = {"name": given.get("name"), "namespace": given.get("namespace"), "labels": given.get("labels")}
    if not kept["name"] and given.get("generateName"):
        kept["name"] = str(given["generateName"]).rstrip("-")
        notes.append(Difference("metadata.generateName", f"a DDPJob needs a name, here {kept['name']}"))
    return {key: value for key, value in (kept | {"annotations": annotations}).items() if value}
