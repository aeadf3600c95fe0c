"""Fixtures of the kind layer: one cluster, one installed operator and one reference training for all tests."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e import namespace as namespaces
from tests.e2e.installation import Installation
from tests.e2e.namespace import JobNamespace, claim_of, job_namespace
from tests.e2e.reference import ReferenceRun, train_reference
from tests.e2e.trials import Outcome, Trial, Watcher
from tests.kind import images
from tests.kind.cluster import DEFAULT_NAME, Cluster, down, find, up
from tests.kind.docker import DockerUnavailableError
from tests.kind.toolchain import ToolchainError
from tests.layers.cost import also_count
from tests.prepared import skip_unless_ci

PROGRESS_SECONDS = 1
_installed: list[Installation] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the state of the cluster to the report of a failed test, before its objects are deleted."""
    report = yield
    if report.failed and call.when != "teardown" and _installed:
        report.sections.append(("cluster", namespaces.describe_everything(_installed[-1])))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Provide a kind cluster. One that runs already is used and kept; one made here is deleted at the end."""
    name = os.environ.get("DDPJOB_KIND_CLUSTER") or DEFAULT_NAME
    try:
        images.require_images()
        kept = find(name) is not None
        made = up(name)
    except (DockerUnavailableError, ToolchainError) as error:
        skip_unless_ci(error)
    for pid in made.pids():
        also_count(pid, from_now=kept)
    yield made
    if not kept:
        down(name)


@pytest.fixture(scope="session")
def trainer_image(cluster: Cluster) -> str:
    """Load the trainer's image, as the example names it, into every worker and return its tag."""
    cluster.load_image(images.TRAINER_TAG)
    return images.TRAINER_TAG


@pytest.fixture(scope="session")
def operator(cluster: Cluster, trainer_image: str) -> Iterator[Installation]:
    """Install the operator with Helm from charts/ddpjob."""
    cluster.load_image(images.OPERATOR_TAG)
    installation = Installation.of(cluster.kubeconfig)
    _installed.append(installation)
    installation.uninstall()
    installation.install(images.OPERATOR_TAG, progress_seconds=PROGRESS_SECONDS)
    installation.wait_until_ready()
    yield installation
    namespaces.until_all_are_gone(installation.kubectl)


@pytest.fixture
def namespace(cluster: Cluster, operator: Installation, request: pytest.FixtureRequest) -> Iterator[JobNamespace]:
    """Make a namespace with a volume for one test."""
    name: Any = request.node.name
    with job_namespace(cluster, str(name).removeprefix("test_")) as made:
        yield made


@pytest.fixture
def trial(cluster: Cluster, operator: Installation, request: pytest.FixtureRequest) -> Iterator[Trial]:
    """Provide a namespace for one job, with a watcher."""
    with _trial(cluster, request.node.name.removeprefix("test_")) as trial:
        yield trial


@contextmanager
def _trial(cluster: Cluster, name: str) -> Iterator[Trial]:
    with job_namespace(cluster, name) as namespace, Watcher(namespace.kubectl) as watcher:
        namespace.kubectl.apply(claim_of(namespace))
        yield Trial("training", cluster, namespace, watcher)


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster, operator: Installation) -> Iterator[Outcome]:
    """Train the job of the trials to its end without a fault."""
    with _trial(cluster, "undisturbed") as trial:
        trial.apply()
        yield trial.until_finished()


@pytest.fixture(scope="session")
def reference(cluster: Cluster, operator: Installation) -> Iterator[ReferenceRun]:
    """Train the example to its end, watched with kubectl."""
    with job_namespace(cluster, "reference") as made:
        yield train_reference(made)
