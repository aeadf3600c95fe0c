"""The errors that only the trainer knows; ``ddprun.errors`` has those of launcher and ranks."""

# ruff: noqa: N818 - reports and job status show these names, which say what happened

from ddprun import exit_codes
from ddprun.errors import DataError, Mismatch, TrainerError


class DownloadFailed(DataError):
    """No mirror delivered a file."""


class DataMismatch(Mismatch):
    """The data differ."""


class WeightsDiffer(Mismatch):
    """The ranks do not start with the same weights."""


class NotFinite(TrainerError, code=exit_codes.NOT_FINITE):
    """The loss is NaN or infinite."""
