"""`get`, `logs` and `delete` of earlier runs."""

import shutil
import zipfile
from pathlib import Path

import pytest
import yaml

from ddpjob.api.pod_view import pod_view
from ddpjob.cli.logs import _announced, _seconds, shown
from ddpjob.client.job import DDPJob
from ddpjob.client.log_lines import log_line
from ddpjob.local.state import StateFolder
from tests.cli.program import Program, shell_job, with_volume

# The failing node waits until the others have printed: they are stopped with it.
SCRIPT = r"""
printf "node $NODE_RANK of attempt $DDPJOB_ATTEMPT\n\033[2J\rsecond line\n"
cd "$DDPJOB_CHECKPOINT_DIR"
touch "$DDPJOB_ATTEMPT-$NODE_RANK"
[ $NODE_RANK = 2 ] || exec sleep 600
until [ -e $DDPJOB_ATTEMPT-0 ] && [ -e $DDPJOB_ATTEMPT-1 ]; do sleep 0.05; done
exit 3
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Run a job of three nodes in which the last node fails twice. The tests only read its records."""
    ddpjob = Program(tmp_path_factory.mktemp("failed"))
    job = shell_job("bad", SCRIPT, numNodes=3, restartPolicy={"maxRestarts": 1}, **with_volume())
    assert ddpjob("run", ddpjob.write(job), "-o", "json").code == 1
    return ddpjob


def test_a_narrow_terminal_cuts_long_texts_with_a_mark_and_shows_every_column(ddpjob: Program) -> None:
    name = "a-job-with-a-name-of-some-length"
    assert ddpjob("run", ddpjob.write(shell_job(name, "true"))).code == 0
    with ddpjob.on_terminal("get", columns=75) as terminal:
        assert terminal.ends() == 0
        _, header, row = [line for line in terminal().splitlines() if line.strip()]
    assert header.split()[0] == "NAME" and header.split()[-1] == "AGE", header
    assert len(header.split()) == 7 and name in row and "…" in row, row


def test_logs_show_node_0_and_the_failed_node_of_the_last_attempt(failed: Program) -> None:
    lines = failed("logs", "bad").out.splitlines()
    assert lines == ["n0 node 0 of attempt 2", "n0 second line", "n2 node 2 of attempt 2", "n2 second line"]


def test_no_command_shows_the_token_of_an_attempt(failed: Program) -> None:
    """The record has the pods with their variables; the folder is the user's own."""
    pods = StateFolder(failed.state).job("default", "bad").pods()
    tokens = {pod_view(pod).token for pod in pods}
    assert len(tokens) in (1, 2) and all(len(token) == 64 for token in tokens)
    assert failed("bundle", "bad", "--file", "bad.zip", "--logs").code == 0
    with zipfile.ZipFile(failed.folder / "bad.zip") as bundle:
        shown = [bundle.read(name).decode() for name in bundle.namelist()]
    commands = [
        ["get", "bad"], ["get", "bad", "-o", "yaml"], ["get", "bad", "-o", "json"], ["why", "bad"],
        ["describe", "bad"], ["describe", "bad", "-o", "json"], ["logs", "bad"], ["get"],
    ]  # fmt: skip
    for command in commands:
        done = failed(*command)
        assert done.out, command
        shown += [done.out, done.err]
    for token in tokens:
        assert not any(token in text for text in shown)
    assert (failed.state / "jobs/default/bad").stat().st_mode & 0o777 == 0o700


def test_logs_can_be_selected_by_node_attempt_and_length(failed: Program) -> None:
    assert failed("logs", "bad", "--all").out.count("attempt 2") == 3
    assert failed("logs", "bad", "--node", "1").out.splitlines() == ["n1 node 1 of attempt 2", "n1 second line"]
    assert failed("logs", "bad", "--attempt", "1", "--tail", "1").out.splitlines() == [
        "n0 second line",
        "n2 second line",
    ]
    assert failed("logs", "bad", "--tail", "0").out == ""
    assert failed("logs", "bad", "--rank", "1", "--rank", "2", "--tail", "1").out.splitlines() == [
        "n1 second line",
        "n2 second line",
    ]


def test_each_node_has_a_colour_of_its_own_on_a_terminal(failed: Program) -> None:
    with failed.on_terminal("logs", "bad", "--all", "--tail", "1") as terminal:
        assert terminal.ends() == 0
        lines = [line for line in terminal().splitlines() if line.endswith("second line")]
    assert lines == [f"\x1b[{colour}mn{node}\x1b[0m second line" for node, colour in enumerate((36, 33, 32))]


@pytest.mark.parametrize(
    ("found", "is_any", "said"),
    [(3, True, ""), (2, True, ", attempt 2: attempt 3 has no logs"), (2, False, ""), (None, True, "")],
)
def test_logs_say_where_they_are_and_that_they_are_of_an_older_attempt(
    capsys: pytest.CaptureFixture[str], found: int | None, is_any: bool, said: str
) -> None:
    job = DDPJob.from_manifest(shell_job("bad", "true") | {"status": {"attempt": 3}})
    lines = [] if found is None else [log_line(0, found, "first", 1), log_line(0, found, "second", 1)]
    assert list(_announced(iter(lines), job, "cluster a, namespace b", is_any=is_any)) == lines
    assert capsys.readouterr().err == f"logs of bad on cluster a, namespace b{said}:\n"


def test_lines_begin_with_the_rank_that_printed_them() -> None:
    by_ddprun = log_line(1, 1, "[n1r3] loss 0.5", 2)
    assert shown(by_ddprun, several=True) == "n1r3 loss 0.5"
    by_torchrun = log_line(1, 1, "[default1]:loss 0.5", 2)
    assert (by_torchrun.rank, shown(by_torchrun, several=True)) == (3, "n1 [default1]:loss 0.5")
    alone = log_line(0, 1, "loss", 2)
    assert (alone.rank, shown(alone, several=False)) == (None, "loss")


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("10m", 600), ("1h30m", 5400), ("1d2s", 86_402)])
def test_durations(text: str, seconds: int) -> None:
    assert _seconds(text) == seconds


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["bad", "--since", "5m"], "cannot be selected on this machine", ""),
        (["bad", "--since", "soon"], "no duration", ""),
        (["bad", "--node", "1", "--rank", "1"], "exclude each other", ""),
        (["bda"], "there is no job bda", 'did you mean "bad"?'),
        (["bad", "--node", "7"], "no logs of node 7", "0, 1, 2"),
        (["bad", "--attempt", "9"], "no logs of attempt 9", "1, 2"),
        (["bad", "-n", "other"], "there is no job bad in namespace other", ""),
    ],
)
def test_logs_that_there_are_not_name_those_that_exist(
    failed: Program, arguments: list[str], error: str, hint: str
) -> None:
    lines = failed("logs", *arguments).is_refused()
    assert error in lines[0]
    assert hint in lines[1]


def test_get_has_more_columns_on_request(failed: Program) -> None:
    header, row = failed("get", "bad", "-o", "wide").out.splitlines()
    assert header.split()[0] == "NAMESPACE"
    assert row.split()[-2:] == ["3", "MaxRestartsExceeded"]
    assert yaml.safe_load(failed("get", "bad", "-o", "yaml").out)["metadata"]["name"] == "bad"


def test_get_without_jobs_says_so(ddpjob: Program) -> None:
    assert "one job" in ddpjob("get", "one", "-l", "team=a").is_refused()[0]
    done = ddpjob("get")
    assert (done.code, done.out) == (0, "")
    assert "no jobs" in done.err


def test_one_damaged_record_does_not_hide_the_others(ddpjob: Program) -> None:
    for name in ("one", "two"):
        ddpjob("run", ddpjob.write(shell_job(name, "true")))
    record = ddpjob.state / "jobs" / "default" / "one" / "job.json"
    record.write_text('{"job": {')
    done = ddpjob("get")
    assert "two" in done.out
    assert done.code == 2
    assert "damaged" in done.err
    assert ddpjob("delete", "one").code == 0
    assert ddpjob("get").code == 0


def test_delete_keeps_the_volume_without_the_option(ddpjob: Program) -> None:
    file = ddpjob.write(shell_job("bad", "exit 3", restartPolicy={"maxRestarts": 0}, **with_volume()))
    assert ddpjob("run", file).code == 1
    volume = ddpjob.state / "volumes" / "default" / "bad-checkpoints"
    done = ddpjob("delete", "bad")
    assert str(volume) in done.out
    assert volume.is_dir()
    assert not (ddpjob.state / "jobs" / "default" / "bad").exists()
    ddpjob("run", file, "--set", "suspend=true")
    assert ddpjob("delete", "bad", "--volumes").code == 0
    assert not volume.exists()
    ddpjob("run", file, "--set", "checkpoint.claimRetention=Delete")
    assert "bad-checkpoints deleted" in ddpjob("delete", "bad").out, "as in a cluster"
    assert not volume.exists()


def test_delete_asks_on_a_terminal_and_says_where_the_job_is(ddpjob: Program) -> None:
    ddpjob("run", ddpjob.write(shell_job("one", "true")))
    for answer, code in (("n", 1), ("y", 0)):
        with ddpjob.on_terminal("delete", "one") as terminal:
            terminal.answer("delete one (this machine)?", answer)
            assert terminal.ends() == code
        assert ddpjob("get", "one").code == (2 if code == 0 else 0)


@pytest.mark.parametrize("part", ["jobs/default/echo", "jobs/default", "volumes/default/echo-checkpoints"])
def test_delete_does_not_follow_links_out_of_the_state_folder(ddpjob: Program, tmp_path: Path, part: str) -> None:
    ddpjob("run", ddpjob.write(shell_job("echo", "true", **with_volume())))
    elsewhere = tmp_path / "elsewhere"
    place = ddpjob.state / part
    shutil.move(place, elsewhere)
    (elsewhere / "precious").write_text("")
    place.symlink_to(elsewhere)
    assert "symbolic link" in ddpjob("delete", "echo", "--volumes").is_refused()[0]
    assert (elsewhere / "precious").exists()


def test_delete_keeps_the_targets_of_links_in_a_volume(ddpjob: Program, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("")
    ddpjob("run", ddpjob.write(shell_job("echo", f'ln -s {precious} "$DDPJOB_CHECKPOINT_DIR/link"', **with_volume())))
    assert ddpjob("delete", "echo", "--volumes").code == 0
    assert (precious / "data").exists()
