"""With PyTorch: a user's own script, and the commands that --help shows."""

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.program import ROOT, Done, Program

SCRIPT = """
import argparse
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--power", type=int)
power = parser.parse_args().power
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1) ** power])
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(f"sum {total.item():.0f} over {dist.get_world_size()} ranks", flush=True)
dist.destroy_process_group()
"""


def test_script_runs_under_torchrun_on_several_nodes(ddpjob: Program, tmp_path: Path) -> None:
    script = tmp_path / "sum_up.py"
    script.write_text(SCRIPT)
    done = ddpjob("run", "sum_up.py", "--nodes", "2", "--nproc", "2", "--", "--power", "2", cwd=tmp_path)
    assert done.code == 0, done
    assert "n0 | sum 30 over 4 ranks" in done.out
    assert ddpjob.job("sum-up")["spec"]["numNodes"] == 2


@pytest.mark.parametrize(
    ("lesson", "said"), [("env", "GROUP_RANK 0 0 1 1"), ("restart", "finished after step 10, 1 restart")]
)
def test_lesson_runs_as_a_job(ddpjob: Program, lesson: str, said: str) -> None:
    done = ddpjob("run", str(ROOT / "manifests" / "examples" / "lessons" / f"{lesson}.yaml"))
    assert done.code == 0, done
    assert said in re.sub(" +", " ", ddpjob("logs", f"lesson-{lesson}", "--all").out)


def example(ddpjob: Program, *verb: str) -> list[str]:
    """Return the example command of a help page."""
    page = ddpjob(*verb, "--help").out
    found = re.search(r"Example:\n +ddpjob (.+)", page)
    assert found, page
    return shlex.split(found[1])


def test_every_example_of_the_help_works(ddpjob: Program) -> None:
    def run(*verb: str) -> Done:
        done = ddpjob(*example(ddpjob, *verb), cwd=ROOT)
        assert done.code == 0, (verb, done)
        return done

    assert example(ddpjob) == example(ddpjob, "run")
    trained = run("run")
    assert "accuracy" in trained.out
    assert "training loss by step" in trained.out
    assert "┤" in trained.out
    checkpoint = re.search(r"^  checkpoint +(\S+)", trained.out, re.MULTILINE)
    assert checkpoint and Path(checkpoint[1]).is_file()
    assert "mnist-cpu" in run("get").out
    assert "n0 " in run("logs").out
    assert "mnist-cpu deleted" in run("delete").out
    assert Path(checkpoint[1]).is_file()
