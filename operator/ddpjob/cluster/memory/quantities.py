"""Quantities of resources: what ``1.5Gi``, ``500m`` or ``1024`` mean, and the one way the API server writes each.

https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/.
"""

import re
from decimal import Decimal
from math import ceil

_FORM = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))((?:[KMGTPE]i)|[numkMGTPE]|(?:[eE][+-]?[0-9]+)|)", re.ASCII)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"": 0, "Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


def _parts(text: str) -> tuple[Decimal, str] | None:
    found = _FORM.fullmatch(text)
    return None if found is None else (Decimal(found[1]), found[2])


def is_quantity(value: object) -> bool:
    """Whether the API server could read it; a JSON number is one too."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) or (isinstance(value, str) and _parts(value) is not None)


def amount(value: str | float) -> Decimal:
    """The number a quantity stands for. Raises ``ValueError``."""
    parts = _parts(str(value))
    if parts is None:
        raise ValueError(f"{value!r} is no quantity")
    number, suffix = parts
    if suffix in _BINARY:
        return number * Decimal(1024 ** _BINARY[suffix])
    if suffix in _DECIMAL:
        return number.scaleb(_DECIMAL[suffix])
    return number.scaleb(int(suffix[1:]))


def canonical(value: str | float, *, finest: int = -9) -> str:
    """The API server's spelling: no fraction, the largest suffix that allows it, rounded up to 10**finest."""
    text = str(value)
    form = _FORM.fullmatch(text)
    spelled = _spelled(amount(text), form, finest)
    # A plus sign, a point too many or a capital E before an exponent is no reason for it to spell anew.
    plain = re.sub(r"E(?=[+-]?\d)", "e", text.lstrip("+").replace(".", ""))
    return text if plain == spelled and spelled != "0" else spelled


def _spelled(number: Decimal, form: re.Match[str] | None, finest: int) -> str:
    suffix = form[2] if form else ""
    if suffix in _BINARY and suffix and abs(number) >= 1024 and number == number.to_integral_value():
        return _scaled(int(number), 1024, list(_BINARY.items()))
    nano = ceil(number.scaleb(-finest)) * 10 ** (finest + 9)
    if suffix[:1] in ("e", "E") and len(suffix) > 1:
        exponents = [(f"e{power}" if power else "", power) for power in range(-9, 19, 3)]
        return _scaled(nano, 1000, exponents)
    return _scaled(nano, 1000, list(_DECIMAL.items()))


def _scaled(number: int, base: int, suffixes: list[tuple[str, int]]) -> str:
    if number == 0:
        return "0"
    index = 0
    while number % base == 0 and index < len(suffixes) - 1:
        number //= base
        index += 1
    return f"{number}{suffixes[index][0]}"
