"""Quantities of resources such as ``1.5Gi``, ``500m`` or ``1024``, and the number of devices in them.

https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/. Devices, for ``nprocPerNode: auto``:
https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus/; MIG devices have the names of NVIDIA's device plugin with
``MIG_STRATEGY=mixed``, for example ``nvidia.com/mig-1g.5gb``.
"""

import re
from collections.abc import Mapping
from decimal import Context, Decimal

_FORM = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))((?:[KMGTPE]i)|[numkMGTPE]|(?:[eE][+-]?[0-9]+)|)", re.ASCII)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_MAX_EXPONENT = 100  # int() of a larger number would take minutes
_EXACT = Context(prec=400)  # enough for every quantity that the resource accepts; the default rounds to 28 digits
_BINARY = {"": 0, "Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


def amount(value: str | float) -> Decimal:
    """Return the value of a quantity; JSON numbers are quantities, too. Raises ``ValueError``."""
    found = _FORM.fullmatch(str(value))
    if found is None:
        raise ValueError(f"{value!r} is not a quantity")
    number, suffix = Decimal(found[1]), found[2]
    if suffix in _BINARY:
        return _EXACT.multiply(number, Decimal(1024 ** _BINARY[suffix]))
    exponent = _DECIMAL[suffix] if suffix in _DECIMAL else int(suffix[1:])
    if abs(exponent) > _MAX_EXPONENT:
        raise ValueError(f"{value!r} is not a quantity that this program can compute with")
    return _EXACT.scaleb(number, exponent)


def count_devices(limits: Mapping[str, int | str], requests: Mapping[str, int | str]) -> int:
    """Return the number of devices of a container; a resource without a limit counts with its request.

    Raises:
        ValueError: a quantity is not a whole number of devices.
    """
    count = 0
    for name, value in {**requests, **limits}.items():
        if is_device(name):
            number = amount(value)
            if number != number.to_integral_value() or number < 0:
                raise ValueError(f"{name}: {value} is not a whole number of devices")
            count += int(number)
    return count


def is_device(resource: str) -> bool:
    """Return whether a resource is a kind of GPU or MIG device."""
    return resource.endswith("/gpu") or resource.startswith("nvidia.com/mig-")
