"""From nothing to a trained model on this machine: what `make demo` runs.

A kind cluster, both images, the operator by Helm, then manifests/examples/mnist-cpu.yaml as it is. Whatever is there
already is used again, so a second run starts training within seconds. The job of an earlier demo is deleted, with its
checkpoints: it would resume from them and have nothing left to do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time

import yaml

from ddptrain.data import download as fetch
from ddptrain.errors import TrainerError
from tests.e2e import storage
from tests.e2e.follow import Follower
from tests.e2e.installation import ROOT, Installation
from tests.e2e.jobs import EXAMPLE, JOB_KIND
from tests.e2e.kubectl import Json, Kubectl, condition_of
from tests.kind import images, prepare
from tests.kind.cluster import DEFAULT_NAME, Cluster, up
from tests.kind.command import CommandError
from tests.kind.docker import DockerUnavailableError
from tests.kind.toolchain import ToolchainError, binary

SHARED_VOLUME = ROOT / "manifests" / "examples" / "shared-volume.yaml"
NAME = "mnist-cpu"
CLAIM = f"{NAME}-checkpoints"
SECONDS = 1800.0


class DemoError(Exception):
    """The demo cannot go on; the message says what to do."""


def main() -> int:
    """Exit code 0 when the job succeeded."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to standard error")
    parser.add_argument("--name", default=DEFAULT_NAME, help="kind cluster to use or make (default: %(default)s)")
    options = parser.parse_args()
    begin = time.monotonic()
    try:
        cluster = set_up(options.name)
        kubectl = Kubectl(cluster.kubeconfig)
        prepare_volume(cluster, kubectl)
        apply_example(cluster, kubectl)
        job = Follower(kubectl, NAME, sys.stderr if options.json else sys.stdout).follow(SECONDS)
    except (DemoError, CommandError, ToolchainError, DockerUnavailableError, AssertionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    succeeded = condition_of(job, "Succeeded").get("status") == "True"
    result = summary(cluster, job, time.monotonic() - begin)
    print(json.dumps(result, indent=2) if options.json else ending(cluster, job, result))
    return 0 if succeeded else 1


def set_up(name: str) -> Cluster:
    """Cluster, images, operator."""
    say("kind cluster: one control plane, two workers (the first time builds it, which takes minutes)")
    prepare.ensure(*prepare.CLUSTER, "helm", install=True)
    cluster = up(name)
    say("images of operator and trainer")
    for image in images.build_images():
        cluster.load_image(image)
    say("operator: helm upgrade --install ddpjob charts/ddpjob --namespace ddpjob-system --create-namespace")
    operator = Installation.of(cluster.kubeconfig)
    known = operator.kubectl.objects("deployments")
    operator.install(images.OPERATOR_TAG, progress_seconds=1)
    # The tag is the same whatever was built: only a new pod takes the new image.
    (operator.restart if known else operator.wait_until_ready)()
    return cluster


def prepare_volume(cluster: Cluster, kubectl: Kubectl) -> None:
    """The volume of shared-volume.yaml, empty but for the data; what an earlier demo left is removed."""
    if kubectl("get", JOB_KIND, NAME, "--ignore-not-found"):
        say(f"deleting the job of an earlier demo, {NAME}, and its checkpoints")
    kubectl("delete", JOB_KIND, NAME, "--ignore-not-found", "--cascade=foreground", "--timeout=90s", timeout=120)
    kubectl("delete", "persistentvolumeclaim", CLAIM, "--ignore-not-found", "--timeout=60s", timeout=90)
    volume = next(d for d in yaml.safe_load_all(SHARED_VOLUME.read_text()) if d["kind"] == "PersistentVolume")
    name = volume["metadata"]["name"]
    for bound in kubectl.objects("persistentvolumes", "--field-selector", f"metadata.name={name}"):
        claim = bound["spec"].get("claimRef", {})
        if bound["status"].get("phase") == "Bound":
            raise DemoError(
                f"volume {name} serves claim {claim.get('namespace')}/{claim.get('name')}, which is not the demo's: "
                "delete that claim, or start afresh with `make demo-down` and `make demo`"
            )
        kubectl("delete", "persistentvolume", name, "--timeout=60s", timeout=90)
    for left in [*cluster.shared_dir.glob("run-*"), *cluster.shared_dir.glob("quarantine*")]:
        shutil.rmtree(left, ignore_errors=True)
    for left in (cluster.shared_dir / "metrics.jsonl", cluster.shared_dir / "progress.json"):
        left.unlink(missing_ok=True)
    kubectl("apply", "--filename", str(SHARED_VOLUME))
    storage.put_mnist(cluster.shared_dir)


def apply_example(cluster: Cluster, kubectl: Kubectl) -> None:
    """The example as it is, wherever MNIST can be had; else its digits variant, said aloud."""
    data = cluster.shared_dir / "data"
    try:
        if not storage.has_mnist():
            say("MNIST: downloading what is missing (11 MB)")
            fetch.fetch(str(data), say=say)
    except TrainerError as error:
        say(f"MNIST cannot be had here ({str(error).splitlines()[0]}): training on scikit-learn's digits instead")
        job: Json = yaml.safe_load(EXAMPLE.read_text())
        job["spec"]["args"] = ["train", "--epochs", "2", "--data", "digits"]
        kubectl.apply(job)
        return
    say(f"kubectl apply -f {EXAMPLE.relative_to(ROOT)}")
    kubectl("apply", "--filename", str(EXAMPLE))


def summary(cluster: Cluster, job: Json, seconds: float) -> Json:
    """The result for a machine."""
    status = job["status"]
    checkpoint = status.get("checkpoint", {}).get("path")
    return {
        "state": status["state"],
        "accuracy": float(status["progress"]["accuracy"]) if "accuracy" in status.get("progress", {}) else None,
        "worldSize": status["world"]["worldSize"],
        "restarts": status["restarts"],
        "checkpoint": str(cluster.shared_dir / checkpoint) if checkpoint else None,
        "metrics": str(cluster.shared_dir / "metrics.jsonl"),
        "kubeconfig": str(cluster.kubeconfig),
        "seconds": round(seconds, 1),
    }


def ending(cluster: Cluster, job: Json, result: Json) -> str:
    """The result for a person, and where to look further."""
    finished = condition_of(job, "Finished")
    lines = [""]
    if result["state"] == "Succeeded":
        lines += [
            f"Accuracy on the test set: {100 * (result['accuracy'] or 0):.2f} % (world size {result['worldSize']})",
            f"Checkpoint:               {result['checkpoint']}",
            f"Every step's loss:        {result['metrics']}",
        ]
    else:
        lines += [f"The job ended as {result['state']}: {finished.get('reason')}: {finished.get('message')}"]
    return "\n".join(
        [
            *lines,
            "",
            "Look further:",
            f"  export KUBECONFIG={cluster.kubeconfig}",
            *([] if shutil.which("kubectl") else [f"  alias kubectl={binary('kubectl')}"]),
            "  kubectl get ddp",
            f"  kubectl describe ddp {NAME}",
            f"  kubectl logs -l ddpjob.dev/job-name={NAME} --prefix",
            "  kubectl explain ddpjob.spec",
            "",
            "Clean up: make demo-down",
        ]
    )


def say(line: str) -> None:
    """One step, on standard error: standard output is for the table and the result."""
    print(f"==> {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
