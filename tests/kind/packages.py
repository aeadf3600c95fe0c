"""Installs Debian packages: where CI=true, or where `make setup` asks for it. Never on its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kind.command import CommandError, run, step

_POLICY = Path("/usr/sbin/policy-rc.d")


def install(*names: str) -> None:
    """apt-get install these packages. Raises CommandError, also where there is no apt-get."""
    if shutil.which("apt-get") is None:
        raise CommandError(
            f"This is not Debian or Ubuntu: please install what {', '.join(names)} stands for on your system."
        )
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    waiting = ["-o", "DPkg::Lock::Timeout=300"]
    with step(f"installing {' '.join(names)}"), _no_services_started():
        run(["apt-get", "update", *waiting], env=quiet, timeout=600)
        run(["apt-get", "install", "--yes", "--no-install-recommends", *waiting, *names], env=quiet, timeout=1200)


@contextmanager
def _no_services_started() -> Iterator[None]:
    # Without systemd (a container, a chroot) a package's script would start its daemon by hand, with settings that
    # are not ours.
    if Path("/run/systemd/system").exists() or _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
