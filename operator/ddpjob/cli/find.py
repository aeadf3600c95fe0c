"""Finds a job of the state folder by its name."""

from pathlib import Path

from ddpjob.cli.errors import did_you_mean
from ddpjob.local.errors import LocalError
from ddpjob.local.state import JobFolder, StateFolder


def state_folder(state_dir: str | None) -> StateFolder:
    """The folder that was named, else the default one."""
    return StateFolder(Path(state_dir).expanduser() if state_dir else None)


def find(folder: StateFolder, name: str, namespace: str | None) -> JobFolder:
    """The one job of that name. Raises ``LocalError`` where there is none, or one in each of several namespaces."""
    jobs = [job for job in folder.jobs() if namespace in (None, job.namespace)]
    found = [job for job in jobs if job.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        spaces = ", ".join(job.namespace for job in found)
        raise LocalError(
            f"there are {len(found)} jobs named {name}, in the namespaces {spaces}",
            "a name is unique within its namespace only",
            f"add --namespace {found[0].namespace}",
        )
    where = f" in namespace {namespace}" if namespace else ""
    raise LocalError(
        f"there is no job {name}{where} in {folder.root}",
        did_you_mean(name, [job.name for job in jobs], "it was never run here, or it was deleted"),
        "ddpjob get lists the jobs",
    )
