"""Exit codes that the operator and the command line use; a test compares them with the trainer's."""

from typing import Final

USAGE: Final = 2
"""A mistake on the command line or in the spec."""
DATA: Final = 66
RENDEZVOUS: Final = 69
RANKS: Final = 71
VOLUME: Final = 73
STOPPED: Final = 75
HANG: Final = 76
MISMATCH: Final = 78
NOT_FINITE: Final = 79
SUPERSEDED: Final = 80
"""The trainer saw a newer run in its checkpoint directory."""
SIGNAL_BASE: Final = 128
"""A process that signal n ended has exit code 128 + n."""
