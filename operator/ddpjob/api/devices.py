"""Devices in a container's resources, for ``nprocPerNode: auto``: one process per GPU or MIG device.

https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus/; MIG devices have the names of NVIDIA's device plugin with
``MIG_STRATEGY=mixed``, for example ``nvidia.com/mig-1g.5gb``.
"""

from collections.abc import Mapping

from ddpjob.api.quantities import amount


def count_devices(limits: Mapping[str, int | str], requests: Mapping[str, int | str]) -> int:
    """Return the number of devices of a container; a resource without a limit counts with its request.

    Raises:
        ValueError: a quantity is not a whole number of devices.
    """
    given = {**requests, **limits}.items()
    return sum(_whole(name, n) for name, n in given if is_device(name))


def is_device(resource: str) -> bool:
    """Return whether a resource is a kind of GPU or MIG device."""
    return resource.endswith("/gpu") or resource.startswith("nvidia.com/mig-")


def _whole(name: str, value: int | str) -> int:
    number = amount(value)
    if number != number.to_integral_value() or number < 0:
        raise ValueError(f"{name}: {value} is not a whole number of devices")
    return int(number)
