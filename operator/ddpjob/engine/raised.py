"""Errors that programs raise, by type and text: of the program itself, of a device, or of a service that was away."""

import errno
import os
import re

from ddpjob.engine.evidence import PodEvidence

DEVICE_FAILED = "DeviceFailed"
"""Reason of a failure of a GPU; also the trainer's."""
# What programs raise by themselves. Any library may have errors of storage, network and devices with names of its own.
_OF_PROGRAMS = frozenset(
    {
        *("ArithmeticError", "AssertionError", "AttributeError", "ImportError", "IndentationError", "IndexError"),
        *("KeyError", "LookupError", "ModuleNotFoundError", "NameError", "NotImplementedError", "OverflowError"),
        *("RecursionError", "RuntimeError", "SyntaxError", "TypeError", "UnboundLocalError", "ValueError"),
        "ZeroDivisionError",
    }
)
_OF_DEVICES = re.compile(
    r"CUDA error:|cuDNN error:|CUBLAS_STATUS_|uncorrectable ECC|unhandled cuda error", re.IGNORECASE
)
# The spec, the image or the program is to blame for these, and not the device or its Kubernetes node.
_OF_NO_DEVICE = re.compile(
    r"device-side assert|no kernel image|invalid device|driver version is insufficient|ALLOC_FAILED|out of memory"
)
# Native code puts the text of the system into a RuntimeError; "Invalid argument" may also be the program's.
_OF_THE_SYSTEM = "|".join(re.escape(os.strerror(number)) for number in errno.errorcode if number != errno.EINVAL)
_OF_THE_ENVIRONMENT = re.compile(
    rf"{_OF_DEVICES.pattern}|CUDA|cuDNN|cuBLAS|NCCL|gloo|NVIDIA driver|connection|socket|\bI/O\b|timed? ?out|HTTP"
    r"|name or service|name resolution|zip archive|PytorchStreamReader|unexpected EOF|worker \(pid|exited unexpectedly"
    rf"|killed|stale file|Errno|{_OF_THE_SYSTEM}",
    re.IGNORECASE,
)
_OF_A_SERVICE = re.compile(
    r"connection|could not connect|socket|timed? ?out|name or service|name resolution|temporar|unavailable|throttl"
    r"|SlowDown|reduce your request|too many requests|\b(?:429|50[0234])\b|stale file|\bI/O\b"
    r"|input/output|transport endpoint",
    re.IGNORECASE,
)
# Another exception in the text of one: of a DataLoader's worker, and the first cause that ddprun names.
_ANOTHER = re.compile(r"(?:^|Caught |caused by )([\w.]*(?:Error|Exception|Timeout|Interrupt))(?: in |: )")


def text_of(e: PodEvidence) -> str:
    """Return the text of the error, from the log or from the report; empty if neither has one."""
    return (e.logged.message if e.logged is not None else e.report.message) or ""


def is_of_a_service(exception: str | None, message: str) -> bool:
    """Whether a program could not use a storage, network or service. A wrong name of a service looks the same."""
    return exception is not None and _OF_A_SERVICE.search(f"{exception}: {message}") is not None


def has_failed_device(e: PodEvidence) -> bool:
    """Return whether a GPU or its driver failed."""
    is_device = e.report.kind == DEVICE_FAILED or (e.facts.exception or "").rpartition(".")[2] == "AcceleratorError"
    is_named = e.facts.exception == "RuntimeError" and _OF_DEVICES.search(text_of(e)) is not None
    return e.whose != "peer" and (is_device or is_named) and _OF_NO_DEVICE.search(text_of(e)) is None


def is_of_program(e: PodEvidence) -> bool:
    """Return whether the error is one of the program or its data, and not of its machine, network or storage."""
    raised = {e.facts.exception, *(name.rpartition(".")[2] for name in _ANOTHER.findall(text_of(e)))}
    return (
        e.whose != "peer" and e.exit_code == 1 and raised <= _OF_PROGRAMS and not _OF_THE_ENVIRONMENT.search(text_of(e))
    )
