"""Exit codes that the operator and the command line use; a test compares them with the trainer's."""

from typing import Final

USAGE: Final = 2
"""A mistake on the command line or in the spec."""
MISMATCH: Final = 78
SIGNAL_BASE: Final = 128
"""A process that signal n ended has exit code 128 + n."""
