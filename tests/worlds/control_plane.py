"""A real control plane on loopback: etcd and kube-apiserver, and kube-controller-manager if a test needs it.

It has no kubelet and no scheduler (tests/gangs has both): a test patches the status of a pod, as a kubelet would.
Tokens are static, RBAC is enabled, and all files are in one folder that is deleted at the end.
"""

import json
import os
import shutil
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self, cast

import yaml

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.prepared import program
from tests.processes import end, eventually, free_port, spawn, tail
from tests.worlds.kubeconfig import write_kubeconfig

ADMIN_TOKEN = "admin-of-a-throwaway-control-plane"
SERVICE_RANGE = "198.18.128.0/20"  # benchmarking addresses (RFC 2544), used by no real network
START_SECONDS = 240.0
ISSUER = "https://kubernetes.default.svc"
CRD_FILE = Path(__file__).parents[2] / "manifests" / "crd.yaml"
AUDIT_RULE: Json = {"level": "Metadata", "verbs": ["create", "update", "patch", "delete"]}


class ApiError(Exception):
    """The API server refused a request of the test."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


class ControlPlane:
    """Use as a context manager. A client needs ``server``, ``ca_file`` and ``admin_token``.

    audit: log all writes (``writes``), or what ``audit_rules`` say.
    controller_manager: run garbage collection, namespaces and quota.
    Entering skips the calling test if the programs are not built (see ``tests.prepared``).
    """

    programs: ClassVar[Mapping[str, str]] = {}
    """Other programs of tests.kind.toolchain, by the name of the usual one."""
    controllers: ClassVar[Sequence[str]] = (
        "garbagecollector",
        "namespace",
        "serviceaccount",
        "resourcequota",
        "serviceaccount-token",
    )

    def __init__(self, *, audit: bool = False, controller_manager: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ddpjob-control-plane-"))
        self.admin_token = ADMIN_TOKEN
        self._audit = audit
        self._with_controllers = controller_manager
        self._processes: list[subprocess.Popen[bytes]] = []
        self._crds = 0
        self.audit_rules: Sequence[Json] = (AUDIT_RULE,)
        self.api_flags: Sequence[str] = ()
        self.controller_flags: Sequence[str] = ()
        self.server = ""
        self.port = 0

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def ca_file(self) -> Path:
        """Return the path of the API server's self-signed certificate."""
        return self.folder / "certificates" / "apiserver.crt"

    def stop(self) -> None:
        """Stop all processes and delete the folder."""
        for process in reversed(self._processes):
            end(process)
        self._processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def request(self, method: str, path: str, body: Json | None = None, *, token: str = ADMIN_TOKEN) -> Json:
        """Send one request and return the answer. A PATCH is a merge patch. Raises ``ApiError``."""
        return cast(Json, json.loads(self._text(method, path, body, token=token)))

    def _text(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        token: str = ADMIN_TOKEN,
        accept: str = "application/json",
    ) -> str:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(  # noqa: S310 - always our own https server
            f"{self.server}/{path.lstrip('/')}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": kind, "Accept": accept},
        )
        context = ssl.create_default_context(cafile=str(self.ca_file))
        opener = urllib.request.build_opener(
            urllib.request.HTTPSHandler(context=context), urllib.request.ProxyHandler({})
        )
        try:
            with opener.open(request, timeout=120) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            message = json.loads(text).get("message", "") if text.startswith("{") else text
            raise ApiError(error.code, message) from error

    def kubectl(
        self,
        *args: str,
        input: str | None = None,  # noqa: A002 - as in subprocess.run
        check: bool = True,
    ) -> "subprocess.CompletedProcess[str]":
        """Run kubectl as administrator."""
        return subprocess.run(
            [str(program("kubectl")), *args],
            input=input,
            stdin=None if input is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=check,
            timeout=120,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.folder),
                "KUBECONFIG": str(self.kubeconfig()),
                "KUBECACHEDIR": str(self.folder / "kubectl-cache"),
                "NO_PROXY": "127.0.0.1",
            },
        )

    def kubeconfig(
        self, token: str = ADMIN_TOKEN, *, name: str = "admin", server: str = "", namespace: str = "default"
    ) -> Path:
        """Return a kubeconfig with ``token``. ``server`` may be a proxy in front of the API server."""
        server = server or self.server
        ca_file = str(self.ca_file) if server.startswith("https") else ""
        path = self.folder / f"kubeconfig-{name}-{urllib.parse.quote(server, safe='')}"
        new = self.folder / "kubeconfig.new"
        write_kubeconfig(new, server, {"token": token}, ca_file=ca_file, name=name, namespace=namespace)
        new.chmod(0o600)
        return new.replace(path)  # atomic: an operator that starts may be reading it

    def service_account(self, namespace: str, name: str) -> str:
        """Create a service account and return a token for it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        self.request("POST", path, {"metadata": {"name": name}})
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": [ISSUER]}}
        return str(self.request("POST", f"{path}/{name}/token", body)["status"]["token"])

    def apply_crd(self, file: Path = CRD_FILE) -> None:
        """Install or replace the CustomResourceDefinition, and wait until the API server serves it.

        A column with the number of the call is added to a replacement, because the API server does not say which it
        serves.
        """
        crd = yaml.safe_load(file.read_text())
        (version,) = crd["spec"]["versions"]
        columns = version["additionalPrinterColumns"]
        column = f"Applied-{self._crds}" if self._crds else columns[0]["name"]
        if self._crds:
            columns.append({"name": column, "type": "string", "jsonPath": ".metadata.uid", "priority": 1})
        self._crds += 1
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        try:
            self.request("POST", path, crd)
        except ApiError as error:
            if error.status != 409:
                raise
            self.request("PATCH", f"{path}/{crd['metadata']['name']}", crd)
        eventually("the CRD is served", lambda: column in self._columns())

    def make_namespace(self, name: str) -> None:
        """Create a namespace, and wait for what pods in it need."""
        self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        if self._with_controllers:
            account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
            eventually("the namespace has a service account", lambda: self._exists(account))

    def writes(self) -> list[Json]:
        """Return the audit events of all writes so far, in the order of the answers."""
        log = self.folder / "audit.log"
        whole = (
            log.read_text().rpartition("\n")[0] if log.exists() else ""
        )  # the last line may be in the middle of a write
        return [json.loads(line) for line in whole.splitlines()]

    def history(self, path: str, since: str) -> list[Json]:
        """Return all watch events of a collection after the resourceVersion ``since``."""
        separator = "&" if "?" in path else "?"
        query = f"watch=true&resourceVersion={since}&timeoutSeconds=1"
        return [json.loads(line) for line in self._text("GET", f"{path}{separator}{query}").splitlines()]

    def _columns(self) -> list[str]:
        """Return the columns of `kubectl get ddpjobs`; none before the API server serves DDPJobs."""
        table = "application/json;as=Table;v=v1;g=meta.k8s.io"
        try:
            answer = json.loads(self._text("GET", f"/{names.DDPJOBS.path()}?limit=1", accept=table))
        except ApiError:
            return []
        return [column["name"] for column in answer["columnDefinitions"]]

    def _start(self) -> None:
        needed = ("etcd", "kube-apiserver", *(("kube-controller-manager",) if self._with_controllers else ()))
        for name in needed:
            program(self.programs.get(name, name))
        self._write_keys()
        etcd = self._start_etcd()
        self._start_apiserver(etcd)
        self._until_ready()
        if self._with_controllers:
            self._start_controllers()

    def _write_keys(self) -> None:
        (self.folder / "tokens.csv").write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n')
        policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"]}
        (self.folder / "audit.json").write_text(json.dumps({**policy, "rules": [*self.audit_rules]}))
        key = ["openssl", "ecparam", "-genkey", "-noout", "-name", "prime256v1"]
        try:
            subprocess.run([*key, "-out", str(self.folder / "sa.key")], check=True, capture_output=True, timeout=60)
        except FileNotFoundError as error:
            raise RuntimeError("openssl is not installed. Next: apt-get install openssl") from error

    @property
    def _data(self) -> Path:
        return self.folder / "etcd"

    def _start_etcd(self) -> str:
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._run(
            "etcd",
            f"--data-dir={self._data}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )
        return client

    def _start_apiserver(self, etcd: str) -> None:
        self.port = self.port or free_port()
        self.server = f"https://127.0.0.1:{self.port}"
        audit = [
            f"--audit-policy-file={self.folder / 'audit.json'}",
            f"--audit-log-path={self.folder / 'audit.log'}",
            "--audit-log-mode=blocking",
        ]
        self._run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--external-hostname=127.0.0.1",
            "--endpoint-reconciler-type=none",
            "--request-timeout=2m",  # by default a minute, which the largest jobs exceed on busy cores
            f"--cert-dir={self.folder / 'certificates'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={self.folder / 'sa.key'}",
            f"--service-account-signing-key-file={self.folder / 'sa.key'}",
            # This plugin requires the default service account, which only kube-controller-manager creates.
            *(() if self._with_controllers else ("--disable-admission-plugins=ServiceAccount",)),
            *(audit if self._audit else ()),
            *self.api_flags,
        )

    def _start_controllers(self) -> None:
        kubeconfig = self.kubeconfig()
        self._run(
            "kube-controller-manager",
            f"--kubeconfig={kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={self.folder / 'controller-certificates'}",
            f"--service-account-private-key-file={self.folder / 'sa.key'}",
            "--leader-elect=false",
            "--use-service-account-credentials=false",
            "--kube-api-qps=1000",  # by default 20: hundreds of jobs at once would take minutes to collect
            "--kube-api-burst=2000",
            f"--controllers={','.join(self.controllers)}",
            *self.controller_flags,
        )
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        eventually("the controllers work", lambda: self._exists(account), timeout=START_SECONDS)

    def _exists(self, path: str) -> bool:
        try:
            self.request("GET", path)
        except ApiError:
            return False
        return True

    def _until_ready(self) -> None:
        try:
            eventually("the API server is ready", self._is_ready, timeout=START_SECONDS)
        except AssertionError as error:
            try:
                checks = self._text("GET", "/readyz?verbose")
            except (ApiError, OSError) as unready:
                checks = str(unready)
            logs = "\n".join(tail(self._log(name)) for name in ("etcd", "kube-apiserver"))
            raise AssertionError(f"{error}: {checks}\n{logs}") from error

    def _is_ready(self) -> bool:
        for process in self._processes:
            if process.poll() is not None:
                name = Path(cast(list[str], process.args)[0]).name
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{tail(self._log(name))}")
        try:
            return self.ca_file.exists() and self._text("GET", "/readyz") == "ok"
        except (ApiError, OSError):
            return False

    def _run(self, name: str, *flags: str) -> None:
        # Garbage that fits into the memory is cheaper than its collection, a quarter of the API server's CPU time.
        command = [program(self.programs.get(name, name)), *flags]
        self._processes.append(spawn(command, self._log(name), env={**os.environ, "GOGC": "300"}))

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


@contextmanager
def control_plane(*, audit: bool = False, controller_manager: bool = False) -> Iterator[ControlPlane]:
    """Run a control plane that serves DDPJobs."""
    with ControlPlane(audit=audit, controller_manager=controller_manager) as plane:
        plane.apply_crd()
        yield plane
