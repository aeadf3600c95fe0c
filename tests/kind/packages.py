"""Install the Debian packages that tests need, if CI=true or on request, never otherwise."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kind.command import CommandError, run, step

_POLICY = Path("/usr/sbin/policy-rc.d")

# Program to the packages that provide it.
_PACKAGES = {
    "docker": ["docker.io"],
    "dockerd": ["docker.io"],
    "iptables": ["iptables"],
    "ip": ["iproute2"],
    "debootstrap": ["debootstrap", "debian-archive-keyring"],
    "chromium": ["chromium", "fonts-dejavu-core"],
    "promtool": ["prometheus"],
}
_BESIDE_DOCKER = {"chromium", "promtool"}
"""Programs that Docker does not need."""


class MissingProgramsError(CommandError):
    """Programs are not installed, and installing them is not allowed here."""


def require(*programs: str, install: bool | None = None) -> None:
    """Install the packages of programs that are missing, if ``install`` (default: CI=true) allows it.

    Raises CommandError with what to install: MissingProgramsError if it may not install it.
    """
    missing = [name for name in programs if shutil.which(name) is None]
    if not missing:
        return
    packages = sorted({package for name in missing for package in _PACKAGES[name]})
    allowed = os.environ.get("CI") == "true" if install is None else install
    if not allowed:
        raise MissingProgramsError(
            f"Not installed: {', '.join(missing)}. Install what is missing; on Debian this does it: "
            + (
                f"apt-get install {' '.join(packages)}"
                if _BESIDE_DOCKER.issuperset(missing)
                else "python -m tests.kind docker --install"
            )
        )
    _install(packages)


def _install(names: list[str]) -> None:
    if shutil.which("apt-get") is None:
        raise CommandError(f"This system has no apt-get. Install its packages that correspond to {', '.join(names)}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    waiting = ["-o", "DPkg::Lock::Timeout=300"]
    with step(f"installing {' '.join(names)}"), _no_services_started():
        run(["apt-get", "update", *waiting], env=quiet, timeout=600)
        run(["apt-get", "install", "--yes", "--no-install-recommends", *waiting, *names], env=quiet, timeout=1200)


@contextmanager
def _no_services_started() -> Iterator[None]:
    # Without systemd (a container, a chroot) a package's script starts its daemon directly, with default settings.
    if Path("/run/systemd/system").exists() or _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
