"""``ddpjob init``: prints or writes a commented DDPJob to begin with."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ddpjob.cli.options import Checkpoint, Env, Gpus, Launcher, MaxRestarts, Memory
from ddpjob.cli.text import one_line
from ddpjob.errors import InvalidJobError


def init(
    *,
    image: Annotated[
        str, Option("--image", metavar="IMAGE", help="Image with Python, PyTorch and the script.")
    ] = "registry.example.com/me/train:1",
    script: Annotated[
        str, Option("--script", metavar="SCRIPT.py", help="Script, as a path in the image or below its directory.")
    ] = "train.py",
    launcher: Launcher = None,
    nodes: Annotated[int, Option("--nodes", min=1, metavar="N", help="Number of nodes.")] = 1,
    nproc: Annotated[
        int | None, Option("--nproc", min=1, metavar="N", help="Processes per node.", show_default="one per GPU")
    ] = None,
    gpus: Gpus = None,
    memory: Memory = None,
    checkpoint: Checkpoint = None,
    max_restarts: MaxRestarts = None,
    env: Env = None,
    name: Annotated[
        str | None, Option("--name", metavar="NAME", help="Name of the job.", show_default="the name of the script")
    ] = None,
    file: Annotated[
        Path | None,
        Option("--file", "-f", metavar="FILE", help="Write to this file, which must not exist; default: print it."),
    ] = None,
) -> int:
    """Print a commented DDPJob to begin with, or write it to a file.

    \b
    Example:
      ddpjob init --image registry.example.com/me/train:1 --script train.py --nodes 2
    """
    from ddpjob.client.jobfile import job_name
    from ddpjob.client.starter import starter

    text = starter(
        name=name or job_name(Path(script).stem),
        image=image,
        script=script,
        launcher=launcher or "ddprun",
        nodes=nodes,
        nproc=nproc,
        words={"gpus": gpus, "memory": memory, "checkpoint": checkpoint, "maxRestarts": max_restarts, "env": env},
    )
    if file is None:
        typer.echo(text, nl=False)
        return 0
    try:
        with file.open("x", encoding="utf-8") as created:
            created.write(text)
    except FileExistsError as error:
        raise InvalidJobError(
            f"{file} exists", "a file is not overwritten", "choose another name with -f, or remove the file"
        ) from error
    except OSError as error:
        raise InvalidJobError(
            f"{file} cannot be written: {error.strerror}", "the directory must exist and be writable", "choose another"
        ) from error
    typer.echo(f"wrote {one_line(file)}; ddpjob validate {one_line(file)} checks it")
    return 0
