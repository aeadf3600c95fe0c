"""The sequences of requests: each row of the tables of ``bodies``, and random ones, about half of them valid.

Random ones use few names, so that requests affect each other. Uids and versions differ between the clusters, so they
have placeholders: ``{"$uid": [kind, name]}`` and ``{"$version": [kind, name]}`` become the uid and version that the
cluster returned last (or first) for the object.
"""

import random
from dataclasses import dataclass
from typing import Any

from ddpjob.api.objects import Json
from tests.api.test_quantities import QUANTITIES
from tests.worlds.contract.bodies import BODIES, NAMESPACE, PATCHES, SOUND, STATUSES, UNUSED_UID, claim, job
from tests.worlds.memory import RESOURCES

KINDS = ["DDPJob"] * 4 + ["Pod"] * 5 + ["PersistentVolumeClaim"] * 2 + ["Service", "NetworkPolicy", "Event"]
VERBS = ["create"] * 4 + ["patch"] * 3 + ["patch_status"] * 2 + ["delete"] * 2 + ["get", "list"]
KINDS_BY_NAME = {kind.kind: kind for kind in RESOURCES}
BAD_NAMES = ("A", "a.b", "1a", "a..b", "-a", "x" * 46, "x" * 64, "x" * 254, "é", "a_b", "")

LABELS: tuple[Any, ...] = (
    *({}, {"a": "b"}, {"a": "c", "b": ""}, {"x.dev/a": "b"}, {"a": None}, None),
    *({"a b": "c"}, {"a": "c d"}, {"/a": ""}, {"a": 5}, {"a": "x" * 64}, []),
)
SELECTORS: tuple[str | None, ...] = (None, "", "a", "a=b", "a=b,b", "a=", "a=b c", ",", "a=b,", "a=-", "A_/b=c", " a ")


@dataclass(frozen=True)
class Request:
    """One call of a verb of ``Cluster``."""

    verb: str
    kind: str
    arguments: Json

    def __str__(self) -> str:
        return f"{self.verb} {self.kind} {self.arguments}"


_OWNER: Json = {"apiVersion": "v1", "kind": "Pod", "name": "x0", "uid": UNUSED_UID}
_ODD_METADATA: tuple[Json, ...] = (
    *({"labels": labels} for labels in LABELS),
    *({"ownerReferences": [_OWNER | odd]} for odd in ({"uid": ""}, {"kind": "Unknown"}, {"foo": 1})),
    {"ownerReferences": [_OWNER | {"controller": True}, _OWNER | {"controller": True, "uid": "u"}]},
    {"annotations": {"note": "x", "empty": ""}},
    {"annotations": {"a note": "x"}},
    {"finalizers": ["example.com/hold"]},
    {"finalizers": ["a b"]},
    {"namespace": NAMESPACE},
    {"namespace": "elsewhere"},
    {"name": None},
    {"name": 5},
    {"foo": 1},
    {"uid": "made-up", "creationTimestamp": "2020-01-01T00:00:00Z", "deletionTimestamp": "2020-01-01T00:00:00Z"},
    {"creationTimestamp": "yesterday"},
    {"resourceVersion": "7"},
    *({"name": name} for name in BAD_NAMES),
)

_PATCHED_METADATA: tuple[Json, ...] = (
    *({"labels": labels} for labels in LABELS),
    {"annotations": {"note": "y"}},
    {"annotations": None},
    {"finalizers": ["example.com/hold"]},
    {"finalizers": None},
    {"ownerReferences": None},
    {"name": "other"},
    {"name": None},
    {"namespace": "elsewhere"},
    {"uid": "made-up"},
    {"uid": None},
    {"creationTimestamp": None},
    {"creationTimestamp": "2020-01-01T00:00:00Z"},
    # Not deletionTimestamp: the API server then updates managedFields, which is a write although nothing else changes.
    {"deletionGracePeriodSeconds": 7},
    {"generation": 77},
    {"foo": 1},
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
        *_creates(kind, [SOUND[kind][-1], *SOUND[kind], *BODIES[kind]]),
        *_creates(kind, [SOUND[kind][-1] | {"metadata": {"name": "a"} | meta} for meta in _ODD_METADATA]),
        *(Request("patch_status", kind, meant | {"body": {"status": status}}) for status in STATUSES[kind]),
        *(Request("patch", kind, meant | {"body": patch}) for patch in patches),
        *(Request("list", kind, {"label_selector": selector}) for selector in SELECTORS),
        *(Request("delete", kind, {"name": f"x{number}", "grace_seconds": 5 * number}) for number in range(3)),
    ]


def _sizes() -> list[Json]:
    units = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "e3", "E-3")
    written = [*QUANTITIES, *(f"{number}{unit}" for number in ("1.5", "0.001", "2048") for unit in units)]
    return [claim(resources={"requests": {"storage": "1Gi", "other": text}}) for text in written]


_CREATED = Request("create", "DDPJob", {"body": job() | {"metadata": {"name": "a"}}})
_IN_STATUS: tuple[Json, ...] = (
    {"labels": {"a": "b"}},
    {"labels": {"a b": "c"}},
    {"annotations": {"note": "y"}, "finalizers": ["example.com/hold"]},
    {"labels": None, "ownerReferences": None},
    {"deletionGracePeriodSeconds": 7},
    {"resourceVersion": {"$version": ["DDPJob", "a"], "first": True}},
)
TABLE: dict[str, list[Request]] = {kind: _rows(kind) for kind in KINDS_BY_NAME} | {
    "quantities": _creates("PersistentVolumeClaim", _sizes()),
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
