"""`ddpjob run` as a program: its output, its exit codes, and what it refuses."""

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml

from ddpjob import __version__
from tests.cli.program import ROOT, Program, shell_job, with_volume


def test_successful_job_ends_with_0_and_prints_locations(ddpjob: Program) -> None:
    job = shell_job("echo", 'echo hello from $NODE_RANK; echo weights > "$DDPJOB_CHECKPOINT_DIR/w"', **with_volume())
    done = ddpjob("run", ddpjob.write(job), "--nodes", "2")
    assert done.code == 0, done
    assert "echo succeeded" in done.out
    assert "n0 | hello from 0" in done.out  # printed because this program reports no progress
    volume = ddpjob.state / "volumes" / "default" / "echo-checkpoints"
    assert str(volume) in done.out
    assert (volume / "w").read_text() == "weights\n"


def test_failed_job_ends_with_1_and_the_end_of_the_log(ddpjob: Program) -> None:
    job = shell_job("bad", 'echo "going $((40 + NODE_RANK))"; exit $NODE_RANK', numNodes=3)
    job["spec"]["restartPolicy"] = {"maxRestarts": 1}
    done = ddpjob("run", ddpjob.write(job))
    assert done.code == 1
    ending = done.out[done.out.index("bad failed in attempt 2: node_rank ") :].splitlines()
    assert "ended with exit code " in ending[0]
    assert ending[-1] in ("  going 41", "  going 42")
    assert "\n".join(ddpjob("why", "bad").out.splitlines()) in "\n".join(ending), "the same block"


def test_an_exception_is_said_by_the_program_and_then_once(ddpjob: Program) -> None:
    (ddpjob.folder / "train.py").write_text("raise ValueError('sample 17 is bad')\n")
    done = ddpjob("run", ddpjob.write(shell_job("bad", "python3 train.py", restartPolicy={"maxRestarts": 0})))
    assert done.code == 1 and done.out.count("sample 17 is bad") == 3, (
        "the line of the code, the exception, the verdict"
    )
    first = next(line for line in done.out.splitlines() if line.startswith("bad failed"))
    assert re.match(
        r"bad failed in attempt 1: \S*train\.py:1: ValueError: sample 17 is bad \(node_rank 0 \(bad-", first
    )


def test_json_is_one_object_per_line_and_ends_with_the_result(ddpjob: Program) -> None:
    job = shell_job("echo", r"printf 'a\033[31mb\n'", numNodes=2)
    done = ddpjob("run", ddpjob.write(job), "-o", "json")
    assert done.code == 0
    assert done.err == ""
    assert "\x1b" not in done.out
    # The last output of a node may be read after the status that ended its job.
    last_status = [o for o in done.objects[:-1] if o["type"] != "output"][-1]
    assert last_status["status"]["state"] == "Succeeded" and len(last_status["pods"]) == 2
    assert done.result["exitCode"] == 0
    assert done.result["status"]["state"] == "Succeeded"
    assert Path(done.result["logs"]).is_dir()
    assert any(o["type"] == "output" and o["line"] == "a\x1b[31mb" for o in done.objects)


@pytest.mark.parametrize("command", ["run nothing.yaml", "get nothing", "submit nothing.yaml --dry-run client"])
def test_an_error_is_on_standard_error_alone_also_with_json(ddpjob: Program, command: str) -> None:
    done = ddpjob(*command.split(), "-o", "json")
    assert "nothing" in done.is_refused()[0]
    assert done.out == ""


def test_a_job_from_standard_input_and_its_config_map_are_run(ddpjob: Program) -> None:
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "greeting"}, "data": {"GREETING": "xyzzy"}}
    job = shell_job("echo", "echo $GREETING", envFrom=[{"configMapRef": {"name": "greeting"}}])
    done = ddpjob("run", "-", stdin=yaml.safe_dump_all([config, job]))
    assert done.code == 0
    assert "n0 | xyzzy" in done.out


def test_first_lines_name_what_is_not_enforced_and_unset_volumes(ddpjob: Program) -> None:
    done = ddpjob("run", ddpjob.write(shell_job("echo", "true", data={"claimName": "pictures"})))
    assert done.out.count("not enforced") == 1
    assert "claim pictures is" in done.out
    assert "--volume pictures=DIR" in done.out
    assert "ddptrain" not in done.out


def test_arguments_after_two_dashes_follow_those_of_the_job(ddpjob: Program) -> None:
    job = shell_job("echo", 'echo "$0" "$@"', args=["train", "--lr", "1"])
    file = ddpjob.write(job)
    assert "n0 | train --lr 1 --lr 0.1" in ddpjob("run", file, "--", "--lr", "0.1").out
    done = ddpjob("run", file, "--fresh", "--set", "args=[train]", "--", "--lr", "0.1")
    assert "n0 | train --lr 0.1" in done.out, "--set replaces what is in the file"


def test_machine_without_ddprun_refuses_a_script_and_says_what_to_do(tmp_path: Path) -> None:
    """An environment with ``ddpjob`` and what it needs, but neither ddprun nor torchrun."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Of a directory that is named here, Python reads no .pth file: nothing else of this checkout can be imported.
    (packages / "ddpjob.pth").write_text(f"{ROOT / 'operator'}\n{sysconfig.get_path('purelib')}\n")
    (tmp_path / "train.py").write_text("")
    program = "import sys; from ddpjob.cli.main import main; sys.exit(main())"
    command = [str(tmp_path / "venv" / "bin" / "python"), "-c", program, "run", "train.py"]
    for launcher, todo in (("ddprun", "pip install ./trainer_app/ddprun"), ("torchrun", "pip install torch")):
        done = subprocess.run(
            [*command, "--launcher", launcher],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "DDPJOB_STATE_DIR": "state"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, "")
        error, _, following = done.stderr.splitlines()
        assert f"the job runs {launcher}, which is not installed here" in error
        assert todo in following and ("--launcher torchrun" in following) == (launcher == "ddprun")
        assert not (tmp_path / "state").exists()


MISTAKES: dict[str, tuple[list[str], str, str]] = {
    "an unknown option": (["--ndoes", "2"], "No such option", "--nodes"),
    "an unknown field": (["--set", "numNode=3"], 'no field "numNode"', "numNodes"),
    "a value that the API refuses": (["--set", "numNodes=-1"], "spec.numNodes", ""),
    "a name that the API refuses": (["--name", "Bad_Name"], "metadata.name", ""),
    "a claim that the job does not mount": (["--volume", "shred=."], "mounts no claim shred", "shared"),
    "a directory that is not there": (["--volume", "shared=/nowhere"], "no such directory", ""),
    "a volume without a directory": (["--volume", "shared"], "=DIR is missing", "CLAIM=DIR"),
    "a launcher of a file": (["--launcher", "ddprun"], "for a script only", "the command of a job file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_reported_in_three_lines_with_exit_code_2(ddpjob: Program, mistake: str) -> None:
    options, error, hint = MISTAKES[mistake]
    file = ddpjob.write(shell_job("echo", "true", checkpoint={"claimName": "shared"}))
    lines = ddpjob("run", file, *options).is_refused()
    assert error in lines[0]
    assert hint in lines[1]
    assert not ddpjob.state.exists()


@pytest.mark.parametrize(
    "arguments", [["run"], ["rnu"], ["--vresion"], ["logs"], ["wait", "a", "--for", "b"], ["get", "--all"]]
)
def test_usage_error_is_reported_in_three_lines(ddpjob: Program, arguments: list[str]) -> None:
    assert "--help" in ddpjob(*arguments).is_refused()[2]


def test_hostile_file_name_cannot_control_the_terminal(ddpjob: Program) -> None:
    assert "\x1b" not in "".join(ddpjob("run", "\x1b[2Jx.yaml").is_refused())


def test_unwritable_state_folder_is_reported_in_three_lines(ddpjob: Program, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = ddpjob.write(shell_job("echo", "true"))
    for command in (("run", file), ("get",)):
        assert "file" in ddpjob(*command, env={"DDPJOB_STATE_DIR": str(tmp_path / "file")}).is_refused()[0]


def test_missing_gpus_are_reported(ddpjob: Program) -> None:
    job = shell_job("gpu", "true", resources={"limits": {"nvidia.com/gpu": 4096}}, nprocPerNode=1)
    done = ddpjob("run", ddpjob.write(job))
    assert done.code == 0
    assert "!!! each node requests 4096 GPUs" in done.out


def test_help_imports_no_module_that_only_a_run_or_the_operator_needs() -> None:
    code = "import sys; from ddpjob.cli.main import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert imported & {"ddpjob", "typer"} == {"ddpjob", "typer"}
    late = {
        "aiohttp",
        "asyncio",
        "kopf",
        "kubernetes",
        "msgspec",
        "plotext",
        "prometheus_client",
        "pydantic",
        "rich",
        "torch",
        "uvloop",
    }
    assert imported & late == set()


def test_the_version_is_printed(ddpjob: Program) -> None:
    assert ddpjob("--version").out == f"ddpjob {__version__}\n"


def test_closed_output_suspends_the_job(ddpjob: Program) -> None:
    job = shell_job("chatty", 'trap "echo saved; exit 75" TERM; while :; do echo x; sleep 0.05; done')
    with ddpjob.started("run", ddpjob.write(job)) as process:
        assert process.stdout is not None and process.stderr is not None
        while "n0 | x" not in process.stdout.readline():
            pass
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == ""
    assert ddpjob.job("chatty")["status"]["state"] == "Suspended"
    assert "saved" in ddpjob.until_log("chatty", "saved")
