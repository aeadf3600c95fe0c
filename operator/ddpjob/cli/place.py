"""Where a command acts: on the jobs of this machine, or on those of a cluster."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from typer import Option

from ddpjob.cli.options import Context, Namespace
from ddpjob.errors import DDPJobError, InvalidJobError, JobNotFoundError, NotServedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeGuard

    from ddpjob.client.base import Client
    from ddpjob.client.job import DDPJob
    from ddpjob.client.local import LocalClient

T = TypeVar("T")
_LIST_SECONDS = 5.0
"""How long a list waits for a cluster that does not answer: a user looks at it again and again."""
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount/token"


@dataclass(frozen=True)
class Where:
    """What the options of a command say about where its jobs are."""

    local: Annotated[bool, Option("--local", help="This machine alone.")] = False
    context: Context = None
    namespace: Namespace = None

    @property
    def is_here(self) -> bool:
        """Whether this machine is named. Raises ``InvalidJobError`` if a cluster is named as well."""
        if self.local and self.context is not None:
            raise InvalidJobError(
                "--context is for the jobs of a cluster, --local is for those of this machine",
                "a job is in one place",
                "leave out one of them",
            )
        return self.local

    @property
    def may_be_on_cluster(self) -> bool:
        """Whether a cluster is named, or the kubeconfig names one and nothing excludes it."""
        return not self.is_here and (self.context is not None or has_kubeconfig())

    def machine(self) -> "LocalClient":
        """Return the client for this machine."""
        from ddpjob.client.local import LocalClient

        return LocalClient(namespace=self.namespace)

    def cluster(self, timeout: float = 30.0, *, retries: bool = True) -> "Client":
        """Return the client for the cluster of the context, or of the current one."""
        from ddpjob.client.base import Client

        return Client.cluster(self.context, namespace=self.namespace, timeout=timeout, retries=retries)


def find(name: str, where: Where) -> "Client":
    """Return the client for a job: of this machine if it is known here, else of the cluster of the kubeconfig.

    Raises:
        JobNotFoundError: it is not known here, and there is no kubeconfig, or ``where`` excludes it.
        InvalidJobError: the options contradict each other.
    """
    [(client, _)] = _find([name], where)
    return client


def chosen(
    given: "Sequence[str] | None", selector: str | None, where: Where, *, finished: bool = True
) -> "list[tuple[Client, str | DDPJob]]":
    """Return the named jobs, or those with the labels, each with its client.

    Labels select jobs of the cluster of the kubeconfig, and without one, or with ``--local``, of this machine.
    finished: labels select also jobs that have finished.

    Raises:
        InvalidJobError: there are names and labels, or neither; or the labels select every job.
        JobNotFoundError: as ``find`` for a single name; or no job has the labels.
    """
    if bool(given) == (selector is not None) or (selector is not None and not selector.strip()):
        raise InvalidJobError(
            "name the jobs, or select them by labels", "one of both is needed", "for example -l team=a"
        )
    if selector is None:
        return _find(list(dict.fromkeys(given or ())), where)
    client = where.cluster() if where.may_be_on_cluster else where.machine()
    found = [job for job in client.list(label_selector=selector) if finished or not job.finished]
    if not found:
        which = "" if finished else " that has not finished"
        raise JobNotFoundError(f"no job{which} has the labels {selector}", client.place, "ddpjob get lists the jobs")
    return [(client, job) for job in found]


def _find(given: "Sequence[str]", where: Where) -> "list[tuple[Client, str | DDPJob]]":
    """Return each name with the client of ``find``. One of several that is not known keeps no other from its client."""
    may_be_on_cluster = where.may_be_on_cluster
    cluster: Client | None = where.cluster() if where.context is not None else None
    here = where.machine() if where.context is None else None
    found: list[tuple[Client, str | DDPJob]] = []
    for name in given:
        client: Client | None = here
        try:
            if here is not None:
                here.record(name)
        except DDPJobError as error:
            if isinstance(error, JobNotFoundError) and may_be_on_cluster:
                client = None
            elif len(given) == 1:
                raise
        client = client or (cluster := cluster or where.cluster())
        found.append((client, name))
    return found


def for_new_job(where: Where) -> "Client":
    """Return the client for a job to create: of the cluster of the kubeconfig, or with ``--local`` of this machine.

    Raises:
        UnavailableError: there is no kubeconfig.
        InvalidJobError: the options contradict each other.
    """
    if where.is_here:
        return where.machine()
    if not where.may_be_on_cluster:
        raise UnavailableError(
            "there is no cluster to submit to: no kubeconfig",
            _where_sought(),
            "--local runs the job on this machine, in the background",
        )
    return where.cluster()


def first_answer(ask: "Callable[[Client], T]", where: Where) -> tuple["Client", T, DDPJobError | None]:
    """Ask the cluster of the kubeconfig, or this machine if the cluster does not answer or has no DDPJobs.

    Returns:
        The client that answered, its answer, and why it is not that of the cluster, if this does not answer.

    Raises:
        InvalidJobError: the options contradict each other.
        DDPJobError: of the question; with ``--context`` also that the cluster does not answer.
    """
    trouble = None
    if where.may_be_on_cluster:
        try:
            # This machine's jobs are shown at once while the cluster is away, unless it was asked for.
            cluster = where.cluster(_LIST_SECONDS, retries=where.context is not None)
            return cluster, ask(cluster), None
        except UnavailableError as error:
            if where.context is not None:
                raise
            if not isinstance(error, NotServedError):
                trouble = type(error)(error.error, error.hint, "--local lists the jobs of this machine alone")
    here = where.machine()
    return here, ask(here), trouble


def is_of_this_machine(client: "Client") -> "TypeGuard[LocalClient]":
    """Return whether a client is for this machine; does not import its module, which then is imported already."""
    module = sys.modules.get("ddpjob.client.local")
    return module is not None and isinstance(client, module.LocalClient)


def _may_exist(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # its directory may not be searched
        return True


def has_kubeconfig() -> bool:
    """Return whether there is something that says which cluster is meant."""
    given = os.environ.get("KUBECONFIG") or "~/.kube/config"
    # Unlike that of pathlib, this function leaves the name of a user whom this machine does not have.
    files = [os.path.expanduser(part) for part in given.split(os.pathsep) if part]  # noqa: PTH111
    return any(_may_exist(Path(file)) for file in (*files, _SERVICE_ACCOUNT))


def _where_sought() -> str:
    if given := os.environ.get("KUBECONFIG"):
        return f"$KUBECONFIG is {given}, which does not exist"
    return "the kubeconfig is the file $KUBECONFIG, or ~/.kube/config"
