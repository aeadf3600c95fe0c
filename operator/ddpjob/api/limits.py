"""Limits of names, counts and texts in the resource, and the default ports."""

from typing import Final

# A pod's name is also its hostname, so it must be one DNS label of at most 63 characters:
# <job>-<uid5>-<attempt>-<node_rank> leaves 45 for the job: the other three parts take up to 1 + 5 each.
MAX_JOB_NAME: Final = 45
MAX_DIGITS: Final = 5
"""Of the numbers of an attempt and of a node in a name."""
MAX_NODES: Final = 4096
MAX_NPROC_PER_NODE: Final = 64

# Texts and lists of the status.
MAX_REASON: Final = 128
MAX_MESSAGE: Final = 2048
MAX_ADVICE: Final = 1024
MAX_LOG_TAIL: Final = 2048
MAX_AVOIDED: Final = 16
MAX_REPORTED_PATH: Final = 256

MASTER_PORT: Final = 29500
"""Default of rendezvous.port."""
PROGRESS_PORT: Final = 29501
"""Default of rendezvous.progressPort."""
