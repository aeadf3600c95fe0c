"""Standard input and output of ``ddpjob``: closed, full, without a reader, or a pipe in place of a file."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from tests.cli.program import Done, Program, shell_job

PROGRAM = (sys.executable, "-m", "ddpjob.cli.main")  # Python opens its standard streams when it starts


def test_ctrl_c_while_the_program_is_imported_is_no_traceback(tmp_path: Path) -> None:
    """A module that is imported at the start sends the signal."""
    (tmp_path / "typer.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT); signal.pause()")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from ddpjob.cli import start; sys.exit(start())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def in_a_shell(ddpjob: Program, *arguments: str, streams: str) -> Done:
    """Run a command whose standard streams a shell redirects."""
    words = ["sh", "-c", f'"$@" {streams}', "sh", *PROGRAM, *arguments]
    made = subprocess.run(
        words, cwd=ddpjob.folder, env=ddpjob.environment, capture_output=True, text=True, timeout=60, check=False
    )
    return Done(made.returncode, made.stdout, made.stderr)


def test_output_that_cannot_be_written_is_an_error_of_three_lines(ddpjob: Program) -> None:
    lines = in_a_shell(ddpjob, "init", streams="> /dev/full").is_refused(1)
    assert lines[0] == "error: standard output cannot be written: No space left on device"


def test_closed_streams_do_not_prevent_the_command(ddpjob: Program) -> None:
    ddpjob("run", ddpjob.write(shell_job("echo", "true")))
    done = in_a_shell(ddpjob, "delete", "echo", streams="<&- >&-")
    assert (done.code, done.err) == (0, "")
    assert ddpjob("get", "echo").code == 2


def test_command_whose_reader_is_gone_ends_as_by_sigpipe(ddpjob: Program) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        done = subprocess.run(
            [*PROGRAM, "init"], env=ddpjob.environment, stdout=gone, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_job_is_read_from_a_named_pipe(ddpjob: Program) -> None:
    """A shell makes one for `ddpjob validate <(helm template …)`."""
    text = Path(ddpjob.write(shell_job("echo", "true"))).read_text()
    pipe = ddpjob.folder / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(text,), daemon=True)
    writer.start()
    assert ddpjob("validate", str(pipe)).out == f"{pipe}: 1 DDPJob, valid\n"
    writer.join(60)


def test_without_a_command_the_help_is_printed(ddpjob: Program) -> None:
    done = ddpjob()
    assert (done.code, done.err) == (0, "")
    assert done.out == ddpjob("--help").out
