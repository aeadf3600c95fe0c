"""Errors that a user can correct: what is wrong, the likely cause, and what to do. Programs match on the class."""

import difflib
from collections.abc import Iterable
from typing import Self


class DDPJobError(Exception):
    """An error that the user can correct; the base of all errors of the Python API.

    error: what is wrong, and where. hint: the likely cause. next_step: what to do. The last two may be empty.
    """

    def __init__(self, error: str, hint: str = "", next_step: str = "") -> None:
        super().__init__(error)
        self.error = error
        self.hint = hint
        self.next_step = next_step

    def parts(self) -> list[tuple[str, str]]:
        """Return label and text of the three lines ``error:``, ``hint:`` and ``next:``, without the empty ones."""
        parts = (("error: ", self.error), ("hint:  ", self.hint), ("next:  ", self.next_step))
        return [(label, text) for label, text in parts if text]

    def __str__(self) -> str:
        """Return the error, and the other lines below it: what a traceback shows."""
        return "\n".join([self.error, *(label + text for label, text in self.parts()[1:])])


class InvalidJobError(DDPJobError):
    """The job, or an argument, is wrong; the same call fails again."""


class JobNotFoundError(DDPJobError):
    """There is no such job: it never existed, or it was deleted, perhaps while it was watched."""


class JobExistsError(DDPJobError):
    """A job of this name exists, or runs already."""

    @classmethod
    def of(cls, name: str, namespace: str | None = None) -> Self:
        """Return the error of a submission whose name is taken."""
        return cls(
            f"there is a job {name} already" + (f", in namespace {namespace}" if namespace else ""),
            "a finished job keeps its name until it is deleted",
            f"ddpjob delete {name} deletes it and keeps its checkpoints; or use another name",
        )


class NotAllowedError(DDPJobError):
    """The cluster refuses the request of this user: missing rights, a quota, or a policy."""


class UnavailableError(DDPJobError):
    """The cluster, its DDPJobs, a log or metrics cannot be reached, or nothing runs a job of this machine.

    A change may or may not have been carried out.
    """


class NotServedError(UnavailableError):
    """The cluster has no DDPJobs: its CustomResourceDefinition is not installed."""


class TransferError(DDPJobError):
    """A file of a volume was not copied: the disk refuses it, or it was deleted or cannot be read."""


class DamagedFileError(TransferError):
    """A file of the volume does not have the digest that it was saved with, or arrives changed."""


class WaitTimeoutError(DDPJobError, TimeoutError):
    """The job did not reach the awaited state in time."""


class StoppedError(DDPJobError):
    """A wait, a watch or logs ended because the client was closed. The jobs go on."""

    def __init__(self) -> None:
        super().__init__("the client was closed", "the jobs go on")


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a hint at the most similar of the known names, or ``otherwise``."""
    choices = {choice.lower(): choice for choice in known}
    near = difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.6)
    return f'did you mean "{choices[near[0]]}"?' if near else otherwise
