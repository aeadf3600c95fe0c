"""The connection to the API server: configuration and credentials, read by the official client.

Every HTTP session to the API server is opened here, the executor's and kopf's, so that both use rotated tokens,
renewed exec credentials and proxies in the same way.
"""

import asyncio
import contextlib
import ipaddress
import os
import urllib.parse
import urllib.request
from pathlib import Path

import aiohttp
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config.incluster_config import SERVICE_TOKEN_FILENAME

from ddpjob.version import __version__

USER_AGENT = f"ddpjob-operator/{__version__}"
LOAD_SECONDS = 30.0  # an exec plugin may call an identity provider
KEEPALIVE_SECONDS = 60.0  # below the 90 s after which kube-apiserver closes an idle connection
READ_BUFFER = 2**21  # one watch event may be larger than aiohttp's default buffer


class ConfigurationError(Exception):
    """No usable configuration. The message names the places that were searched."""


class Connection:
    """The API server's address, CA and credentials. Create with ``await Connection.open(...)``.

    The configuration is the first of: the given kubeconfig, KUBECONFIG, the pod's service account, ~/.kube/config.
    """

    def __init__(self, kubeconfig: str | None, configuration: Configuration) -> None:
        self._kubeconfig = kubeconfig
        self._configuration = configuration
        self._renewal: asyncio.Task[None] | None = None
        self.generation = 0

    @classmethod
    async def open(cls, kubeconfig: str | None = None) -> "Connection":
        """Read the configuration. Raises ``ConfigurationError``."""
        connection = cls(kubeconfig, Configuration())
        await connection._load()
        return connection

    @property
    def server(self) -> str:
        """Return the base URL of the API server, without a trailing slash."""
        return str(self._configuration.host).rstrip("/")

    @property
    def tls_server_name(self) -> str | None:
        """Return the name expected in the server's certificate if it differs from the host."""
        return self._configuration.tls_server_name

    def session(
        self, limit: int, *, middlewares: tuple[aiohttp.ClientMiddlewareType, ...] = ()
    ) -> aiohttp.ClientSession:
        """Return a new HTTP session of at most ``limit`` connections (0: no limit). The caller closes it."""
        rest = RESTClientObject(self._configuration)  # builds the SSL context; opens nothing
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limit, ssl=rest.ssl_context, keepalive_timeout=KEEPALIVE_SECONDS),
            headers={"User-Agent": USER_AGENT, "Accept": "application/json"},
            middlewares=(*middlewares, self._authorize),
            read_bufsize=READ_BUFFER,
            # HTTPS_PROXY and NO_PROXY apply, as in the official client. They are read once, because aiohttp's
            # trust_env looks them up in a thread for every request.
            proxy=self._configuration.proxy or _environment_proxy(self.server),
        )

    async def renew(self, seen_generation: int) -> None:
        """Read the configuration again after a 401, once for all requests that got it at the same time.

        A caller may be cancelled before a slow plugin answers: then the next one waits for the same answer.
        """
        if seen_generation != self.generation:
            return
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._load_again(), name="renewal of credentials")
        await asyncio.shield(self._renewal)

    async def _load_again(self) -> None:
        await self._load()
        self.generation += 1

    async def _authorize(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        configuration = self._configuration
        try:  # the official client's hook reads a rotated token again
            header = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        except kubernetes_config.ConfigException as error:  # for example a token file that is just being replaced
            raise aiohttp.ClientError(f"cannot read the credentials: {error}") from error
        if header is None and configuration.username:
            header = configuration.get_basic_auth_token()
        if header:
            request.headers["Authorization"] = header
        return await handler(request)

    async def _load(self) -> None:
        configuration = Configuration()
        path = _kubeconfig_path(self._kubeconfig)
        try:
            if path is None:
                kubernetes_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            else:
                await asyncio.wait_for(
                    kubernetes_config.load_kube_config(  # type: ignore[no-untyped-call]
                        config_file=path, client_configuration=configuration, persist_config=False
                    ),
                    LOAD_SECONDS,
                )
        except (kubernetes_config.ConfigException, OSError, TimeoutError, ValueError) as error:
            raise ConfigurationError(f"cannot read {path or 'the service account'}: {error}") from error
        self._configuration = configuration


def _kubeconfig_path(explicit: str | None) -> str | None:
    """Return the kubeconfig to read, or None for the pod's service account."""
    path = explicit or os.environ.get("KUBECONFIG")
    home = Path("~/.kube/config").expanduser()
    if path and not any(Path(part).expanduser().exists() for part in path.split(os.pathsep) if part):
        raise ConfigurationError(f"kubeconfig {path} does not exist; correct KUBECONFIG")
    if path:
        return path
    if os.environ.get("KUBERNETES_SERVICE_HOST") and Path(SERVICE_TOKEN_FILENAME).exists():
        return None
    if home.exists():
        return str(home)
    raise ConfigurationError(
        "no cluster to connect to: not running in a pod with a service account token, KUBECONFIG is not set "
        f"and {home} does not exist; set KUBECONFIG"
    )


def _environment_proxy(server: str) -> str | None:
    """Return the proxy that HTTP_PROXY, HTTPS_PROXY and NO_PROXY define for a URL.

    Of NO_PROXY Python compares names only. In a pod the API server has an address, for which clusters usually list its
    network.
    """
    url = urllib.parse.urlsplit(server)
    host, proxies = url.hostname or "", urllib.request.getproxies()
    if urllib.request.proxy_bypass(host):
        return None
    for name in proxies.get("no", "").split(","):
        with contextlib.suppress(ValueError):  # a name
            if ipaddress.ip_address(host) in ipaddress.ip_network(name.strip(), strict=False):
                return None
    return proxies.get(url.scheme)
