"""Which files of a directory are sent, compared with git, and the archive of them."""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpjob.client.workdir import archive, files
from ddpjob.client.workdir.archive import pack
from ddpjob.client.workdir.files import existing, files_of
from ddpjob.errors import InvalidJobError

# Rules of several levels; patterns are compared with git below, in any combination.
NAMES = [
    *("train.py", "a.log", "keep.log", "data/x.bin", "sub/data/x.bin", "weights/big.pt", "weights/small.pt"),
    *("tmp/kept.py", "#odd.py", "sub/debug.log", "sub/only.py", "sub/w/only.py", "sub/nested/x.py", "sub/a.cfg"),
    *("sub/b.cfg", "sub/deep/x.bin", "sub/deep/x.py", "sub/deep/er/y.py", "caf\u00e9.py"),
]
TREE = {
    ".gitignore": "*.log\n!keep.log\n/data/\nweights/*.pt\n!weights/small.pt\ntmp/\n!tmp/kept.py\n\\#odd.py\ncaf*",
    "sub/.gitignore": "!debug.log\n/only.py\nnested/\n*.cfg\n!b.cfg\n",
    "sub/deep/.gitignore": "*\n!.gitignore\n!*.py\n",
    **dict.fromkeys(NAMES, "content\n"),
}


def grow(folder: Path, tree: dict[str, str]) -> Path:
    for name, text in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def sent(folder: Path) -> list[str]:
    return [file.name for file in files_of(folder)]


def listed_by_git(folder: Path) -> list[str]:
    command = ["git", "-c", "core.excludesFile=/dev/null", "ls-files", "-z", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout.decode()
    return sorted(output.split("\0")[:-1])


@pytest.mark.parametrize("below", ["", "sub", "sub/deep"])
def test_files_are_those_that_git_would_take(tmp_path: Path, below: str) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    folder = grow(tmp_path, TREE) / below
    assert sent(folder) == listed_by_git(folder)


def test_a_directory_that_the_repository_ignores_is_sent_if_it_is_named(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    folder = grow(tmp_path, TREE) / "sub" / "nested"
    assert listed_by_git(folder) == []
    assert sent(folder) == ["x.py"]


_PARTS = st.sampled_from(
    ["a", "b", "*", "**", "?", "/", "/", "[ab]", "[!a]", "\\*", "*.py", "ab", "[a-", "]", "!", " "]
)
# Git takes a**/b for a and **/b, so that it matches ab, in contrast to its documentation.
_LINE = st.lists(_PARTS, min_size=1, max_size=5).map("".join).filter(lambda line: not re.search(r"[^/]\*\*", line))
_LINES = st.lists(_LINE, min_size=1, max_size=5)


@pytest.fixture(scope="module")
def forest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a repository with a tree of three levels of a few names."""
    folder = tmp_path_factory.mktemp("forest")
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    places = ["", "a/", "a/b/", "ab/a/", "b.d/", "b.d/a/b/"]
    files = [f"{place}{name}" for place in places for name in ("a.py", "b", "ab.py", "x")]
    grow(folder, dict.fromkeys([file for file in files if not any(p.startswith(f"{file}/") for p in places)], "x"))
    return folder


@settings(max_examples=80, deadline=None)
@given(_LINES)
def test_any_rules_mean_what_git_takes_them_for(forest: Path, lines: list[str]) -> None:
    (forest / ".gitignore").write_text("\n".join(lines))
    expected = listed_by_git(forest)
    if expected:
        assert sent(forest) == expected
    else:
        with pytest.raises(InvalidJobError, match="no file to send"):
            sent(forest)


def test_some_files_are_left_out_without_a_rule_and_a_rule_brings_them_back(tmp_path: Path) -> None:
    left_out = ["__pycache__/a.pyc", ".venv/bin/python", ".mypy_cache/x", "node_modules/x.js", ".env", "pkg/b.pyc"]
    grow(tmp_path, dict.fromkeys([*left_out, ".git/config", "train.py", "pkg/.git"], "x"))
    assert sent(tmp_path) == ["train.py"]
    grow(tmp_path, {".gitignore": "!.env\n!.git\n!.venv/"})
    assert sent(tmp_path) == [".env", ".gitignore", ".venv/bin/python", "train.py"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("line", ["*a" * 22 + "*b", "**/a/" * 15 + "b", "**/*a*a*a*a*a*a/" * 4 + "b"])
def test_no_rule_takes_exponential_time(line: str, tmp_path: Path) -> None:
    grow(tmp_path, {".gitignore": line, "a" * 200: "x", "a/" * 200 + "c": "x"})
    assert len(sent(tmp_path)) == 3


CREDENTIALS = [
    *(".env", ".env.local", "app/.env.production", ".netrc", ".aws/credentials", ".ssh/config", ".kube/config"),
    *("kubeconfig", "team.kubeconfig", "id_rsa", "keys/id_ed25519", "tls.key", ".git-credentials", ".npmrc", ".pypirc"),
    *(".docker/config.json", "credentials.json", "server.pem", ".huggingface/token", "terraform.tfstate"),
    *(".ENV", "Id_RSA", "keys/Server.PEM", "Credentials.JSON", ".SSH/config"),
]


def test_files_with_names_of_credentials_are_left_out_and_named(tmp_path: Path) -> None:
    grow(tmp_path, dict.fromkeys([*CREDENTIALS, ".env.example", "train.py", "data.log", "A.LOG"], "x"))
    grow(tmp_path, {".gitignore": "*.log"})
    left_out: list[str] = []
    assert [file.name for file in files_of(tmp_path, left_out)] == [".env.example", ".gitignore", "A.LOG", "train.py"]
    assert sorted(left_out) == sorted(name.partition("/")[0] if name[0] == "." else name for name in CREDENTIALS)


KEYS = {
    "pem": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n",
    "json": '{"private_key": "-----BEGIN PRIVATE KEY-----\\nMIIEv"}',
    "kubeconfig": "users:\n- user:\n    client-key-data: LS0tLS1CRUdJTg==\n",
}


@pytest.mark.parametrize("name", ["deep/notes.txt", ".env.example"])
@pytest.mark.parametrize("content", KEYS.values(), ids=KEYS)
def test_a_file_with_a_private_key_is_refused_unless_a_rule_includes_it(
    content: str, name: str, tmp_path: Path
) -> None:
    grow(tmp_path, {"train.py": "x", name: content})
    with pytest.raises(InvalidJobError, match=rf"{name} holds a private key, so nothing is sent") as raised:
        pack(tmp_path)
    rule = re.search(r"!\S+", raised.value.next_step)
    assert rule is not None
    grow(tmp_path, {".gitignore": rule[0]})
    assert name in pack(tmp_path).names
    grow(tmp_path, {".gitignore": "", name: 'HEADER = b"-----BEGIN PRIVATE KEY-----"'})
    assert name in pack(tmp_path).names, "a program that looks for keys"


def test_the_rules_of_another_repository_above_do_not_apply(tmp_path: Path) -> None:
    grow(tmp_path, {".gitignore": "*.py", "mine/train.py": "x", "mine/.git": "gitdir: elsewhere"})
    assert sent(tmp_path / "mine") == ["train.py"]
    (tmp_path / "mine" / ".git").unlink()
    (tmp_path / ".git").mkdir()
    with pytest.raises(InvalidJobError, match="no file to send"):
        sent(tmp_path / "mine")


def test_links_within_the_directory_are_sent_and_others_are_refused(tmp_path: Path) -> None:
    grow(tmp_path, {"work/pkg/a.py": "x", "secret": "x"})
    work = tmp_path / "work"
    (work / "link.py").symlink_to("pkg/a.py")
    os.mkfifo(work / "pipe")
    assert sent(work) == ["link.py", "pkg/a.py"]
    for target in ("/etc/hostname", "../secret", "pkg/../../secret"):
        (work / "out").unlink(missing_ok=True)
        (work / "out").symlink_to(target)
        with pytest.raises(InvalidJobError, match="symbolic link out of the directory") as raised:
            sent(work)
        assert raised.value.next_step
    grow(work, {".gitignore": "out"})
    assert "out" not in sent(work)


def test_too_many_files_are_refused_before_the_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 2)
    grow(tmp_path, dict.fromkeys(["a", "b"], "x"))
    assert len(sent(tmp_path)) == 2
    (tmp_path / "c").touch()
    with pytest.raises(InvalidJobError, match="more than 2 files"):
        sent(tmp_path)


def test_a_directory_that_is_too_large_names_its_largest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grow(tmp_path, {"train.py": "print()", "zeros.txt": "0" * 3_000_000})
    (tmp_path / "noise.bin").write_bytes(os.urandom(900_000))
    assert len(pack(tmp_path).data) < archive.MAX_BYTES
    (tmp_path / "more.bin").write_bytes(os.urandom(200_000))
    with pytest.raises(InvalidJobError, match="when compressed, at most 1,000,000 are allowed") as raised:
        pack(tmp_path)
    hint = raised.value.hint
    assert hint.index("noise.bin (900,") < hint.index("more.bin (200,") < hint.index("zeros.txt"), hint
    monkeypatch.setattr(files, "MAX_BYTES", 3_000_000)
    with pytest.raises(InvalidJobError, match="4,100,007 bytes, at most 3,000,000 are allowed") as raised:
        pack(tmp_path)
    assert "the largest files, in bytes: zeros.txt (3,000,000), noise.bin (900,000)" in raised.value.hint


def test_the_archive_depends_on_the_content_alone(tmp_path: Path) -> None:
    first, second = (grow(tmp_path / name, {"b.py": "x", "pkg/a.py": "y"}) for name in ("one", "two"))
    (second / "run.sh").touch()
    (second / "run.sh").unlink()
    os.utime(second / "b.py", (1, 1))
    assert pack(first) == pack(second)
    (second / "b.py").chmod(0o755)
    assert pack(first).digest != pack(second).digest
    with tarfile.open(fileobj=io.BytesIO(pack(second).data)) as made:
        assert [(entry.name, entry.mode) for entry in made] == [("b.py", 0o755), ("pkg/a.py", 0o644)]


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidJobError, match="there is no such directory"):
        existing(tmp_path / "nowhere")
    grow(tmp_path, {"train.py": "x"})
    found = files_of(tmp_path)
    (tmp_path / "train.py").unlink()
    with pytest.raises(InvalidJobError, match=r"train\.py cannot be read: No such file"):
        pack(tmp_path, found)
