"""`get`, `logs` and `delete` of earlier runs."""

import shutil
from pathlib import Path

import pytest
import yaml

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


def test_logs_show_node_0_and_the_failed_node_of_the_last_attempt(failed: Program) -> None:
    lines = failed("logs", "bad").out.splitlines()
    assert lines == ["n0 node 0 of attempt 2", "n0 second line", "n2 node 2 of attempt 2", "n2 second line"]


def test_logs_can_be_selected_by_node_attempt_and_length(failed: Program) -> None:
    assert failed("logs", "bad", "--all").out.count("attempt 2") == 3
    assert failed("logs", "bad", "--node", "1").out.splitlines() == ["n1 node 1 of attempt 2", "n1 second line"]
    assert failed("logs", "bad", "--attempt", "1", "--tail", "1").out.splitlines() == [
        "n0 second line",
        "n2 second line",
    ]
    assert failed("logs", "bad", "--tail", "0").out == ""


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["bda"], "there is no job bda", 'did you mean "bad"?'),
        (["bad", "--node", "7"], "no logs of node 7", "0, 1, 2"),
        (["bad", "--attempt", "9"], "no logs of attempt 9", "1, 2"),
        (["bad", "-n", "other"], "there is no job bad in namespace other", ""),
    ],
)
def test_missing_logs_name_those_that_exist(failed: Program, arguments: list[str], error: str, hint: str) -> None:
    lines = failed("logs", *arguments).is_refused()
    assert error in lines[0]
    assert hint in lines[1]


def test_get_has_the_columns_of_kubectl(failed: Program) -> None:
    header, row = failed("get").out.splitlines()
    assert header.split() == ["NAME", "STATE", "NODES", "PROGRESS", "LOSS", "RESTARTS", "AGE"]
    assert row.split()[:2] == ["bad", "Failed"]
    header, row, *time = failed("get", "bad", "-o", "wide").out.splitlines()
    assert header.split()[0] == "NAMESPACE"
    assert row.split()[-2:] == ["3", "MaxRestartsExceeded"]
    assert len(time) == 2 and time[1].startswith("time: ") and time[1].endswith("= training / (all - queued - stopped)")
    assert yaml.safe_load(failed("get", "bad", "-o", "yaml").out)["metadata"]["name"] == "bad"


def test_get_without_jobs_says_so(ddpjob: Program) -> None:
    done = ddpjob("get")
    assert (done.code, done.out) == (0, "")
    assert "no jobs" in done.err


def test_one_damaged_record_does_not_hide_the_others(ddpjob: Program) -> None:
    for name in ("one", "two"):
        ddpjob("run", ddpjob.write(shell_job(name, "true")))
    record = ddpjob.state / "jobs" / "default" / "one" / "cluster.json"
    record.write_text('{"objects": [[')
    done = ddpjob("get")
    assert "two" in done.out
    assert done.code == 2
    assert "damaged" in done.err
    assert ddpjob("delete", "one").code == 0
    assert ddpjob("get").code == 0


def test_jobs_of_one_name_in_two_namespaces_need_the_namespace(ddpjob: Program) -> None:
    job = shell_job("echo", "true")
    ddpjob("run", ddpjob.write(job))
    ddpjob("run", ddpjob.write(job), "--set", "metadata.namespace=other")
    assert ddpjob("get").out.splitlines()[0].split()[0] == "NAMESPACE"
    assert "--namespace default" in ddpjob("delete", "echo").is_refused()[2]
    assert ddpjob("delete", "echo", "-n", "other").code == 0
    assert "NAMESPACE" not in ddpjob("get").out


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
