"""Local mode: runs a DDPJob on this machine by carrying out the engine's plans; pods are processes.

    admission ─▶ resume ─▶ session ─▶ pod_process ─▶ shim ─▶ the user's process

``translate``, ``volumes`` and ``resources`` replace the names, mounts and ports of a cluster by those of this machine.
``state`` holds the files that ``ddpjob get``, ``logs`` and ``delete`` read from another shell.
"""

from ddpjob.errors import DDPJobError, JobExistsError


class LocalError(DDPJobError):
    """Local mode refuses a job, or cannot carry it out."""


class LocalJobExistsError(LocalError, JobExistsError):
    """A job of this name is in the state folder, or another process runs it or deletes it."""
