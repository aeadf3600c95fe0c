"""Fixtures of the kind layer: one cluster, one installed operator, and the trials, which run at the same time."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import namespace as namespaces
from tests.e2e import nodes, storage
from tests.e2e.installation import Installation
from tests.e2e.kubectl import Kubectl
from tests.e2e.namespace import JobNamespace, job_namespace, shared_claim
from tests.e2e.reference import ReferenceRun, reference
from tests.e2e.trials import Outcome, Trial, Trials, Wait, Watcher, running, undisturbed
from tests.kind import images
from tests.kind.cluster import DEFAULT_NAME, Cluster, down, find, up
from tests.kind.docker import DockerUnavailableError
from tests.kind.toolchain import ToolchainError
from tests.prepared import skip_unless_ci

PROGRESS_SECONDS = 1
WORKERS = 3
"""Two for jobs, and one that tests drain and stop."""
SHARED = {
    "undisturbed": Trials.of(1, undisturbed),
    "reference": Trials.of(1, reference),
}
"""Trials with fixtures of the same names, for several modules."""
LONGEST = ("nodes", "verbs")
"""Modules whose trials take longest: they start before the others."""
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests with jobs of their own run beside the trials, and what would disturb the trials after them."""

    def place(item: pytest.Item) -> int:
        used = item.fixturenames if isinstance(item, pytest.Function) else []
        return 2 if "trials_ended" in used else int("namespace" not in used)

    here = [number for number, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ordered = sorted((items[number] for number in here), key=place)
    for number, item in zip(here, ordered, strict=True):
        items[number] = item


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Provide a kind cluster. If one runs already, it is kept (with this number of workers); else it is deleted."""
    name = os.environ.get("DDPJOB_KIND_CLUSTER") or DEFAULT_NAME
    try:
        images.require_images()
        kept = find(name) is not None
        made = up(name, workers=WORKERS, images=(images.OPERATOR_TAG, images.TRAINER_TAG, images.TORCH_TAG))
    except (DockerUnavailableError, ToolchainError) as error:
        skip_unless_ci(error)
    storage.put_mnist(made.initial)
    with nodes.leaving_node(made):
        yield made
    if kept:
        namespaces.until_all_are_gone(Kubectl(made.kubeconfig))
    else:
        down(name)


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Installation:
    """Load the images into every worker, and install the operator with Helm from charts/ddpjob."""
    cluster.load_image(images.TRAINER_TAG)
    cluster.load_image(images.OPERATOR_TAG)
    cluster.load_image(images.TORCH_TAG)  # now, while all nodes run
    installation = Installation.of(cluster.kubeconfig)
    _installed.append(installation)
    installation.uninstall()
    installation.install(images.OPERATOR_TAG, progress_seconds=PROGRESS_SECONDS)
    installation.wait_until_ready()
    return installation


@pytest.fixture
def namespace(
    cluster: Cluster, trials: Mapping[str, Future[Any]], request: pytest.FixtureRequest
) -> Iterator[JobNamespace]:
    """Make a namespace for one test. The trials have started before."""
    name: Any = request.node.name
    with job_namespace(cluster, str(name).removeprefix("test_")) as made:
        yield made


@pytest.fixture(scope="session")
def trials(
    cluster: Cluster, operator: Installation, request: pytest.FixtureRequest
) -> Iterator[Mapping[str, Future[Any]]]:
    """Start the trials of all selected tests."""
    items = request.session.items
    used = {name for item in items if isinstance(item, pytest.Function) for name in item.fixturenames}
    started = {name: shared for name, shared in SHARED.items() if name in used}
    for module in {item.getparent(pytest.Module).obj: None for item in items}:
        if hasattr(module, "TRIALS"):
            started[module.__name__.rpartition("_")[2]] = module.TRIALS
    started = {name: started[name] for name in (*LONGEST, *started) if name in started}
    with ExitStack() as stack:
        outcomes: dict[str, Future[Any]] = {}
        for name, of_module in started.items():
            namespace = stack.enter_context(job_namespace(cluster, name))
            assert not outcomes.keys() & of_module.acts.keys(), "two trials have one name"
            outcomes |= stack.enter_context(running(cluster, namespace, of_module))
        yield outcomes


@pytest.fixture
def outcome(trials: Mapping[str, Future[Any]]) -> Wait:
    """Return a function that waits for the outcome of a trial."""
    return lambda act: trials[act.__name__].result()


@pytest.fixture(scope="session")
def trials_ended(trials: Mapping[str, Future[Any]]) -> None:
    """Wait until all trials have ended, for a test that would disturb them or be disturbed; their tests report them."""
    for future in trials.values():
        future.exception()


@pytest.fixture
def trial(cluster: Cluster, trials_ended: None, request: pytest.FixtureRequest) -> Iterator[Trial]:
    """Provide a namespace for one job, with a watcher, when no trial runs."""
    name = request.node.name.removeprefix("test_")
    with job_namespace(cluster, name) as namespace, Watcher(namespace.kubectl) as watcher:
        namespace.kubectl.apply(shared_claim())
        yield Trial("training", cluster, namespace, watcher)


@pytest.fixture(scope="session", name="undisturbed")
def _undisturbed(trials: Mapping[str, Future[Any]]) -> Outcome:
    outcome: Outcome = trials["undisturbed"].result()
    return outcome


@pytest.fixture(scope="session", name="reference")
def _reference(trials: Mapping[str, Future[Any]]) -> ReferenceRun:
    run: ReferenceRun = trials["reference"].result()
    return run
