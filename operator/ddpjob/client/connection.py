"""The connection of ``Client.cluster`` to an API server: configuration, requests with retries, and errors.

Requests name a path, and answers are JSON objects: the typed classes of the official package take a second to import,
and its models refuse fields that they do not know.
"""

import copy
import json
import logging
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import quote

from kubernetes import config
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config.incluster_config import SERVICE_TOKEN_FILENAME
from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError
from yaml import YAMLError

from ddpjob.api import names
from ddpjob.api.backoff import Patience
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.errors import (
    DDPJobError,
    InvalidJobError,
    JobExistsError,
    JobNotFoundError,
    NotAllowedError,
    NotServedError,
    StoppedError,
    UnavailableError,
)
from ddpjob.version import __version__

Query = Mapping[str, str | int | bool | None]
"""Parameters of a request; those that are None are left out."""
Seconds = float | tuple[float, float]
"""Time limit of a request: in all, or to connect and between two parts of the answer."""
_JSON = "application/json"
_MERGE_PATCH = "application/merge-patch+json"

_PAGE = 500  # objects of one request; a pod takes 20 KB

CONNECT_SECONDS = 5.0
REFUSED_SECONDS = 60.0
"""How long a watch or a log survives errors that are not transient: an API server that has just started, or a proxy
before it, also answers with these for a moment."""
_SOON_OTHERWISE = (200, 401, 403, 404)  # 200: but not from an API server
_NAMESPACE_FILE = Path(SERVICE_TOKEN_FILENAME).with_name("namespace")
_ACCEPT = f"{_JSON}, */*"  # a log is text
_OF_AN_API_SERVER = {"kind", "gitVersion"}  # each object and each Status has a kind; /version alone has none


class RequestError(Exception):
    """One request failed. status: of HTTP; None without a response. was_sent: the server may have carried it out."""

    def __init__(self, message: str, status: int | None, answer: Json, *, was_sent: bool = True) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = str(answer.get("reason") or "")
        self.details: Json = answer.get("details") or {}
        self.was_sent = was_sent

    @property
    def is_transient(self) -> bool:
        """Whether the same request may soon succeed."""
        return self.status is None or self.status == 429 or self.status >= 500

    def names(self, plural: str) -> bool:
        """Return whether the server says that an object of this kind does not exist.

        A 404 without its name may come from a server that does not serve the kind yet, or from a proxy.
        """
        return self.status == 404 and self.details.get("kind") == plural and bool(self.details.get("name"))


def request_error(error: BaseException) -> RequestError:
    """Return what a request or the reading of a stream raised, one of ``TROUBLES``, as ``RequestError``."""
    if isinstance(error, RequestError):
        return error
    was_sent = not isinstance(error, NewConnectionError | ConnectTimeoutError | config.ConfigException)
    return RequestError(" ".join(str(error).split()) or type(error).__name__, None, {}, was_sent=was_sent)


def is_absent(error: DDPJobError, resource: Resource) -> bool:
    """Return whether the server says that an object of this kind does not exist."""
    return isinstance(error.__cause__, RequestError) and error.__cause__.names(resource.plural)


Response = BaseHTTPResponse
"""A response whose body is not read yet."""
TROUBLES = (RequestError, HTTPError, OSError)
"""What a request raises, and the reading of its stream."""


class Answer(NamedTuple):
    """The JSON object of a response. time: that of the server; a wrong clock of this machine does not matter then."""

    body: Json
    time: datetime | None


def path_of(
    resource: Resource, namespace: str | None = None, name: str | None = None, subresource: str | None = None
) -> str:
    """Return the URL path of an object or its subresource, or without a name of all objects of a namespace.

    Raises:
        InvalidJobError: the path would be that of another object.
    """
    for part, what in ((name, resource.kind), (namespace, "Namespace")):
        if part is not None and (part in ("", ".", "..") or "/" in part):
            raise InvalidJobError(
                f"{part!r} is not a name of a {what}",
                "a name has lower-case letters, digits and '-'",
                f"kubectl get {what.lower()} lists them",
            )
    parts = [resource.path(namespace and quote(namespace)), name and quote(name), subresource]
    return "/" + "/".join(part for part in parts if part)


def parsed(data: bytes, status: int, keys: set[str]) -> Json:
    """Return a JSON object that has one of these keys. Raises ``RequestError`` for anything else, as proxies send."""
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and keys & answer.keys():
        return answer
    raise RequestError("the answer is not from an API server", status, {})


def lines_of(response: Response, *, begun: bool = False) -> Generator[bytes, None, None]:
    """Yield the lines of a stream as they come, with their line feeds, and close it; the last line may have none.

    begun: also yield the new part of a line without its end, if a program draws that again: it has a carriage return.

    Raises one of ``TROUBLES``.
    """
    rest: list[bytes] = []
    try:
        for block in response.stream(65_536, decode_content=False):
            *complete, last = block.split(b"\n")
            for line in complete:
                yield b"".join([*rest, line, b"\n"])
                rest = []
            rest.append(last)
            if begun and b"\r" in last:
                yield b"\r" + last
        if last := b"".join(rest):
            yield last
    finally:
        response.close()
        response.release_conn()


class ApiConnection:
    """An API server: its address, credentials and default namespace. Raises ``UnavailableError`` without any.

    timeout: seconds for one request with its retries. retries: whether there are any.
    """

    def __init__(
        self, context: str | None, kubeconfig: str | Path | None, timeout: float, *, retries: bool = True
    ) -> None:
        self.retries = retries
        self._context = context
        self._kubeconfig = str(kubeconfig) if kubeconfig else None
        self.timeout = timeout
        self.closed = threading.Event()
        self._open, self._keeping = weakref.WeakSet[Response | ApiConnection](), threading.Lock()
        self.namespace = "default"
        self.api = self._load()

    @property
    def server(self) -> str:
        return str(self.api.configuration.host)

    def request(
        self, method: str, path: str, query: Query | None = None, body: Json | None = None, *, repeats: bool = True
    ) -> Json:
        """Return the JSON object that the server answers.

        path: of ``path_of``. repeats: the request may be sent again if the server may have carried it out.

        Raises:
            DDPJobError: the last error, after ``timeout``.
        """
        return self.answer(method, path, query, body, repeats=repeats).body

    def found(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """Return an object; None if the server says that there is none. Other errors: see ``request``."""
        try:
            return self.request("GET", path_of(resource, namespace, name))
        except DDPJobError as error:
            if is_absent(error, resource):
                return None
            raise

    def answer(
        self, method: str, path: str, query: Query | None = None, body: Json | None = None, *, repeats: bool = True
    ) -> Answer:
        """Return the JSON object with the time of the server; see ``request``."""
        end, renewed, patience = time.monotonic() + self.timeout, False, Patience(self.timeout)
        while True:
            left = end - time.monotonic()
            seconds = (min(CONNECT_SECONDS, left), left)
            try:
                return self.once(method, path, query, body, seconds=seconds)
            except RequestError as trouble:
                error = trouble
            if error.status == 401 and not renewed:
                renewed = True
                self.renew()
                continue
            again = self.retries and error.is_transient and (repeats or not error.was_sent or error.status == 429)
            delay = patience.delay(time.monotonic()) or math.inf
            pause = delay * random.uniform(0.5, 1.5)  # noqa: S311 - spreads clients
            if not again or time.monotonic() + pause + 0.1 > end:
                raise self.explained(error) from error
            self.closed.wait(pause)

    def items(self, path: str, query: Query, most: float = math.inf) -> list[Json]:
        """Return the objects of a list, read in pages; not many more than ``most``. Errors: see ``request``."""
        return self.listed(path, query, most)[0]

    def listed(self, path: str, query: Query, most: float = math.inf) -> tuple[list[Json], str]:
        """Return the objects as ``items``, and their version, from which a watch continues."""
        found: list[Json] = []
        token: str | None = None
        while True:
            try:
                page = self.request("GET", path, {**query, "limit": _PAGE, "continue": token})
            except DDPJobError:
                if token is None:
                    raise
                # The server forgets an old token; then all objects are asked for at once.
                found, page = [], self.request("GET", path, query)
            found += page.get("items") or ()
            head = page.get("metadata") or {}
            token = head.get("continue") or None
            if token is None or len(found) >= most:
                return found, str(head.get("resourceVersion") or "")

    def once(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Json | None = None,
        *,
        seconds: Seconds | None = None,
    ) -> Answer:
        """Return the JSON object of one request, without another try. Raises ``RequestError``."""
        response = self.send(method, path, query, body, seconds=seconds)
        try:
            answer = parsed(response.data, response.status, _OF_AN_API_SERVER)
        except (HTTPError, OSError) as error:
            raise request_error(error) from error
        try:
            return Answer(answer, parsedate_to_datetime(response.headers["Date"]))
        except (KeyError, ValueError, TypeError):
            return Answer(answer, None)

    def send(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Json | None = None,
        *,
        seconds: Seconds | None = None,
    ) -> Response:
        """Return the response of one request, whose body is not read yet: a stream. Raises ``RequestError``.

        seconds: default: ``timeout``.

        Raises ``StoppedError`` once the connection is shut down.
        """
        if self.closed.is_set():
            raise StoppedError
        given = [(key, value) for key, value in (query or {}).items() if value is not None]
        content = _MERGE_PATCH if method == "PATCH" else _JSON
        headers = {"Accept": _ACCEPT} | ({} if body is None else {"Content-Type": content})
        try:
            request = self.api.param_serialize(
                method, path, query_params=given, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            sent = self.api.call_api(*request, _request_timeout=self.timeout if seconds is None else seconds)
            response = cast(Response, sent.response)
            self._keep(response)
            if self.closed.is_set():  # meanwhile
                response.close()
                raise StoppedError
            if 200 <= response.status <= 299:
                return response
            raise _refusal(response.status, response.reason, response.data)
        except (ApiException, config.ConfigException, HTTPError, OSError) as error:
            raise request_error(error) from error

    def survive(self, error: RequestError, patience: Patience, longest: float = math.inf) -> None:
        """Wait before a watch is tried again. Raises ``DDPJobError`` after errors that last for long."""
        if (pause := pause_after(error, patience)) is None:
            raise self.explained(error) from error
        if error.status == 401:
            self.renew()
        self.closed.wait(min(pause, longest))

    def renew(self) -> None:
        """Read the configuration again: a token may have been replaced."""
        fresh = self._load()
        self.api.configuration = fresh.configuration
        self.api.rest_client = fresh.rest_client

    @contextmanager
    def part(self) -> "Iterator[ApiConnection]":
        """Give the same connection for streams that end with the block, or with this connection."""
        part = copy.copy(self)
        part.closed, part._open = threading.Event(), weakref.WeakSet()
        self._keep(part)
        if self.closed.is_set():
            part.closed.set()

        try:
            yield part
        finally:
            part.shutdown()

    def shutdown(self) -> None:
        """End the streams and the pauses, also those of other threads."""
        self.closed.set()
        with self._keeping:
            found = list(self._open)
        for one in found:
            with suppress(Exception):  # a response that has ended
                one.shutdown()

    def _keep(self, one: "Response | ApiConnection") -> None:
        with self._keeping:
            self._open.add(one)

    def close(self) -> None:
        self.shutdown()
        self.api.close()  # type: ignore[no-untyped-call]

    def explained(self, error: RequestError) -> DDPJobError:
        """Return an error as three lines."""
        if (known := _known(error)) is not None:
            return known
        answer = "does not answer" if error.is_transient else f"answers with HTTP {error.status}"
        return UnavailableError(
            f"the cluster {self.server} {answer}: {error.message}",
            "its API server restarts, or a network or a proxy between is down; a change may have been carried out",
            "kubectl get --raw /readyz, then try again",
        )

    def _load(self) -> ApiClient:
        configuration = Configuration()
        path = self._kubeconfig or os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
        try:
            in_pod = Path(SERVICE_TOKEN_FILENAME).exists() and "KUBERNETES_SERVICE_HOST" in os.environ
            if in_pod and not (self._context or self._kubeconfig or "KUBECONFIG" in os.environ):
                path = "the pod's service account"
                config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
                self.namespace = _NAMESPACE_FILE.read_text().strip() or "default"
            else:
                with _no_errors_logged():
                    loader = _loader_of(path, self._context)
                    loader.load_and_set(configuration)  # type: ignore[no-untyped-call]
                self.namespace = str((loader.current_context.get("context") or {}).get("namespace") or "default")
        except (config.ConfigException, YAMLError, OSError, ValueError, TypeError, KeyError) as error:
            found = "it is no kubeconfig" if isinstance(error, TypeError | KeyError) else " ".join(str(error).split())
            raise UnavailableError(
                f"no cluster to connect to: {path}: {found}",
                "the kubeconfig is read from kubeconfig=…, from $KUBECONFIG or from ~/.kube/config",
                "kubectl config get-contexts lists what can be given as context",
            ) from error
        configuration.retries = False  # ``request`` retries, and knows what may be sent twice
        client = ApiClient(configuration)
        client.user_agent = f"ddpjob/{__version__}"
        return client


def pause_after(error: RequestError, patience: Patience) -> float | None:
    """Return the seconds to wait before the request is repeated, or None if it is not."""
    if not (error.is_transient or error.status in _SOON_OTHERWISE):
        return None
    delay = patience.delay(time.monotonic(), None if error.is_transient else REFUSED_SECONDS)
    return delay and delay * random.uniform(0.5, 1.5)  # noqa: S311


def _refusal(status: int, reason: str | None, body: bytes) -> RequestError:
    """Return the error of a response whose status is not 2xx."""
    try:
        answer = json.loads(body)
    except ValueError:
        answer = {}
    answer = answer if isinstance(answer, dict) else {}
    return RequestError(str(answer.get("message") or reason or f"HTTP {status}"), status, answer)


@contextmanager
def _no_errors_logged() -> Iterator[None]:
    """Raise ``UnavailableError`` for what the official package only logs: requests would be anonymous."""
    texts: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        if record.module in ("kube_config", "exec_provider"):
            texts.append(" ".join(record.getMessage().split()))
        return False

    handler = logging.Handler(logging.ERROR)
    handler.addFilter(note)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    if texts:
        raise UnavailableError(
            f"no credentials for the cluster: {'; '.join(texts)}",
            "the program that the kubeconfig names to get credentials failed, or does not exist",
            "kubectl auth whoami calls the same program; install it, or log in again",
        )


def _loader_of(path: str, context: str | None) -> KubeConfigLoader:
    """Return what ``load_kube_config`` loads the files with; it would read them again for the namespace."""
    merged = KubeConfigMerger(path).config  # type: ignore[no-untyped-call]
    if merged is None:
        raise config.ConfigException("Invalid kube-config file. No configuration found.")
    return KubeConfigLoader(merged, active_context=context, config_base_path=None)  # type: ignore[no-untyped-call]


def _known(error: RequestError) -> DDPJobError | None:
    """Return the error of a status that has one cause."""
    match error.status:
        case 400 | 413 | 422:
            return InvalidJobError(
                f"the cluster refuses it: {error.message}",
                "a field breaks a rule, or the operator's CRD is of another release",
                "correct the field; docs/reference/fields.md lists what each field may hold",
            )
        case 401:
            return UnavailableError(
                f"the cluster refuses the credentials: {error.message}",
                "the token or certificate of the kubeconfig is wrong or has expired",
                "log in again, then try kubectl auth whoami",
            )
        case 403:
            return NotAllowedError(
                f"not allowed: {error.message}",
                "the roles view and edit of the namespace grant the rights; a quota or a policy can also refuse",
                f"kubectl auth can-i --list | grep {names.DDPJOBS.plural}",
            )
        case 404:
            return _not_found(error)
        case 409 if error.reason == "AlreadyExists":
            return JobExistsError.of(str(error.details.get("name")))
        case 409:
            return UnavailableError(f"the job changed meanwhile: {error.message}", "", "look at it, then try again")
    return None


def _not_found(error: RequestError) -> DDPJobError:
    name = error.details.get("name")
    if error.names(names.DDPJOBS.plural):
        return JobNotFoundError(
            f"there is no job {name}",
            "another namespace, or it was deleted",
            "ddpjob get lists the jobs of the namespace; ddpjob get -A those of all, with the right to list them",
        )
    if error.names("namespaces"):
        return InvalidJobError(
            f"there is no namespace {name}", "a job needs an existing one", f"kubectl create namespace {name}"
        )
    if name:
        return UnavailableError(f"there is no {error.details.get('kind')} {name}", "it was deleted, or never existed")
    return NotServedError(
        f"the cluster does not serve DDPJobs: {error.message}",
        "the operator's CustomResourceDefinition is not installed, or this is another cluster than you meant",
        "docs/start/install.md installs the operator; context=… selects a cluster",
    )
