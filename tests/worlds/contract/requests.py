"""The sequences of requests: each row of the tables of ``bodies``, and random ones, about half of them valid.

Random ones use few names, so that requests affect each other. Uids and versions differ between the clusters, so they
have placeholders: ``{"$uid": [kind, name]}`` and ``{"$version": [kind, name]}`` become the uid and version that the
cluster returned last (or first) for the object.
"""

import random
from dataclasses import dataclass
from typing import Any

from ddpjob.api.objects import Json
from tests.worlds.contract.bodies import JOBS, NAMESPACE, PATCHES, SOUND, STATUSES, UNUSED_UID, job
from tests.worlds.memory import RESOURCES

KINDS = ["DDPJob"] * 4 + ["Pod"] * 5 + ["PersistentVolumeClaim"] * 2 + ["Service", "NetworkPolicy", "Event"]
VERBS = ["create"] * 4 + ["patch"] * 3 + ["patch_status"] * 2 + ["delete"] * 2 + ["get", "list"]
KINDS_BY_NAME = {kind.kind: kind for kind in RESOURCES}
LABELS: tuple[Any, ...] = ({}, {"a": "b"}, {"a": "c", "b": ""}, {"x.dev/a": "b"}, None)
SELECTORS: tuple[str | None, ...] = (None, "", "a", "a=b", "a=b,b", "a=", " a ")


@dataclass(frozen=True)
class Request:
    """One call of a verb of ``Cluster``."""

    verb: str
    kind: str
    arguments: Json

    def __str__(self) -> str:
        return f"{self.verb} {self.kind} {self.arguments}"


_ODD_METADATA: tuple[Json, ...] = (
    *({"labels": labels} for labels in LABELS),
    {"annotations": {"note": "x", "empty": ""}},
    {"finalizers": ["example.com/hold"]},
    {"namespace": NAMESPACE},
    {"namespace": "elsewhere"},
    {"uid": "made-up", "creationTimestamp": "2020-01-01T00:00:00Z", "deletionTimestamp": "2020-01-01T00:00:00Z"},
    {"resourceVersion": "7"},
)

_PATCHED_METADATA: tuple[Json, ...] = (
    *({"labels": labels} for labels in (*LABELS, {"a": None})),
    {"annotations": {"note": "y"}},
    {"annotations": None},
    {"finalizers": ["example.com/hold"]},
    {"finalizers": None},
    {"ownerReferences": None},
    {"name": "other"},
    {"namespace": "elsewhere"},
    {"uid": "made-up"},
    {"uid": None},
    {"creationTimestamp": None},
    {"creationTimestamp": "2020-01-01T00:00:00Z"},
    # Not deletionTimestamp: the API server then updates managedFields, which is a write although nothing else changes.
    {"deletionGracePeriodSeconds": 7},
    {"generation": 77},
)


def _owner(chance: random.Random) -> Json:
    """Return a reference to a present, deleted or unknown object."""
    kind, name = chance.choice(["DDPJob", "DDPJob", "DDPJob", "Pod", "Service"]), chance.choice("ab")
    uid = chance.choice([{"$uid": [kind, name]}, {"$uid": [kind, name]}, UNUSED_UID])
    reference: Json = {"apiVersion": KINDS_BY_NAME[kind].api_version, "kind": kind, "name": name, "uid": uid}
    return reference | chance.choice([{}, {"controller": True, "blockOwnerDeletion": True}, {"controller": False}])


def _arguments(chance: random.Random, verb: str, kind: str, name: str) -> Json:
    match verb:
        case "create":
            body, owners = chance.choice(SOUND[kind]), [_owner(chance) for _ in range(chance.choice((1, 1, 2)))]
            owners[1:] = [{**owner, "controller": False} for owner in owners[1:]]  # there can be only one
            meta = body.get("metadata", {}) | {"name": name}
            labels = {"labels": meta.get("labels", {}) | {"a": "b"}}
            more = ({}, labels, {"finalizers": ["example.com/hold"]}, {"ownerReferences": owners})
            return {"body": body | {"metadata": meta | chance.choice(more)}}
        case "delete":
            seen: Json = {"$uid": [kind, name]}
            uid = chance.choice([{}, {}, {"uid": seen}, {"uid": seen | {"first": True}}, {"uid": "not-a-uid"}])
            return {"name": name} | uid | chance.choice([{}, {"grace_seconds": chance.choice((0, 0, 1, 5, 60))}])
        case "get":
            return {"name": name}
        case "list":
            return {"label_selector": chance.choice(SELECTORS)}
    metadata = [{"metadata": meta} for meta in _PATCHED_METADATA]
    statuses = [{"status": status} for status in STATUSES[kind]]
    body = chance.choice(statuses if verb == "patch_status" else PATCHES[kind] + metadata)
    # A claim's first version is replaced without a request, see Side.object.
    first = {"first": True} if kind != "PersistentVolumeClaim" else {}
    seen = {"$version": [kind, name]}
    version = chance.choice([{}, {}, *({"resourceVersion": named} for named in (seen, seen | first, "1", "", None))])
    return {"name": name, "body": body | {"metadata": body.get("metadata", {}) | version}}


def random_sequence(seed: int) -> list[Request]:
    """Return four to twelve requests, most of them for an object that an earlier one created."""
    chance = random.Random(seed)
    kind = chance.choice(KINDS)
    made = [(kind, "a")]
    sequence = [Request("create", kind, {"body": SOUND[kind][-1] | {"metadata": {"name": "a"}}})]
    for _ in range(chance.randint(3, 11)):
        verb, place = chance.choice(VERBS), (chance.choice(KINDS), chance.choice("ab"))
        if verb == "create":
            made.append(place)
        elif chance.random() < 0.8:
            place = chance.choice(made)
        sequence.append(Request(verb, place[0], _arguments(chance, verb, *place)))
    return sequence


def _creates(kind: str, bodies: list[Json]) -> list[Request]:
    return [
        Request("create", kind, {"body": body | {"metadata": body.get("metadata", {}) | {"name": f"x{number}"}}})
        for number, body in enumerate(bodies)
    ]


def _rows(kind: str) -> list[Request]:
    """Return requests with each body, status and patch of a kind. The statuses and patches are of the first object."""
    patches = [*PATCHES[kind], *({"metadata": meta} for meta in _PATCHED_METADATA)]
    patches.append({"metadata": {"deletionTimestamp": "2020-01-01T00:00:00Z"}})
    meant = {"name": "x0"}
    return [
        *_creates(kind, [SOUND[kind][-1], *SOUND[kind], *(JOBS if kind == "DDPJob" else ())]),
        *_creates(kind, [SOUND[kind][-1] | {"metadata": {"name": "a"} | meta} for meta in _ODD_METADATA]),
        *(Request("patch_status", kind, meant | {"body": {"status": status}}) for status in STATUSES[kind]),
        *(Request("patch", kind, meant | {"body": patch}) for patch in patches),
        *(Request("list", kind, {"label_selector": selector}) for selector in SELECTORS),
        *(Request("delete", kind, {"name": f"x{number}", "grace_seconds": 5 * number}) for number in range(3)),
    ]


_CREATED = Request("create", "DDPJob", {"body": job() | {"metadata": {"name": "a"}}})
_IN_STATUS: tuple[Json, ...] = (
    {"labels": {"a": "b"}},
    {"annotations": {"note": "y"}, "finalizers": ["example.com/hold"]},
    {"labels": None, "ownerReferences": None},
    {"deletionGracePeriodSeconds": 7},
    {"resourceVersion": {"$version": ["DDPJob", "a"], "first": True}},
)
TABLE: dict[str, list[Request]] = {kind: _rows(kind) for kind in KINDS_BY_NAME} | {
    "metadata of a status": [  # random requests have none: each is a new version on a real API server
        _CREATED,
        *(
            Request("patch_status", "DDPJob", {"name": "a", "body": {"metadata": meta, "status": {"attempt": attempt}}})
            for attempt, meta in enumerate(_IN_STATUS, start=1)
        ),
    ],
    "no name and a broken rule": [  # kube-apiserver checks no CEL rule of an object without a name
        Request("create", "DDPJob", {"body": job(nprocPerNode=0) | {"metadata": {"name": None}}})
    ],
}
