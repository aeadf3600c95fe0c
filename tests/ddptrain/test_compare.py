"""``compare`` finds all methods and numbers of ranks equal, and detects common errors of data-parallel training."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddprun.checkpoint_files import newest_valid
from ddprun.errors import Stopped, UsageError
from ddprun.signals import STOP_SIGNALS, StopFlag, wakeup_pipe
from ddptrain.cli import main
from ddptrain.experiments import trials
from ddptrain.experiments.trials import Trials
from ddptrain.flags import parse_worlds
from tests.ddptrain.runs import PATIENCE, ForkServer, wait_until

NUMBER = r"\d\.\de[-+]\d\d"


def compare(
    ddptrain: ForkServer, idx: Path, *flags: object, code: int = 0, mutant: str = ""
) -> dict[str, list[dict[str, Any]]]:
    """Run the comparison and return its proofs by what they compare."""
    argv = ("compare", "--data", "idx", "--data-dir", idx, "--json", *flags)
    run = ddptrain.start(*argv, mutant=mutant)
    wait_until(lambda: run.ended, "the comparison", 4 * PATIENCE)
    assert run.wait() == code, run.output()
    answer = json.loads(run.output().splitlines()[-1])
    assert answer["holds"] == (code == 0)
    found: dict[str, list[dict[str, Any]]] = {}
    for proof in answer["proofs"]:
        found.setdefault(proof["what"], []).append(proof)
    return found


def check_losses(ddptrain: ForkServer, idx: Path, steps: int, worlds: tuple[int, ...], ways: tuple[str, ...]) -> None:
    """Run the comparison of losses, and check that each recipe with each method at each number of ranks is in it."""
    flags = ("--worlds", ",".join(map(str, worlds)), "--ways", ",".join(ways), "--steps", steps)
    found = compare(ddptrain, idx, "--checks", "losses", *flags)
    proofs = found[f"loss of {steps} steps, float64"]
    subjects = [f"{recipe}, {way}, {n} ranks" for recipe in ("muon", "adamw", "sgd") for n in worlds for way in ways]
    assert [proof["subject"] for proof in proofs] == subjects
    assert all(float(proof["measured"]) <= 1e-12 for proof in proofs)
    assert len(found["samples used, as recorded by the ranks"]) == len(subjects) + 3
    assert len(found["last evaluation, computed again, float64"]) == len(subjects) + 3


def test_losses_in_float64_equal_one_process(ddptrain: ForkServer, idx: Path) -> None:
    # The other ways give the gradients of one process (test_gradient_sync.py); --zero also divides the optimizer.
    check_losses(ddptrain, idx, 27, (2,), ("ddp", "zero"))


def test_bitwise_gives_one_digest_at_1_to_3_ranks_and_for_a_changing_number(ddptrain: ForkServer, idx: Path) -> None:
    found = compare(ddptrain, idx, "--worlds", "1,2,3", "--checks", "bits", "--steps", 18)
    proofs = found["weights' SHA-256, bitwise"]
    assert [p["subject"] for p in proofs] == ["2 ranks", "3 ranks", "3→2→1→3"]
    assert len({p["measured"] for p in proofs}) == 1


@pytest.mark.soak
def test_first_gradients_and_resumed_runs_are_equal_with_every_method(ddptrain: ForkServer, idx: Path) -> None:
    found = compare(ddptrain, idx, "--worlds", "1,2", "--checks", "gradients,resume", "--steps", 9)
    assert len(found["first gradient, float32"]) == 6
    assert len(found["weights' SHA-256, resumed"]) == 5


@pytest.mark.parametrize(
    ("mutants", "flags", "noticed"),
    [
        (  # each of the three changes another measurement
            ("weighting_dropped", "accuracy_counts_one_sample_too_many", "same_order_every_epoch"),
            ("--checks", "losses", "--ways", "ddp", "--steps", 18),
            {
                "loss": NUMBER,
                "last evaluation": NUMBER,
                "samples": "two epochs have the same sample at 100% of their positions",
            },
        ),
        (
            ("padding_counted_in_training",),
            ("--checks", "losses", "--ways", "bucketed", "--steps", 9),
            {"samples": r"\d+ training samples not once in an epoch"},
        ),
        (("divided_twice",), ("--checks", "gradients", "--ways", "manual"), {"first gradient": NUMBER}),
    ],
)
def test_error_injected_into_the_training_makes_the_comparison_fail(
    ddptrain: ForkServer, idx: Path, mutants: tuple[str, ...], flags: tuple[object, ...], noticed: dict[str, str]
) -> None:
    found = compare(ddptrain, idx, "--worlds", "1,2", *flags, code=1, mutant=",".join(mutants))
    failed = [(p["what"], p["measured"]) for proofs in found.values() for p in proofs if not p["holds"]]
    for begin, measured in noticed.items():
        assert any(what.startswith(begin) and re.fullmatch(measured, said) for what, said in failed), found


def test_test_sample_evaluated_twice_fails_the_run(ddptrain: ForkServer, idx: Path) -> None:
    argv = ("launch", "--nproc-per-node", 2, "--data", "idx", "--data-dir", idx)
    run = ddptrain.run(*argv, code=1, mutant="padding_counted_in_evaluation")
    assert "70 of 70 samples were not evaluated exactly once" in run.output()


def test_compare_reads_settings_from_file_and_environment_and_defaults_to_digits(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    (tmp_path / "compare.yaml").write_text("data: idx\nmodel: cnn\n")
    env = {"DDPJOB_DATA_DIR": idx, "DDPTRAIN_MODEL": "mlp"}
    for folder, flags, data in (("file", ("--config", tmp_path / "compare.yaml"), "idx"), ("default", (), "digits")):
        kept = tmp_path / folder
        argv = ("compare", "--worlds", "1,2", "--ways", "manual", "--checks", "gradients", "--keep", kept)
        ddptrain.run(*argv, *flags, env=env)
        found = newest_valid(kept / "gradients-1" / "checkpoints", lambda path, reason: None)
        assert found is not None
        assert (found[0].manifest["config"]["data"], found[0].manifest["config"]["model"]) == (data, "mlp")


def test_one_number_of_ranks_compares_nothing_and_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--worlds", "1"]) == 2
    assert "--worlds 1 compares nothing" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0", "2;3", "1,many", "1000", "²"])
def test_malformed_list_of_worlds_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--worlds"):
        parse_worlds(text)


def test_keep_directory_that_cannot_be_created_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["compare", "--keep", str(tmp_path / "file")]) == 2
    assert "cannot be made: File exists" in capsys.readouterr().err


def test_stop_at_the_moment_when_a_trial_has_ended_ends_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def then_stop(wait: Callable[..., object]) -> Callable[..., object]:
        def waited(*arguments: int) -> object:
            wait(*arguments)
            raise Stopped("a signal came", saved=False)

        return waited

    some_trials = Trials(tmp_path, lambda argv: 0)
    for name in ("wait4", "waitid"):
        monkeypatch.setattr(trials.os, name, then_stop(getattr(os, name)))
    with pytest.raises(Stopped):
        some_trials.run((), tmp_path / "trial")


def test_stop_during_a_fork_ends_the_comparison(tmp_path: Path) -> None:
    def stop_once() -> None:
        if stops:
            os.kill(stops.pop(), signal.SIGTERM)
            select.select([pipe], [], [], PATIENCE)  # until a thread has taken it

    stops, pipe = [os.getpid()], wakeup_pipe()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    some_trials, end = Trials(tmp_path, lambda argv: 0), threading.Event()
    thread = threading.Thread(target=end.wait)  # which may get the signal
    thread.start()
    os.register_at_fork(after_in_parent=stop_once)
    try:
        with pytest.raises(Stopped), StopFlag.installed().interruptible("compare"):
            some_trials.run((), tmp_path / "trial")
    finally:
        end.set()
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert not stops


@pytest.mark.parametrize("verb", [("compare", "--worlds", "1,2"), ("bench", "--data", "digits", "--parts", "accuracy")])
def test_stopped_comparison_leaves_no_files_and_no_processes(ddptrain: ForkServer, verb: tuple[str, ...]) -> None:
    run = ddptrain.start(*verb)
    folders = f"ddptrain-{verb[0]}-*"  # in the directory for temporary files of all runs of this session
    wait_until(lambda: list(run.log.parent.glob(f"{folders}/*/*")), "the first trial")
    trials = run.ranks().values()
    run.stop()
    assert run.wait() == 75, run.output()
    assert f"stopped by a signal in phase {verb[0]}" in run.output()
    assert not list(run.log.parent.glob(folders))
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in trials), "the trial to end")
