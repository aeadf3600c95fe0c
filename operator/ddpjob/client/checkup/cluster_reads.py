"""What is read of a cluster for its checks, with the rights of the user."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

from ddpjob.api import names
from ddpjob.api.crd import openapi
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json, element
from ddpjob.client.checkup import cluster
from ddpjob.client.checkup.check import Check
from ddpjob.client.checkup.cluster import RIGHTS, Operators, Right
from ddpjob.client.checkup.probes import Probe, UnreadableError, run
from ddpjob.client.connection import TROUBLES, Answer, Connection, Query, RequestError, parsed, path_of, request_error
from ddpjob.client.verdict.operator import serves
from ddpjob.version import __version__

_SECONDS = 5.0
_LIMIT = 500
_ACCESS_REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_CLASSES = Resource("storage.k8s.io/v1", "StorageClass", "storageclasses")
_LEASE = "DDPJOB_OPERATOR_LEASE"


def check_cluster(connection: Connection, namespace: str) -> list[Check]:
    """Return the checks of a cluster; what the user may not read makes a check unknown."""
    reads = _Reads(connection, namespace)

    def probe(name: str, what: str, read: Callable[[], Any], judge: Callable[[Any], Check], todo: str = "") -> Probe:
        return Probe("cluster", name, what, read, judge, 4 * _SECONDS, todo)

    return run(
        [
            probe("api-server", "the version", reads.version, lambda found: cluster.server(*found), "kubectl version"),
            probe("crd", "what the API server serves", reads.crd, lambda found: cluster.crd(*found)),
            probe("rights", "your rights", reads.rights, partial(cluster.rights, namespace=namespace)),
            probe(
                "operator",
                "the Deployment of the operator",
                reads.operators,
                lambda found: cluster.operator(found[0], namespace, found[1], __version__),
                "ddpjob why JOB sees from a job whether the operator works",
            ),
            probe("storage", "storage classes", reads.storage, lambda found: cluster.storage(*found)),
        ]
    )


class _Reads:
    """One request or a few for each check."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self._connection = connection
        self._namespace = namespace

    def version(self) -> tuple[Json, float | None, str]:
        """Return the version, by how many seconds this machine's clock is ahead of the server's, and an error."""
        try:
            answer = self._get("/version")
        except UnreadableError as error:
            return {}, None, str(error)
        ahead = (datetime.now(UTC) - answer.time).total_seconds() if answer.time is not None else None
        return answer.body, ahead, ""

    def crd(self) -> tuple[bool, set[str] | None, set[str]]:
        """Return whether DDPJobs are served, and the fields that the server and this release know."""
        known = cluster.fields_of(openapi())
        try:
            served = self._get(f"/apis/{names.API_VERSION}").body
        except _AbsentError:
            return False, None, known
        if all(resource.get("name") != names.DDPJOBS.plural for resource in served.get("resources") or ()):
            return False, None, known
        schemas = (self._document(f"/openapi/v3/apis/{names.API_VERSION}").get("components") or {}).get("schemas") or {}
        mine = next((s for name, s in schemas.items() if name.endswith(f".{names.DDPJOBS.kind}")), None)
        return True, cluster.fields_of(mine) if mine is not None else None, known

    def rights(self) -> dict[Right, bool]:
        with ThreadPoolExecutor(len(RIGHTS)) as pool:
            return dict(zip(RIGHTS, pool.map(self._may, RIGHTS), strict=True))

    def operators(self) -> tuple[Operators, datetime]:
        """Return the operators, and the time of the server."""
        query: Query = {"labelSelector": names.OPERATOR_SELECTOR, "limit": _LIMIT}
        answer = self._get(path_of(names.DEPLOYMENTS), query)
        found = list(answer.body.get("items") or ())
        now = answer.time or datetime.now(UTC)
        serving = next((one for one in found if serves(one, self._namespace)), None)
        if serving is None:
            return Operators(found), now
        meta = serving["metadata"]
        pods = self._optional(
            partial(self.items, names.PODS, meta["namespace"], {"labelSelector": names.OPERATOR_SELECTOR})
        )
        return Operators(found, pods, self._lease(serving)), now

    def storage(self) -> tuple[Sequence[Json], Sequence[Json]]:
        claims = self._optional(partial(self.items, names.CLAIMS, self._namespace))
        return self.items(_CLASSES), claims or ()

    def items(self, resource: Resource, namespace: str | None = None, query: Query | None = None) -> Sequence[Json]:
        answer = self._get(path_of(resource, namespace), {"limit": _LIMIT, **(query or {})})
        return cast(Sequence[Json], answer.body.get("items") or ())

    def _may(self, right: Right) -> bool:
        resource, _, part = right.resource.partition("/")
        attributes = {"namespace": self._namespace, "verb": right.verb, "group": right.group, "resource": resource}
        attributes |= {"subresource": part} if part else {}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        return bool((self._ask("POST", _ACCESS_REVIEW, None, review).body.get("status") or {}).get("allowed"))

    def _lease(self, deployment: Json) -> Json | None:
        """Return the Lease that one of several replicas holds; None if there is none, or it cannot be read."""
        namespace, _, name = _environment(deployment).get(_LEASE, "").partition("/")
        if not name:
            return None
        found: Json | None = self._optional(lambda: self._get(path_of(names.LEASES, namespace, name)).body)
        return found

    def _optional(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except UnreadableError:
            return None

    def _document(self, path: str) -> Json:
        """Return a document that is no API object."""
        try:
            response = self._connection.send("GET", path, seconds=_SECONDS)
            return parsed(response.data, response.status, {"openapi"})
        except TROUBLES as trouble:
            raise _unreadable(request_error(trouble)) from trouble

    def _get(self, path: str, query: Query | None = None) -> Answer:
        return self._ask("GET", path, query)

    def _ask(self, method: str, path: str, query: Query | None, body: Json | None = None) -> Answer:
        seconds = min(_SECONDS, self._connection.timeout)
        try:
            return self._connection.once(method, path, query, body, seconds=seconds)
        except RequestError as error:
            raise _unreadable(error) from error


class _AbsentError(UnreadableError):
    """The server does not have it."""


def _unreadable(error: RequestError) -> UnreadableError:
    if error.status == 404:
        return _AbsentError(error.message)
    return UnreadableError("you may not read this" if error.status == 403 else error.message)


def _environment(deployment: Json) -> dict[str, str]:
    """Return the variables of the operator's container, as far as the Deployment shows their values."""
    containers = deployment["spec"]["template"]["spec"].get("containers") or ()
    container = element(containers, "name", "operator") or next(iter(containers), {})
    given: dict[str, str] = {}
    for variable in container.get("env") or ():
        source = ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath")
        if source == "metadata.namespace":
            given[str(variable["name"])] = str(deployment["metadata"].get("namespace") or "")
        elif "value" in variable:
            given[str(variable["name"])] = str(variable["value"])
    return given
