"""The connection of ``Client.cluster`` to an API server: configuration, requests with retries, and errors.

Answers are JSON objects: the typed models of the official package refuse fields that they do not know.
"""

import json
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from kubernetes import config
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config.incluster_config import SERVICE_TOKEN_FILENAME
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.errors import (
    DDPJobError,
    InvalidJobError,
    JobExistsError,
    JobNotFoundError,
    NotAllowedError,
    UnavailableError,
)

CONNECT_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
"""How long a watch or a log survives errors in a row: longer than an API server takes to restart."""
REFUSED_SECONDS = 60.0
"""The same for 401 and 403, which an API server that has just started also answers for a moment."""
_DELAYS = (0.2, 0.5, 1.0, 2.0)
_LONGEST_DELAY = 5.0
_NAMESPACE_FILE = Path(SERVICE_TOKEN_FILENAME).with_name("namespace")
TROUBLES = (ApiException, HTTPError, OSError)
"""What the official package raises for a request."""


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
    """Return what the official package raised as ``RequestError``."""
    if isinstance(error, ApiException) and error.status:
        try:
            answer = json.loads(error.body or "")
        except (ValueError, TypeError):
            answer = {}
        answer = answer if isinstance(answer, dict) else {}
        message = str(answer.get("message") or error.reason or f"HTTP {error.status}")
        return RequestError(message, int(error.status), answer)
    was_sent = not isinstance(error, NewConnectionError | ConnectTimeoutError)
    return RequestError(" ".join(str(error).split()) or type(error).__name__, None, {}, was_sent=was_sent)


class Response(Protocol):
    """What the official package returns for ``_preload_content=False``: a response of urllib3."""

    status: int
    reason: str | None
    data: bytes
    headers: Mapping[str, str]

    def stream(self, amt: int | None, decode_content: bool | None = None) -> Any: ...
    def shutdown(self) -> None: ...
    def close(self) -> None: ...
    def release_conn(self) -> None: ...


def require_success(response: Response) -> Response:
    """Return a response without an error. Raises ``ApiException``."""
    if 200 <= response.status <= 299:
        return response
    body = response.data.decode(errors="replace")
    response.release_conn()
    raise ApiException(status=response.status, reason=response.reason or "", body=body)


class Connection:
    """An API server: its address, credentials and default namespace. Raises ``UnavailableError`` without any.

    timeout: seconds for one request with its retries.
    """

    def __init__(self, context: str | None, kubeconfig: str | Path | None, timeout: float) -> None:
        self._context = context
        self._kubeconfig = str(kubeconfig) if kubeconfig else None
        self.timeout = timeout
        self.namespace = "default"
        self.api = self._load()

    @property
    def server(self) -> str:
        return str(self.api.configuration.host)

    def request(self, call: Callable[..., Any], *arguments: Any, repeats: bool = True, **options: Any) -> Any:
        """Return the answer of one call of the official package, as JSON.

        repeats: the request may be sent again if the server may have carried it out.

        Raises:
            DDPJobError: the last error, after ``timeout``.
        """
        end, renewed = time.monotonic() + self.timeout, False
        for delay in [*_DELAYS, *[_LONGEST_DELAY] * 1000]:
            left = end - time.monotonic()
            try:
                return call(*arguments, _request_timeout=(min(CONNECT_SECONDS, left), left), **options)
            except TROUBLES as trouble:
                error = request_error(trouble)
            if error.status == 401 and not renewed:
                renewed = True
                self.renew()
                continue
            again = error.is_transient and (repeats or not error.was_sent or error.status == 429)
            pause = delay * random.uniform(0.5, 1.5)  # noqa: S311 - spreads clients
            if not again or time.monotonic() + pause + 0.1 > end:
                raise self.explained(error) from error
            time.sleep(pause)
        raise AssertionError("more tries than a timeout allows")

    def raw(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Json:
        """Return the JSON answer of a call that would otherwise return a typed model. Raises as ``request``."""

        return cast(Json, self.request(_read_json, call, *arguments, **options))

    def raw_once(self, call: Callable[..., Any], *arguments: Any) -> Json:
        """Do the same without another try. Raises what the official package raises."""
        return _read_json(call, *arguments, _request_timeout=self.timeout)

    def renew(self) -> None:
        """Read the configuration again: a token may have been replaced. Clients of the package keep this one."""
        fresh = self._load()
        self.api.configuration = fresh.configuration
        self.api.rest_client = fresh.rest_client

    def close(self) -> None:
        self.api.close()  # type: ignore[no-untyped-call]

    def explained(self, error: RequestError) -> DDPJobError:
        """Return an error as three lines."""
        if (explain := _EXPLANATIONS.get(error.status or 0)) is not None:
            return explain(error)
        answer = "does not answer" if error.is_transient else f"answers with HTTP {error.status}"
        return UnavailableError(
            f"the cluster {self.server} {answer}: {error.message}",
            "its API server restarts, or a network or a proxy between is down; a change may have been carried out",
            "kubectl get --raw /readyz, then try again",
        )

    def _load(self) -> ApiClient:
        configuration = Configuration()
        path = self._kubeconfig or os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
        in_pod = Path(SERVICE_TOKEN_FILENAME).exists() and "KUBERNETES_SERVICE_HOST" in os.environ
        try:
            if in_pod and not (self._context or self._kubeconfig or "KUBECONFIG" in os.environ):
                path = "the pod's service account"
                config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
                self.namespace = _NAMESPACE_FILE.read_text().strip() or "default"
            else:
                config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=path, context=self._context, client_configuration=configuration, persist_config=False
                )
                self.namespace = _namespace_of(path, self._context)
        except (config.ConfigException, OSError, ValueError, TypeError, KeyError) as error:
            raise UnavailableError(
                f"no cluster to connect to: {path}: {' '.join(str(error).split())}",
                "the kubeconfig is that of kubeconfig=…, of $KUBECONFIG or ~/.kube/config",
                "kubectl config get-contexts lists what can be given as context",
            ) from error
        configuration.retries = False  # ``request`` retries, and knows what may be sent twice
        return ApiClient(configuration)


class Patience:
    """Decides how long errors in a row are survived, and how long to wait after each."""

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = PATIENCE_SECONDS if seconds is None else seconds
        self._since: float | None = None
        self._tries = 0

    def reset(self) -> None:
        """Begin again after a success."""
        self._since, self._tries = None, 0

    def pause(self, error: RequestError) -> float | None:
        """Return the seconds to wait before the next try, or None if there is none."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        lasted, limit = now - self._since, self._seconds if error.is_transient else min(self._seconds, REFUSED_SECONDS)
        if lasted > limit or not (error.is_transient or error.status in (401, 403, 404)):
            return None
        self._tries += 1
        delay: float = min(_LONGEST_DELAY, 0.1 * 2**self._tries)
        return delay * random.uniform(0.5, 1.5)  # noqa: S311


def read_response(call: Callable[..., Any], *arguments: Any, **options: Any) -> Response:
    """Call a method of the official package, and return its whole response. Raises ``ApiException``."""
    return require_success(call(*arguments, _preload_content=False, **options))


def _read_json(call: Callable[..., Any], *arguments: Any, **options: Any) -> Json:
    return cast(Json, json.loads(read_response(call, *arguments, **options).data))


def _namespace_of(path: str, context: str | None) -> str:
    contexts, active = config.list_kube_config_contexts(config_file=path)  # type: ignore[no-untyped-call]
    found = next((entry for entry in contexts if entry["name"] == context), active)
    return str((found.get("context") or {}).get("namespace") or "default")


def _invalid(error: RequestError) -> DDPJobError:
    return InvalidJobError(
        f"the cluster refuses it: {error.message}",
        "a field breaks a rule, or the operator's CRD is of another release",
        "correct the field; docs/fields.md lists what each field may hold",
    )


def _unauthorized(error: RequestError) -> DDPJobError:
    return UnavailableError(
        f"the cluster refuses the credentials: {error.message}",
        "the token or certificate of the kubeconfig is wrong or has expired",
        "log in again, then try kubectl auth whoami",
    )


def _forbidden(error: RequestError) -> DDPJobError:
    return NotAllowedError(
        f"not allowed: {error.message}",
        "the roles view and edit of the namespace grant the rights; a quota or a policy can also refuse",
        f"kubectl auth can-i --list | grep {names.DDPJOBS.plural}",
    )


def _not_found(error: RequestError) -> DDPJobError:
    name = error.details.get("name")
    if error.names(names.DDPJOBS.plural):
        return JobNotFoundError(
            f"there is no job {name}", "another namespace, or it was deleted", "kubectl get ddp -A lists the jobs"
        )
    if error.names("namespaces"):
        return InvalidJobError(
            f"there is no namespace {name}", "a job needs an existing one", f"kubectl create namespace {name}"
        )
    return UnavailableError(
        f"the cluster does not serve DDPJobs: {error.message}",
        "the operator's CustomResourceDefinition is not installed, or this is another cluster than you meant",
        "docs/install.md installs the operator; context=… selects a cluster",
    )


def _conflict(error: RequestError) -> DDPJobError:
    if error.reason == "AlreadyExists":
        name = error.details.get("name")
        return JobExistsError(
            f"there is a job {name} already",
            "a finished job keeps its name until it is deleted",
            f"client.delete({name!r}) deletes it and keeps its checkpoints; or use another name",
        )
    return UnavailableError(f"the job changed meanwhile: {error.message}", "", "look at it, then try again")


_EXPLANATIONS: Mapping[int, Callable[[RequestError], DDPJobError]] = {
    400: _invalid,
    401: _unauthorized,
    403: _forbidden,
    404: _not_found,
    409: _conflict,
    413: _invalid,
    422: _invalid,
}
