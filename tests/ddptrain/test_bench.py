"""``bench`` measures whole commands as users start them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddptrain.data.mnist import load
from ddptrain.experiments.baselines import tutorial
from ddptrain.experiments.bench import tables
from ddptrain.experiments.trials import TrialFailed, speed
from tests.ddptrain.runs import PATIENCE, ForkServer, wait_until
from tests.ddptrain.synthetic import write_idx

# The part throughput takes the best of several turns, and the tutorial's trainer may need many epochs. What the tests
# check is the same after one turn and two epochs.
SHORT = """
from ddptrain.experiments import bench
bench._TURNS, bench._LOOP_STEPS, bench._TUTORIAL_EPOCHS = 1, 20, 2
"""


@pytest.mark.soak
def test_accuracy_speed_and_cpu_time_of_whole_commands_are_measured(ddptrain: ForkServer) -> None:
    argv = ("bench", "--data", "digits", "--seeds", 1, "--worlds", "1,2", "--json", "--parts", "accuracy")
    run = ddptrain.start(*argv)
    wait_until(lambda: run.ended, "the benchmark", 4 * PATIENCE)
    assert run.wait() == 0, run.output()
    results = json.loads(run.output().splitlines()[-1])
    assert [row["worldSize"] for row in results["accuracy"]] == [1, 2]
    for row in results["accuracy"]:
        assert row["seeds"] == 1
        assert 0.8 < row["worst"] <= row["mean"] <= row["best"]
        assert 0 < row["warmSeconds"]["fastest"] <= row["warmSeconds"]["median"]
        assert row["coldSeconds"] > 1, "a new interpreter imports torch"
        assert row["cpuSeconds"]["median"] > 0
        assert row["samplesPerSecondPerRank"] * row["worldSize"] == row["samplesPerSecond"] > 0
    shown = tables(results)
    assert shown.count("\n| ") == 2
    assert f"{results['accuracy'][0]['mean']:.2%}" in shown


@pytest.mark.soak
def test_recipes_are_compared_in_one_run_with_the_earlier_one_and_pytorchs_example(
    ddptrain: ForkServer, idx: Path
) -> None:
    argv = ("bench", "--data", "idx", "--data-dir", idx, "--seeds", 1, "--worlds", 1, "--parts", "recipes", "--json")
    run = ddptrain.start(*argv, env={"DDPTRAIN_BATCH_SIZE": 37})
    wait_until(lambda: run.ended, "the benchmark", 4 * PATIENCE)
    assert run.wait() == 0, run.output()
    results = json.loads(run.output().splitlines()[-1])
    *recipes, example = results["recipes"]
    assert [row["recipe"] for row in recipes] == ["default", "two epochs", "earlier"]
    earlier = recipes[-1]
    assert (earlier["warmShare"], earlier["coldShare"]) == (1, 1)
    for row in recipes:
        assert (row["worldSize"], row["seeds"]) == (1, 1)
        assert 0 <= row["worst"] <= row["mean"] <= 1
        assert row["coldSeconds"]["median"] > 1, "a new interpreter imports torch"
        assert row["warmShare"] == row["warmSeconds"]["median"] / earlier["warmSeconds"]["median"]
    assert example["coldSeconds"] > 1
    assert 0 <= example["accuracy"] <= 1
    assert tables(results).count("\n| ") == 4


def test_bench_reads_settings_from_a_file_and_the_environment(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    (tmp_path / "bench.yaml").write_text("data: idx\nbatch-size: 50\n")
    env = {"DDPJOB_DATA_DIR": idx, "DDPTRAIN_BATCH_SIZE": 37}
    argv = ("bench", "--config", tmp_path / "bench.yaml", "--seeds", 1, "--worlds", 1, "--sync", "manual", "--json")
    results = json.loads(ddptrain.run(*argv, env=env).output().splitlines()[-1])
    assert results["of"] == {"data": "idx", "globalBatch": 37}


def test_speed_is_compared_with_plain_loops_on_the_same_data(ddptrain: ForkServer, idx: Path) -> None:
    argv = ("bench", "--data", "idx", "--data-dir", idx, "--parts", "throughput,tutorial", "--json")
    run = ddptrain.start(*argv, env={"DDPTRAIN_BATCH_SIZE": 10}, first=SHORT)
    wait_until(lambda: run.ended, "the benchmark", 4 * PATIENCE)
    assert run.wait() == 0, run.output()
    results = json.loads(run.output().splitlines()[-1])
    assert [(row["model"], row["shift"]) for row in results["throughput"]] == [
        ("cnn", 1), ("cnn", 0), ("mlp", 1), ("mlp", 0),
    ]  # fmt: skip
    for row in results["throughput"]:
        assert row["times"] == row["samplesPerSecond"] / row["dataLoaderLoop"] > 0
    race = results["tutorial"]
    assert race["times"] == race["theirs"]["seconds"] / race["ours"]["seconds"] > 0
    assert len(race["theirs"]["accuracies"]) == race["theirs"]["epochs"] > 0
    shown = tables(results)
    assert f"| cnn | ±1 pixel | {results['throughput'][0]['samplesPerSecond']:,.0f} |" in shown
    assert f"| mlp | none | {results['throughput'][3]['samplesPerSecond']:,.0f} |" in shown
    assert f"{race['theirs']['epochs']} epochs" in shown


def test_ways_to_average_gradients_are_compared(ddptrain: ForkServer, idx: Path) -> None:
    argv = ("bench", "--data", "idx", "--data-dir", idx, "--sync", "manual,bucketed,ddp", "--worlds", 2, "--seeds", 1)
    run = ddptrain.run(*argv, "--json", env={"DDPTRAIN_BATCH_SIZE": 37})
    results = json.loads(run.output().splitlines()[-1])
    rows = results["sync"]
    assert [row["sync"] for row in rows] == ["manual", "bucketed", "ddp"] and rows[0]["times"] == 1
    assert max(row["mean"] for row in rows) - min(row["mean"] for row in rows) < 0.03, "they compute the same gradients"
    assert tables(results).count("\n| ") == 3


def test_failed_cold_run_is_reported_with_the_end_of_its_output(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "ddptrain"  # forked commands have imported the package already
    broken.mkdir()
    (broken / "__init__.py").write_text("raise SystemExit('no interpreter starts this')")
    argv = ("bench", "--data", "idx", "--data-dir", idx, "--seeds", 1, "--worlds", 1, "--parts", "accuracy")
    output = ddptrain.run(*argv, env={"PYTHONPATH": tmp_path, "DDPTRAIN_BATCH_SIZE": 37}, code=1).output()
    assert "error: `ddptrain train --data idx" in output
    assert "ended with 1, not 0:\nno interpreter starts this\n" in output
    assert "Traceback" not in output


def test_data_set_of_a_single_batch_is_refused(ddptrain: ForkServer, idx: Path) -> None:
    argv = ("bench", "--data", "idx", "--data-dir", idx, "--seeds", 1, "--worlds", 1, "--sync", "manual")
    assert "use a smaller --batch-size" in ddptrain.run(*argv, code=1).output()


def write_times(folder: Path, times: list[float]) -> Path:
    """Write the metrics of the first epoch of a run whose steps were read at these times."""
    rows: list[dict[str, object]] = [{"event": "start", "run": 1, "resumedFrom": None}]
    rows += [{"event": "train", "run": 1, "step": n, "epoch": 0, "time": time} for n, time in enumerate(times, start=1)]
    (folder / "metrics").mkdir()
    (folder / "metrics" / "run-000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    "times",
    [
        [step / 10 for step in range(60)],
        [0.0, *[2.5] * 25, *[5.0] * 25, *[7.5] * 25],  # as a GPU's losses are read
        [0.0, 0.2, 0.2],
    ],
)
def test_speed_counts_the_steps_between_two_reads(tmp_path: Path, times: list[float]) -> None:
    assert speed(write_times(tmp_path, times), 32) == pytest.approx(320)


@pytest.mark.parametrize("times", [[], [1.0], [1.0, 1.0]])
def test_speed_of_too_few_steps_is_refused(tmp_path: Path, times: list[float]) -> None:
    with pytest.raises(TrialFailed, match="too few steps"):
        speed(write_times(tmp_path, times), 32)


def test_tutorial_trainer_is_timed_until_it_reaches_the_target(tmp_path: Path) -> None:
    dataset = load("idx", str(write_idx(tmp_path, train=1500)))
    reached = tutorial(dataset, target=0.5, most_epochs=20, threads=1)
    assert reached["reached"]
    assert reached["accuracies"][-1] >= 0.5 > max([0.0, *reached["accuracies"][:-1]])
    assert reached["seconds"] > 0
    gave_up = tutorial(dataset, target=1.1, most_epochs=1, threads=1)
    assert (gave_up["reached"], gave_up["epochs"]) == (False, 1)
