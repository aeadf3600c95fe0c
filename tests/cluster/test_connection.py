"""The connection: sources of the configuration, the proxy, and changed credentials."""

import asyncio
import json
from pathlib import Path

import pytest
import uvloop
from aiohttp import web

from ddpjob.api import names
from ddpjob_operator.cluster.base import Unavailable
from ddpjob_operator.cluster.connection import ConfigurationError, Connection
from tests.processes import free_port
from tests.worlds.client import list_all, operators_client
from tests.worlds.control_plane import ControlPlane
from tests.worlds.kubeconfig import write_kubeconfig
from tests.worlds.loopback import serving


async def sent_authorization(connection: Connection) -> str | None:
    """Return the Authorization header of a request."""
    sent: list[str | None] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        sent.append(request.headers.get("Authorization"))
        return web.Response()

    async with serving(handle) as url, connection.session(0) as session:
        await session.get(url)
    return sent[0]


async def test_the_error_without_any_configuration_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigurationError, match="set KUBECONFIG"):
        await Connection.open()


async def test_the_error_names_a_missing_or_broken_kubeconfig(tmp_path: Path) -> None:
    path = tmp_path / "config"
    with pytest.raises(ConfigurationError, match=f"{path} does not exist"):
        await Connection.open(str(path))
    path.write_text("apiVersion: v1\nkind: Config\ncurrent-context: absent\ncontexts: []\nclusters: []\n")
    with pytest.raises(ConfigurationError, match=str(path)):
        await Connection.open(str(path))


async def test_kubeconfig_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_kubeconfig(tmp_path / "config", "https://192.0.2.1:6443", {"token": "secret"})
    monkeypatch.setenv("KUBECONFIG", str(path))
    connection = await Connection.open()
    assert connection.server == "https://192.0.2.1:6443"
    assert await sent_authorization(connection) == "Bearer secret"


@pytest.mark.parametrize(
    ("no_proxy", "used"),
    [
        ("", True),
        ("127.0.0.1", False),
        ("other.example", True),
        ("10.0.0.0/8, 127.0.0.0/8", False),
        ("10.0.0.0/8", True),
    ],
)
async def test_the_proxy_of_the_environment_is_used_unless_no_proxy_excludes_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_proxy: str, used: bool
) -> None:
    requests: list[str] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append((await reader.readline()).decode())
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, no_proxy)
    nowhere = f"127.0.0.1:{free_port()}"
    path = write_kubeconfig(tmp_path / "config", f"https://{nowhere}", {"token": "secret"})
    async with operators_client(path) as client:
        with pytest.raises(Unavailable):
            await client.get(names.PODS, "default", "pod")
    assert bool(requests) is used
    assert all(line.startswith(f"CONNECT {nowhere}") for line in requests)
    server.close()


@pytest.mark.apiserver
async def test_a_token_replaced_on_disk_is_read_again_after_a_401(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("expired")
    ca_file, user = str(control_plane.ca_file), {"tokenFile": str(token)}
    path = write_kubeconfig(tmp_path / "config", control_plane.server, user, ca_file=ca_file)
    async with operators_client(path) as client:
        token.write_text(control_plane.admin_token)
        assert (await list_all(client, names.PODS, namespace)).items == ()


def an_exec_kubeconfig(folder: Path, server: str, token: str, ca_file: str = "") -> Path:
    """Write a kubeconfig with a plugin that prints the token."""
    kind = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    plugin = folder / "plugin"
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(kind | {'status': {'token': token}})}'\n")
    plugin.chmod(0o700)
    user = {"exec": {"apiVersion": kind["apiVersion"], "command": str(plugin), "interactiveMode": "Never"}}
    return write_kubeconfig(folder / "config", server, user, ca_file=ca_file)


@pytest.mark.apiserver
async def test_credentials_of_an_exec_plugin_are_used(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    token, ca_file = control_plane.admin_token, str(control_plane.ca_file)
    async with operators_client(an_exec_kubeconfig(tmp_path, control_plane.server, token, ca_file)) as client:
        assert (await list_all(client, names.PODS, namespace)).items == ()


def test_an_exec_plugin_runs_on_the_operators_event_loop(tmp_path: Path) -> None:
    path = an_exec_kubeconfig(tmp_path, "http://127.0.0.1:1", "secret")

    async def read() -> str | None:
        return await sent_authorization(await Connection.open(str(path)))

    assert uvloop.run(read()) == "Bearer secret"


async def test_an_exec_plugin_runs_again_after_a_401(tmp_path: Path) -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        is_valid = request.headers["Authorization"] == "Bearer second"
        return web.json_response({"items": [], "metadata": {}}) if is_valid else web.Response(status=401)

    async with serving(handle) as url, operators_client(an_exec_kubeconfig(tmp_path, url, "first")) as client:
        an_exec_kubeconfig(tmp_path, url, "second")
        assert (await list_all(client, names.PODS)).items == ()
