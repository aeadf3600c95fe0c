"""The trainer's exit codes as the operator and the command line read them; a test compares them with the trainer's."""

from typing import Final

USER_ERROR: Final = 1
USAGE: Final = 2
DATA: Final = 66
RENDEZVOUS: Final = 69
RANKS: Final = 71
VOLUME: Final = 73
STOPPED: Final = 75
HANG: Final = 76
PEER_LOST: Final = 77
MISMATCH: Final = 78
NOT_FINITE: Final = 79
SUPERSEDED: Final = 80
SIGNAL_BASE: Final = 128
"""A process that signal n ended has exit code 128 + n."""
