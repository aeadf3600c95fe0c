"""``$(VAR)`` in values, commands and arguments, as the kubelet reads it.

https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
"""

import re
from collections.abc import Mapping

_REFERENCE = re.compile(r"\$(?:(\$)|\(([^)]*)\))")


def expand(text: str, values: Mapping[str, str]) -> str:
    """References to what is in ``values`` replaced; others stay as they are, and ``$$`` is one dollar."""
    return _REFERENCE.sub(lambda found: "$" if found[1] else values.get(found[2], found[0]), text)
