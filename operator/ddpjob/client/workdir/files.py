"""The files of a directory that are sent: without those that ``.gitignore`` files name, and a few others."""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ddpjob.client.workdir.ignore import Rules, verdict
from ddpjob.errors import InvalidJobError

MAX_FILES = 10_000
MAX_BYTES = 64 * 1024 * 1024
"""Of all files before compression: each pod unpacks them."""
_LARGEST = 5  # files that an error names
_NEVER = ".git"  # a directory, and in a worktree or submodule a file
_DEFAULTS = (
    *(".hg/", ".svn/", "__pycache__/", "*.py[co]", ".venv/", "venv/", ".tox/", ".nox/", "node_modules/"),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".ipynb_checkpoints/", ".DS_Store"),
)
_OF_CREDENTIALS = (
    ".env .env.* *.env env.* !.env.example !.env.sample !.env.template .envrc .netrc _netrc .npmrc .pypirc .aws/ "
    ".azure/ .gnupg/ .kube/ .ssh/ .docker/ gcloud/ .kaggle/ .terraform/ .huggingface/ kubeconfig kubeconfig.* "
    "*.kubeconfig .dockercfg .dockerconfigjson .git-credentials .pgpass .my.cnf .htpasswd .vault-token .s3cfg .boto "
    "credentials credentials.json hf_token *service-account*.json kaggle.json *.tfstate id_rsa* id_dsa* id_ecdsa* "
    "id_ed25519* application_default_credentials.json *.pem *.key *.p12 *.pfx *.jks *.keystore *.ppk *.kdbx"
)
_CREDENTIALS = tuple(_OF_CREDENTIALS.split())
"""Ignored without a rule, as are ``_DEFAULTS``; a ``.gitignore`` may include them again. From the lists of scanners."""
_NEXT = "list what the job does not need in .gitignore; put data on a volume (spec.data), large programs into the image"


@dataclass(frozen=True)
class SourceFile:
    """A regular file, or a symbolic link within the directory. name: its path in the directory, with ``/``.

    is_asked_for: a rule with ! includes it.
    """

    name: str
    path: Path
    size: int
    is_link: bool = False
    is_asked_for: bool = False


def existing(directory: str | Path) -> Path:
    """Return the absolute path of a directory, without links. Raises ``InvalidJobError`` if there is none."""
    path = Path(directory).expanduser().resolve()
    if not path.is_dir():
        raise InvalidJobError(
            f"--workdir {directory}: there is no such directory", "it holds the files of the job", "correct the path"
        )
    return path


def files_of(directory: Path, left_out: list[str] | None = None) -> list[SourceFile]:
    """Return the files to send of a directory whose path has no links, sorted by name.

    left_out: gets the names of files and directories that may hold credentials.

    Raises:
        InvalidJobError: a file cannot be read, a link leads out of the directory, or there are too many files.
    """
    try:
        # Names of credentials in any case: file systems of macOS and Windows do not distinguish .ENV from .env.
        rules = [Rules(_CREDENTIALS, directory, re.IGNORECASE), Rules(_DEFAULTS, directory), *_rules_above(directory)]
        found = list(islice(_walk(directory, directory, rules, [] if left_out is None else left_out), MAX_FILES + 1))
    except OSError as error:
        raise InvalidJobError(
            f"--workdir {directory}: {error.filename} cannot be read: {error.strerror}",
            "every file that is not ignored is sent",
            "correct its mode, or list it in .gitignore",
        ) from error
    if len(found) > MAX_FILES:
        raise InvalidJobError(
            f"--workdir {directory}: there are more than {MAX_FILES:,} files", f"one of them is {found[-1].name}", _NEXT
        )
    if not found:
        raise InvalidJobError(
            f"--workdir {directory}: there is no file to send",
            "the directory is empty, or .gitignore names all of its files",
            "name the directory that holds the program",
        )
    if (total := sum(file.size for file in found)) > MAX_BYTES:
        sizes = {file.name: file.size for file in found}
        raise too_large(directory, f"{total:,} bytes, at most {MAX_BYTES:,} are allowed", sizes)
    return sorted(found, key=lambda file: file.name)


def too_large(directory: Path, excess: str, sizes: dict[str, int]) -> InvalidJobError:
    """Return the error of a directory that is too large, with its largest files. sizes: bytes by name."""
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_LARGEST]
    named = ", ".join(f"{name} ({sizes[name]:,})" for name in largest)
    return InvalidJobError(f"--workdir {directory} has {excess}", f"the largest files, in bytes: {named}", _NEXT)


def _walk(root: Path, directory: Path, rules: Sequence[Rules], left_out: list[str]) -> Iterator[SourceFile]:
    if (own := Rules.of(directory)) is not None:
        rules = [*rules, own]
    for path in sorted(directory.iterdir()):
        state = path.lstat()
        is_directory = stat.S_ISDIR(state.st_mode)
        name = path.relative_to(root).as_posix()
        found = verdict(path, rules, is_directory=is_directory)
        by_user = verdict(path, rules[1:], is_directory=is_directory)
        if path.name == _NEVER or found:
            if path.name != _NEVER and not by_user:
                left_out.append(name)
        elif is_directory:
            yield from _walk(root, path, rules, left_out)
        elif stat.S_ISLNK(state.st_mode):
            _require_inside(root, path)
            yield SourceFile(name, path, 0, is_link=True)
        elif stat.S_ISREG(state.st_mode):  # git leaves out sockets, pipes and devices, too
            yield SourceFile(name, path, state.st_size, is_asked_for=by_user is False)


def _rules_above(root: Path) -> list[Rules]:
    """Return the rules in the directories above, up to that of the git repository.

    If they ignore the directory itself, there are none: the user has named it.
    """
    repository = next((place for place in (root, *root.parents) if (place / _NEVER).exists()), root)
    rules: list[Rules] = []
    for place in (*reversed(root.parents), root):
        if not place.is_relative_to(repository):
            continue
        if verdict(place, rules, is_directory=True):
            return []
        if place != root and (own := Rules.of(place)) is not None:
            rules.append(own)
    return rules


def _require_inside(root: Path, link: Path) -> None:
    target = Path(os.readlink(link))  # noqa: PTH115 - not the resolved path
    if target.is_absolute() or not Path(os.path.normpath(link.parent / target)).is_relative_to(root):
        raise InvalidJobError(
            f"{link} is a symbolic link out of the directory, to {target}",
            "the pods do not have what is outside",
            "list the link in .gitignore, or replace it by a copy",
        )
