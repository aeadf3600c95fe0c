"""``ddpjob render``: prints the objects that the operator would create for a job."""

import json
from typing import Annotated, Literal

from typer import Option

from ddpjob.cli.options import Namespace, Source


def render(
    source: Source,
    output: Annotated[
        Literal["yaml", "json"], Option("--output", "-o", metavar="FORM", help="yaml, or json: one List.")
    ] = "yaml",
    *,
    namespace: Namespace = None,
) -> int:
    """Print what the operator would create for the first attempt of a job: Service, claim, NetworkPolicy and pods.

    The same file gives the same output. The uid in it is an example, because a cluster chooses one for each job. The
    JSON has the schema docs/reference/schemas/render.json.

    \b
    Example:
      ddpjob render manifests/examples/mnist-cpu.yaml
    """
    from ddpjob.client import jobfile
    from ddpjob.local.admission import EXAMPLE_UID, admit

    job = jobfile.read(source).job
    if namespace is not None:
        job = job | {"metadata": job["metadata"] | {"namespace": namespace}}
    objects = admit(job, uid=EXAMPLE_UID).created()
    if output == "json":
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2))
    else:
        print(jobfile.dump_yaml(*objects), end="")
    return 0
