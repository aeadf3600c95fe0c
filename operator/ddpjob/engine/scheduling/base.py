"""What the systems that admit a job, or place the pods of an attempt, share."""

from typing import Final

Obstacle = tuple[str, str]
"""Reason and message."""
MAX_TEXT: Final = 512
"""Characters of a text of a system in a message."""
LOOKUP_SECONDS: Final = 60.0
"""How long an object of the cluster that was read is used, and when one is read again that keeps a job waiting."""
