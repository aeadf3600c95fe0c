"""The sequences of requests: each row of the tables of ``bodies``, and random ones, about half of them valid.

Random ones use few names, so that requests affect each other. Uids and versions differ between the clusters, so they
have placeholders: ``{"$uid": [kind, name]}`` and ``{"$version": [kind, name]}`` become the uid and version that the
cluster returned last (or first) for the object.
"""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from ddpjob.api.objects import Json
from tests.api.test_quantities import QUANTITIES
from tests.worlds.contract.bodies import BODIES, NAMESPACE, PATCHES, SOUND, STATUSES, UNUSED_UID, claim, event, job
from tests.worlds.memory import RESOURCES

KIND_WEIGHTS = ["DDPJob"] * 4 + ["Pod"] * 5 + ["PersistentVolumeClaim"] * 2 + ["Service", "NetworkPolicy", "Event"]
KINDS_BY_NAME = {kind.kind: kind for kind in RESOURCES}
NAMES = ("a", "b")
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


def _uids(kind: str, name: str) -> st.SearchStrategy[Any]:
    seen = {"$uid": [kind, name]}
    return st.sampled_from([seen, seen, seen | {"first": True}, "not-a-uid", ""])


def _versions(kind: str, name: str) -> st.SearchStrategy[Any]:
    seen = {"$version": [kind, name]}
    # A claim's first version is replaced without a request, see Side.object.
    first = {"first": True} if kind != "PersistentVolumeClaim" else {}
    return st.sampled_from([seen, seen, seen | first, "1", "", None])


@st.composite
def _references(draw: st.DrawFn) -> list[Json]:
    """Owner references: to present, deleted and unknown objects, and invalid ones."""
    found = []
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        kind = draw(st.sampled_from(["DDPJob", "DDPJob", "DDPJob", "Pod", "Service"]))
        name = draw(st.sampled_from(NAMES))
        uid = draw(st.sampled_from([{"$uid": [kind, name]}, {"$uid": [kind, name]}, UNUSED_UID]))
        reference: Json = {"apiVersion": KINDS_BY_NAME[kind].api_version, "kind": kind, "name": name, "uid": uid}
        reference |= draw(
            st.sampled_from([{}, {"controller": True, "blockOwnerDeletion": True}, {"controller": False}])
        )
        found.append(reference | draw(st.sampled_from([{}] * 8 + [{"uid": ""}, {"kind": "Unknown"}, {"foo": 1}])))
    return found


@st.composite
def _metadata(draw: st.DrawFn, kind: str, name: str) -> Json:
    meta: Json = {"name": name}
    if draw(st.booleans()):
        meta["labels"] = draw(st.sampled_from(LABELS[:4] * 8 + LABELS))
    if draw(st.integers(0, 2)) == 0:
        meta["ownerReferences"] = draw(_references())
    oddities = st.sampled_from(_ODD_METADATA)
    return meta | (draw(oddities) if draw(st.integers(0, 5)) == 0 else {})


_ODD_METADATA: tuple[Json, ...] = (
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


@st.composite
def _create(draw: st.DrawFn, kind: str, name: str) -> Request:
    body = draw(st.sampled_from(SOUND[kind] if draw(st.integers(0, 2)) else BODIES[kind]))
    own = body.get("metadata", {})
    meta = draw(_metadata(kind, name))
    # Keep the operator's labels; the random metadata overrides the rest.
    return Request("create", kind, {"body": body | {"metadata": own | meta}})


@st.composite
def _delete(draw: st.DrawFn, kind: str, name: str) -> Request:
    arguments: Json = {"name": name}
    if draw(st.booleans()):
        arguments["uid"] = draw(_uids(kind, name))
    if draw(st.booleans()):
        arguments["grace_seconds"] = draw(st.sampled_from([0, 0, 1, 5, 60]))
    return Request("delete", kind, arguments)


_MANAGED = ("labels", "annotations", "finalizers", "ownerReferences", "deletionGracePeriodSeconds")
_IGNORED_METADATA = tuple(meta for meta in _PATCHED_METADATA if not meta.keys() & set(_MANAGED))
"""For the status of a DDPJob. A write to it ignores the other fields, but notes in managedFields who sent them. That is
a new version, although nothing else changes."""


@st.composite
def _patch(draw: st.DrawFn, kind: str, name: str) -> Request:
    of_status = draw(st.booleans())
    patched = _IGNORED_METADATA if of_status and kind == "DDPJob" else _PATCHED_METADATA
    body: Json = dict(draw(st.sampled_from([{"status": status} for status in STATUSES[kind]]))) if of_status else {}
    if not of_status and draw(st.booleans()):
        body = dict(draw(st.sampled_from(PATCHES[kind])))
    meta: Json = dict(draw(st.sampled_from(patched)) if draw(st.integers(0, 3)) == 0 else {})
    if not of_status and not body and not meta:
        meta = dict(draw(st.sampled_from(patched)))
    if draw(st.booleans()):
        meta["resourceVersion"] = draw(_versions(kind, name))
    if meta:
        body["metadata"] = meta
    return Request("patch_status" if of_status else "patch", kind, {"name": name, "body": body})


Place = tuple[str, str]


@st.composite
def _request(draw: st.DrawFn, made: list[Place]) -> Request:
    """One request, mostly for an object that an earlier one created."""
    verb = draw(st.sampled_from(["create"] * 4 + ["patch"] * 5 + ["delete"] * 2 + ["get", "list"]))
    kind, name = draw(st.sampled_from(KIND_WEIGHTS)), draw(st.sampled_from(NAMES))
    if made and verb != "create" and draw(st.integers(0, 5)):
        kind, name = draw(st.sampled_from(made))
    match verb:
        case "create":
            made.append((kind, name))
            return draw(_create(kind, name))
        case "patch":
            return draw(_patch(kind, name))
        case "delete":
            return draw(_delete(kind, name))
        case "get":
            return Request("get", kind, {"name": name})
    return Request("list", kind, {"label_selector": draw(st.sampled_from(SELECTORS))})


@st.composite
def sequences(draw: st.DrawFn) -> list[Request]:
    """Three to twelve requests. The first creates an object, in half of the sequences a valid one."""
    kind, name = draw(st.sampled_from(KIND_WEIGHTS)), draw(st.sampled_from(NAMES))
    made = [(kind, name)]
    valid = Request("create", kind, {"body": SOUND[kind][-1] | {"metadata": {"name": name}}})
    first = valid if draw(st.booleans()) else draw(_create(kind, name))
    return [first, *(draw(_request(made)) for _ in range(draw(st.integers(2, 11))))]


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
    "events about an object": [
        _CREATED,
        *_creates("Event", [event(involvedObject={"namespace": NAMESPACE, "uid": uid}) for uid in ("u", "v")]),
        *(Request("list", "Event", {"field_selector": f"involvedObject.uid={uid}"}) for uid in ("u", "w", "")),
    ],
}
