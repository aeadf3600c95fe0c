"""Formats of names, labels and times, as Kubernetes defines them (RFC 1123, RFC 1035, RFC 3339).

https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/#syntax-and-character-set.
"""

import re
from datetime import UTC, datetime

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_PART = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")

MAX_LABEL = 63
MAX_SUBDOMAIN = 253


def is_dns_label(value: str) -> bool:
    """RFC 1123 label: what a container, a hostname and a namespace may be called."""
    return len(value) <= MAX_LABEL and _LABEL.fullmatch(value) is not None


def is_dns_1035_label(value: str) -> bool:
    """RFC 1035 label: what a Service may be called."""
    return len(value) <= MAX_LABEL and _LABEL_1035.fullmatch(value) is not None


def is_dns_subdomain(value: str) -> bool:
    """RFC 1123 subdomain: what most objects may be called."""
    return len(value) <= MAX_SUBDOMAIN and _SUBDOMAIN.fullmatch(value) is not None


def is_path_segment(value: str) -> bool:
    """What any name must be at least: one segment of a URL's path."""
    return value not in (".", "..") and not set("/%") & set(value)


def is_qualified_name(value: str) -> bool:
    """``[prefix/]name``: keys of labels and annotations, finalizers."""
    prefix, slash, name = value.rpartition("/")
    if slash and not is_dns_subdomain(prefix):
        return False
    return len(name) <= MAX_LABEL and _NAME_PART.fullmatch(name) is not None


def is_label_value(value: str) -> bool:
    """A label's value; it may be empty."""
    return value == "" or (len(value) <= MAX_LABEL and _NAME_PART.fullmatch(value) is not None)


def is_time(value: str) -> bool:
    """RFC 3339 with seconds, as the format ``date-time`` and Kubernetes' own times want it."""
    if not _TIME.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value.upper())
    except ValueError:
        return False
    return True


def timestamp(moment: datetime) -> str:
    """``metav1.Time``: UTC with whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def canonical_time(value: str, *, micro: bool = False) -> str:
    """A time as the API server hands it back: in UTC, to the second (or microsecond)."""
    moment = datetime.fromisoformat(value.upper()).astimezone(UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ") if micro else timestamp(moment)
