"""Train the MNIST example on a kind cluster on this machine: the command behind `make demo-kind`.

It creates a kind cluster, builds both images, installs the operator with Helm and applies
manifests/examples/mnist-cpu.yaml unchanged. What exists is reused, so a second run starts training within seconds. The
job of an earlier demo is deleted with its checkpoints, because the new job would resume from them and finish at once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from ddpjob import Client, DDPJobError
from ddpjob.api.objects import Json, condition, is_true
from ddprun.errors import TrainerError
from ddptrain.data import download as fetch
from tests.e2e import storage
from tests.e2e.installation import ROOT, Installation
from tests.e2e.jobs import EXAMPLE, JOB_KIND
from tests.e2e.kubectl import Kubectl
from tests.e2e.namespace import JobNamespace
from tests.kind import images, node_image, prepare
from tests.kind.base_images import registry_reachable
from tests.kind.cluster import DEFAULT_NAME, Cluster, up
from tests.kind.command import CommandError
from tests.kind.docker import DockerUnavailableError, docker, running_engine
from tests.kind.toolchain import ToolchainError, binary
from tests.processes import end

NAME = "mnist-cpu"
CLAIM = f"{NAME}-checkpoints"
SECONDS = 1800.0


def main() -> int:
    """Run the demo. The exit code is 0 if the job succeeded, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--name", default=DEFAULT_NAME, help="kind cluster to use or create (default: %(default)s)")
    options = parser.parse_args()
    try:
        cluster = set_up(options.name)
        kubectl = Kubectl(cluster.kubeconfig)
        delete_earlier(kubectl)
        apply_example(cluster, kubectl)
        job = follow(cluster)
    except (CommandError, ToolchainError, DockerUnavailableError, DDPJobError, AssertionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again, down = (_make(target, options.name) for target in ("demo-kind", "demo-down"))
        say(f"interrupted. What was created keeps running. Start again: {again}. Clean up: {down}")
        return 130
    succeeded = is_true(job.get("status"), "Succeeded")
    folder = JobNamespace(kubectl, cluster).folder_of(CLAIM)
    print(ending(cluster, job, folder))
    return 0 if succeeded else 1


def set_up(name: str) -> Cluster:
    """Create the cluster, build the images, install the operator, and return the cluster."""
    say("step 1 of 5: kind, kubectl, Helm, Docker and a node image, of this machine or built (which takes minutes)")
    use_what_is_installed()
    prepare.ensure(*prepare.CLUSTER, "helm", install=True)
    say("step 2 of 5: kind cluster with one control plane and two workers")
    cluster = up(name)
    say("step 3 of 5: images of operator and trainer")
    for image in images.build_images():
        cluster.load_image(image)
    say("step 4 of 5: helm upgrade --install ddpjob charts/ddpjob --namespace ddpjob-system --create-namespace")
    operator = Installation.of(cluster.kubeconfig)
    known = operator.kubectl.objects("deployments")
    operator.install(images.OPERATOR_TAG, progress_seconds=1)
    # Every build has the same tag: only a new pod uses the new image.
    (operator.restart if known else operator.wait_until_ready)()
    return cluster


def use_what_is_installed() -> None:
    """Use the newest of kind's node images that the engine has, where none can be pulled, and kubectl of PATH on it."""
    engine = None if registry_reachable() else running_engine()
    if engine is not None and not os.environ.get("DDPJOB_NODE_IMAGE"):
        listed = docker("images", "--format", "{{.Repository}}:{{.Tag}}", "kindest/node", engine=engine).stdout.split()
        known = [([int(part) for part in re.findall(r"\d+", tag)], tag) for tag in listed if "<none>" not in tag]
        if known:
            os.environ["DDPJOB_NODE_IMAGE"] = max(known)[1]
    # A node image that is built here contains the pinned kubectl.
    names = [name for name in os.environ.get("DDPJOB_INSTALLED", "").split() if name not in node_image.node_programs()]
    os.environ["DDPJOB_INSTALLED"] = " ".join(names)


def delete_earlier(kubectl: Kubectl) -> None:
    """Delete the job of an earlier demo, and its claim with the checkpoints."""
    if kubectl("get", JOB_KIND, NAME, "--ignore-not-found"):
        say(f"deleting the job of an earlier demo, {NAME}, and its checkpoints")
    kubectl("delete", JOB_KIND, NAME, "--ignore-not-found", "--cascade=foreground", "--timeout=90s", timeout=120)
    kubectl("delete", "persistentvolumeclaim", CLAIM, "--ignore-not-found", "--timeout=60s", timeout=90)


def apply_example(cluster: Cluster, kubectl: Kubectl) -> None:
    """Apply the example, or its variant with scikit-learn's digits if MNIST is missing and cannot be downloaded."""
    storage.put_mnist(cluster.initial)
    try:
        if not storage.has_mnist():
            say("MNIST: downloading what is missing (11 MB)")
            fetch.fetch(str(cluster.initial / "data"), log=say)
    except TrainerError as error:
        why = str(error).splitlines()[0]
        say(f"step 5 of 5: MNIST could not be downloaded ({why}): training on scikit-learn's digits instead")
        job: Json = yaml.safe_load(EXAMPLE.read_text())
        job["spec"]["args"] = ["train", "--epochs", "2", "--data", "digits"]
        kubectl.apply(job)
        return
    say(f"step 5 of 5: kubectl apply -f {EXAMPLE.relative_to(ROOT)}")
    kubectl("apply", "--filename", str(EXAMPLE))


def follow(cluster: Cluster) -> Json:
    """Show the job with `ddpjob get --watch` until it has finished, and return it."""
    command = (sys.executable, "-m", "ddpjob.cli.main", "get", NAME, "--watch", "--context", f"kind-{cluster.name}")
    environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig)}
    shown = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    try:
        with Client.cluster(kubeconfig=cluster.kubeconfig) as client:
            return dict(client.wait(NAME, timeout=SECONDS).manifest)
    finally:
        end(shown)


def ending(cluster: Cluster, job: Json, folder: Path) -> str:
    """Return the result, with commands to look further. folder: of the job's volume on this machine."""
    status = job["status"]
    finished = condition(job.get("status"), "Finished")
    lines = [""]
    if status["state"] == "Succeeded":
        accuracy, world = float(status["progress"].get("accuracy", 0)), status["world"]["worldSize"]
        lines += [
            f"Accuracy on the test set: {100 * accuracy:.2f} % (world size {world})",
            f"Checkpoint:               {folder / status.get('checkpoint', {}).get('path', '')}",
            f"Every step's loss:        {folder / 'metrics'}",
        ]
    else:
        lines += [f"The job ended as {status['state']}: {finished.get('reason')}: {finished.get('message')}"]
    return "\n".join(
        [
            *lines,
            "",
            "More:",
            f"  export KUBECONFIG={cluster.kubeconfig}",
            *([] if shutil.which("kubectl") else [f"  alias kubectl={binary('kubectl')}"]),
            *([] if shutil.which("ddpjob") else ["  source .venv/bin/activate"]),
            f"  ddpjob get {NAME} --context kind-{cluster.name}",
            f"  ddpjob why {NAME} --context kind-{cluster.name}",
            f"  ddpjob pull {NAME} --context kind-{cluster.name} --to trained",
            "  kubectl get ddp",
            f"  kubectl describe ddp {NAME}",
            f"  kubectl logs -l ddpjob.dev/job-name={NAME} --prefix",
            "  kubectl explain ddpjob.spec",
            "Another job beside it, with a volume of its own:",
            f"  sed s/{NAME}/mnist-again/ {EXAMPLE.relative_to(ROOT)} | kubectl apply -f -",
            "",
            f"Clean up: {_make('demo-down', cluster.name)}",
        ]
    )


def _make(target: str, name: str) -> str:
    return f"make {target}" + (f" NAME={name}" if name != DEFAULT_NAME else "")


def say(line: str) -> None:
    """Print a step to stderr. Stdout is for the table and the result."""
    print(f"==> {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
