"""A copy of the package for a Python that lacks it, such as another image's: ``ddprun --copy-to DIR``.

DIR/bin/ddprun    the program, which needs no installation (``injected``)
DIR/lib/ddprun    the package; nothing else is importable from DIR/lib
"""

import shutil
from pathlib import Path


def copy_to(directory: Path) -> None:
    """Copy package and program; a second copy overwrites the first.

    ``__pycache__`` is copied, too: a Python of the same version uses it, also where DIR is read-only.

    Raises:
        OSError: DIR cannot be written.
    """
    package = Path(__file__).resolve().parent
    shutil.copytree(package, directory / "lib" / package.name, dirs_exist_ok=True)
    program = directory / "bin" / "ddprun"
    program.parent.mkdir(exist_ok=True)
    shutil.copyfile(package / "injected.py", program)
    program.chmod(0o755)
