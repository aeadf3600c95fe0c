"""Quantities of resources such as ``1.5Gi``, ``500m`` or ``1024``.

https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/.
"""

import re
from decimal import Context, Decimal

_FORM = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))((?:[KMGTPE]i)|[numkMGTPE]|(?:[eE][+-]?[0-9]+)|)", re.ASCII)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_MAX_EXPONENT = 100  # int() of a larger number would take minutes
_EXACT = Context(prec=400)  # enough for every quantity that the resource accepts; the default rounds to 28 digits
_BINARY = {"": 0, "Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


def amount(value: str | float) -> Decimal:
    """Return the value of a quantity; JSON numbers are quantities, too. Raises ``ValueError``."""
    number, suffix = _parts(value)
    if suffix in _BINARY:
        return _EXACT.multiply(number, Decimal(1024 ** _BINARY[suffix]))
    exponent = _DECIMAL[suffix] if suffix in _DECIMAL else int(suffix[1:])
    if abs(exponent) > _MAX_EXPONENT:
        raise ValueError(f"{value!r} is not a quantity that this program can compute with")
    return _EXACT.scaleb(number, exponent)


def _parts(value: str | float) -> tuple[Decimal, str]:
    found = _FORM.fullmatch(str(value))
    if found is None:
        raise ValueError(f"{value!r} is not a quantity")
    return Decimal(found[1]), found[2]
