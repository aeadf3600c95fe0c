"""A rank of ``ddprun`` beside one of torchrun, and beside plain Python: what a script can observe is the same.

The table of docs/reference/ddprun-and-torchrun.md lists the exceptions. A difference that it does not list fails
this test, and so does one that it lists and that does not exist any more.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import subprocess
import sys
import termios
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

BIN = Path(sys.executable).parent
DOCS = Path(__file__).parents[3] / "docs" / "reference" / "ddprun-and-torchrun.md"
FORKED, SPAWNED, INJECTED = "fork", "spawn", "injected"
WAYS = {"all": {FORKED, SPAWNED, INJECTED}, "forked": {FORKED, INJECTED}, "spawned": {SPAWNED}, "injected": {INJECTED}}
# Values that differ between two runs of one launcher; that there is one is compared.
VARYING = ("start.environ.MASTER_PORT", "start.environ.TORCHELASTIC_RUN_ID", "start.environ.TORCHELASTIC_ERROR_FILE")


def observed(command: list[str | Path], folder: Path, ranks: int) -> dict[str, Any]:
    """Run it at a terminal, and return the facts of its last rank by path, and which values the ranks share."""
    (person, terminal), file = pty.openpty(), os.open(folder / "probe.py", os.O_RDONLY)
    env = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        subprocess.run(
            [*map(str, command), "probe.py", "argument"], cwd=folder, env=env, check=True, timeout=300,
            stdin=file, capture_output=True, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0),
        )  # fmt: skip
    finally:
        for descriptor in (person, terminal, file):
            os.close(descriptor)
    found = [json.loads(folder.joinpath(f"facts-{rank}.json").read_text()) for rank in range(2 - ranks, 2)]
    drawn = [each.pop("drawn") for each in found]
    facts = dict(flat(found[-1])) | {f"equal.{name}": drawn[0][name] == drawn[-1][name] for name in drawn[0]}
    return facts | {name: "varies" for name in VARYING if name in facts}


def flat(facts: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def listed() -> dict[str, set[str]]:
    """Return the patterns of the table, and how ranks start that have the difference."""
    table = DOCS.read_text().partition("<!-- differences:begin -->")[2].partition("<!-- differences:end -->")[0]
    rows = [line.split("|")[1:3] for line in table.strip().splitlines()[2:]]
    return {pattern: WAYS[way.strip()] for names, way in rows for pattern in names.split("`")[1::2]}


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return, for each way to start ranks, the facts that differ: torchrun's value, and ddprun's."""
    folder = tmp_path_factory.mktemp("observed")
    shutil.copy(Path(__file__).with_name("probe.py"), folder)
    subprocess.run([BIN / "ddprun", "--copy-to", folder / "copy"], check=True, timeout=60)
    two: list[str | Path] = ["--nproc-per-node", "2"]
    interpreter = BIN.joinpath("ddprun").read_text().splitlines()[0].removeprefix("#!")
    python = observed([interpreter], folder, 1)
    expected = observed([interpreter, "-m", "torch.distributed.run", *two], folder, 2)
    assert python["start.process.terminal"] == "open" != expected["start.process.terminal"]
    commands: dict[str, list[str | Path]] = {
        FORKED: [BIN / "ddprun", *two],
        SPAWNED: [BIN / "ddprun", "--start", "spawn", *two],
        INJECTED: [interpreter, folder / "copy" / "bin" / "ddprun", *two],
    }
    found = {}
    for way, command in commands.items():
        facts = observed(command, folder, 2)
        names = sorted(expected.keys() | facts.keys())
        assert [name for name in names if ".modules." in name and name not in facts] == []
        pairs = {name: (expected.get(name), facts.get(name)) for name in names}
        found[way] = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return found


def test_a_rank_differs_from_one_of_torchrun_only_as_documented(
    differences: dict[str, dict[str, tuple[Any, Any]]],
) -> None:
    rows = listed()
    for way, found in differences.items():
        allowed = [pattern for pattern, ways in rows.items() if way in ways]
        unlisted = {
            name: pair for name, pair in found.items() if not any(fnmatchcase(name, pattern) for pattern in allowed)
        }
        assert unlisted == {}, f"differences of ranks by {way} that docs/reference/ddprun-and-torchrun.md does not list"
        vanished = [pattern for pattern in allowed if not any(fnmatchcase(name, pattern) for name in found)]
        assert vanished == [], f"{DOCS.name} lists differences for ranks by {way} that do not exist"


@pytest.mark.parametrize("how", ["auto", "spawn", "injected"])
def test_python_that_puts_no_folder_first_does_so_in_ranks_too(tmp_path: Path, how: str) -> None:
    """Without the flags, the table has no difference of ``sys.path``."""
    script, copy = tmp_path / "train.py", tmp_path / "copy"
    script.write_text("import sys; print(*sys.path, sep=':')\n")
    program, flags, first = BIN / "ddprun", ["--start", how], ""
    if how == "injected":
        subprocess.run([BIN / "ddprun", "--copy-to", copy], check=True, timeout=60)
        program, flags, first = copy / "bin" / "ddprun", [], f"{copy}/lib:"
    for options, env in ((["-P"], {}), (["-I"], {}), ([], {"PYTHONSAFEPATH": "1"})):
        given = os.environ | env

        def printed(*words: str | Path, options: list[str] = options, given: dict[str, str] = given) -> str:
            command = [sys.executable, *options, *map(str, words)]
            return subprocess.run(
                command, env=given, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120
            ).stdout

        alone = printed(script)
        assert not alone.startswith(str(tmp_path))
        assert printed(program, *flags, script) == first + alone
