"""Quantities of resources such as ``1.5Gi``, ``500m`` or ``1024``: their value, and how the API server writes them.

https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/.
"""

import re
from decimal import Context, Decimal
from math import ceil

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


def canonical(value: str | float, *, finest: int = -9) -> str:
    """Return the API server's form: no fraction, the largest possible suffix, rounded up to 10**finest.

    Raises ``ValueError``.
    """
    text, suffix = str(value), _parts(value)[1]
    formatted = _format(amount(value), suffix, finest)
    # A plus sign, a needless point or a capital E before an exponent is kept.
    plain = re.sub(r"E(?=[+-]?\d)", "e", text.lstrip("+").replace(".", ""))
    return text if plain == formatted and formatted != "0" else formatted


def _parts(value: str | float) -> tuple[Decimal, str]:
    found = _FORM.fullmatch(str(value))
    if found is None:
        raise ValueError(f"{value!r} is not a quantity")
    return Decimal(found[1]), found[2]


def _format(number: Decimal, suffix: str, finest: int) -> str:
    if suffix in _BINARY and suffix and abs(number) >= 1024 and number == number.to_integral_value():
        return _scaled(int(number), 1024, list(_BINARY))
    nano = ceil(_EXACT.scaleb(number, -finest)) * 10 ** (finest + 9)
    if suffix[:1] in ("e", "E") and len(suffix) > 1:
        return _scaled(nano, 1000, [f"e{power}" if power else "" for power in range(-9, 19, 3)])
    return _scaled(nano, 1000, list(_DECIMAL))


def _scaled(number: int, base: int, suffixes: list[str]) -> str:
    if number == 0:
        return "0"
    index = 0
    while number % base == 0 and index < len(suffixes) - 1:
        number //= base
        index += 1
    return f"{number}{suffixes[index]}"
