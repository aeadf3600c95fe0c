"""``ddpjob submit``: creates a job on the cluster, or in the background of this machine, and waits for it if asked."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from ddpjob.api.names import DDPJOBS, GROUP
from ddpjob.cli import options
from ddpjob.cli.place import Where, for_new_job
from ddpjob.cli.text import number_of, one_line, size_text
from ddpjob.cli.wait import wait_for
from ddpjob.errors import InvalidJobError

if TYPE_CHECKING:
    from ddpjob.client.job import DDPJob

Form = Literal["json", "yaml", "name"]
_NAMED = 20  # files that are named


def submit(
    new: options.NewJob,
    *,
    image: Annotated[str | None, Option("--image", metavar="IMAGE", help="Image of the pods (spec.image).")] = None,
    workdir: Annotated[
        Path | None,
        Option("--workdir", metavar="DIR", help="Working directory of the job: its files are sent into the pods."),
    ] = None,
    wait: Annotated[bool, Option("--wait", help="Show the job until it has finished, then why it ended so.")] = False,
    timeout: options.Timeout = None,
    dry_run: Annotated[
        Literal["client", "server"] | None,
        Option("--dry-run", help="Create nothing: check here, or with the admission of the server."),
    ] = None,
    output: Annotated[
        Form | None, Option("--output", "-o", metavar="FORM", help="Print the job: json, yaml or name.")
    ] = None,
    where: Where,
) -> int:
    """Create a job on the cluster of the kubeconfig, or with --local on this machine, in the background.

    A script, or the directory of --workdir, is sent into the pods: the image needs only Python and PyTorch. Files that
    .gitignore names are left out, and files such as .env, which often hold passwords or keys. The JSON has the schema
    docs/reference/schemas/submit.json.

    \b
    Exit codes; those from 100 only with --wait:
      0    the job is created, or it succeeded
      1    the cluster cannot be reached, you may not create the job, or its run on this machine ended
      2    the command line or the job is wrong, or the name is taken
      100  the job failed
      101  the time is over
      102  the job is suspended
      103  the job was deleted

    \b
    Example:
      ddpjob submit train.py --image pytorch/pytorch --nodes 2 --nproc 1 --workdir . --wait -- --epochs 3
    """
    if wait and output is not None:
        raise InvalidJobError(
            "--wait shows the job, --output prints an object", "both are for standard output", "ddpjob get -o json"
        )
    job = _read(new, image, where.namespace)
    where = replace(where, namespace=job.namespace)
    if workdir is not None and not where.is_here:
        _show_files(workdir)
    if dry_run == "client":
        _check(job, workdir, output, local=where.is_here)
        return 0
    with for_new_job(where) as client:
        made = client.submit(job, workdir=workdir, dry_run=dry_run is not None)
        if dry_run is None and wait:
            typer.echo(f"{made.name} is submitted ({client.place})")
            sys.stdout.flush()
            return wait_for(client, made, timeout=timeout, follow=True)
        _show(made, output, f"{made.name} is {'valid' if dry_run else 'submitted'} ({client.place})")
    return 0


def _read(new: options.NewJob, image: str | None, namespace: str | None) -> "DDPJob":
    """Return the job of a file or for a script, with the fields of the options."""
    from ddpjob.cli.prepare import read_changed
    from ddpjob.client.job import DDPJob

    file = read_changed(new, image=image, namespace=namespace)
    if file.ignored:
        typer.echo(f"· ignored {len(file.ignored)} other documents: {one_line(', '.join(file.ignored))}", err=True)
    return DDPJob.from_file(file)


def _show_files(workdir: Path) -> None:
    """Print which files are sent, and which may hold credentials and are not."""
    from ddpjob.client.workdir.files import existing, files_of

    left_out: list[str] = []
    files = files_of(existing(workdir), left_out)
    size = size_text(sum(file.size for file in files))
    sent, kept = (_some(names) for names in ([file.name for file in files], left_out))
    typer.echo(f"· sends {number_of(len(files), 'file')} of {workdir}, {size}: {sent}", err=True)
    if left_out:
        typer.echo(f"· leaves out {kept}: such names often hold passwords or keys", err=True)


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return one_line(", ".join(names[:_NAMED]) + more)


def _check(job: "DDPJob", workdir: Path | None, output: Form | None, *, local: bool) -> None:
    from ddpjob.client.workdir.mount import at_directory, with_files
    from ddpjob.local.admission import require_valid

    require_valid(job.manifest)
    if not local:
        job = with_files(job, workdir)
    elif workdir is not None:
        job = at_directory(job, workdir)
    _show(job, output, f"{job.name} is valid (nothing was sent)")


def _show(job: "DDPJob", output: Form | None, line: str) -> None:
    if output is None:
        typer.echo(line)
    elif output == "name":
        typer.echo(f"{DDPJOBS.kind.lower()}.{GROUP}/{job.name}")
    elif output == "yaml":
        from ddpjob.client.jobfile import dump_yaml

        typer.echo(dump_yaml(*job.others, job.manifest), nl=False)
    else:
        objects = [*job.others, job.manifest]
        shown = {"apiVersion": "v1", "kind": "List", "items": objects} if job.others else job.manifest
        typer.echo(json.dumps(shown, indent=2))
