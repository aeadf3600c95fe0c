"""What is read of a cluster for the checks of ``ddpjob doctor``, with the rights of the user."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.client import checkup
from ddpjob.client.checkup import Check
from ddpjob.client.connection import TROUBLES, Answer, Connection, RequestError, path_of, request_error
from ddpjob.version import __version__

_SECONDS = 5.0
_LIMIT = 500
_CLASSES = names.Resource("storage.k8s.io/v1", "StorageClass", "storageclasses")


def check_cluster(connection: Connection, namespace: str) -> list[Check]:
    """Return the checks of a cluster, with the rights of the user: what it may not read makes a check unknown."""

    def tried(name: str, what: str, check: Callable[[Connection, str], Check]) -> Check:
        try:
            return check(connection, namespace)
        except TROUBLES as trouble:
            error = request_error(trouble)
            why = "you may not read this" if error.status == 403 else error.message
            return checkup.of_cluster(name, "unknown", f"{what} could not be read: {why}")

    checks: Sequence[tuple[str, str, Callable[[Connection, str], Check]]] = (
        ("api-server", "the version", _check_server),
        ("operator", "the Deployment of the operator", _check_operator),
        ("storage", "storage classes", _check_storage),
    )
    with ThreadPoolExecutor(len(checks)) as pool:
        return list(pool.map(lambda check: tried(*check), checks))


def _get(connection: Connection, path: str, **query: str | int) -> Answer:
    return connection.once("GET", path, query, seconds=min(_SECONDS, connection.timeout))


def _items(connection: Connection, resource: names.Resource, namespace: str | None = None, **query: str) -> list[Json]:
    return list(_get(connection, path_of(resource, namespace), limit=_LIMIT, **query).body.get("items") or ())


def _check_server(connection: Connection, _: str) -> Check:
    try:
        answer = _get(connection, "/version")
    except RequestError as error:
        return checkup.server({}, None, error.message)
    return checkup.server(answer.body, (datetime.now(UTC) - answer.time).total_seconds() if answer.time else None, "")


def _check_operator(connection: Connection, namespace: str) -> Check:
    found = _items(connection, names.DEPLOYMENTS, labelSelector=names.OPERATOR_SELECTOR)
    return checkup.operator(found, namespace, __version__)


def _check_storage(connection: Connection, namespace: str) -> Check:
    try:
        claims = _items(connection, names.CLAIMS, namespace)
    except RequestError:
        claims = []
    return checkup.storage(_items(connection, _CLASSES), claims)
