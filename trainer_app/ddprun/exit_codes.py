"""The exit codes of ranks and launchers. The numbers are stable: job definitions and the operator rely on them."""

USER_ERROR = 1  # an exception that no other code names
USAGE = 2
DATA = 66
RENDEZVOUS = 69
RANKS = 71
VOLUME = 73
STOPPED = 75
HANG = 76
PEER_LOST = 77
MISMATCH = 78
NOT_FINITE = 79
SUPERSEDED = 80
DIVERGED = 81
SIGNAL_BASE = 128  # plus the number of the signal that killed the rank

NOT_RESTARTED = frozenset({USAGE, RANKS, STOPPED, MISMATCH, NOT_FINITE, SUPERSEDED})
"""Ends that a restart by the launcher cannot change, or that are no failures."""
