"""How the API server writes quantities.

https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/.
"""

import re
from decimal import Decimal
from math import ceil

from ddpjob.api.quantities import _BINARY, _DECIMAL, _EXACT, _parts, amount


def canonical(value: str | float, *, finest: int = -9) -> str:
    """Return the API server's form: no fraction, the largest possible suffix, rounded up to 10**finest.

    Raises ``ValueError``.
    """
    text, suffix = str(value), _parts(value)[1]
    formatted = _format(amount(value), suffix, finest)
    # A plus sign, a needless point or a capital E before an exponent is kept.
    plain = re.sub(r"E(?=[+-]?\d)", "e", text.lstrip("+").replace(".", ""))
    return text if plain == formatted and formatted != "0" else formatted


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
