"""The loss curve shows the training as if it had not been interrupted."""

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpjob.cli.curve import drawing, losses, metrics_of
from ddprun.reporting.metrics import effective_rows


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def start(run: int, origin: tuple[int, int] | None = None) -> dict[str, Any]:
    return {"event": "start", "run": run, "resumedFrom": {"run": origin[0], "step": origin[1]} if origin else None}


def train(run: int, step: int, loss: float | None) -> dict[str, Any]:
    return {"event": "train", "run": run, "step": step, "loss": loss}


def test_steps_after_the_resumed_checkpoint_are_dropped(tmp_path: Path) -> None:
    metrics = write(
        tmp_path / "metrics.jsonl",  # as an older trainer wrote it
        start(1),
        train(1, 1, 9.0),
        train(1, 2, 8.0),
        train(1, 3, 7.0),
        start(2, (1, 2)),
        train(2, 3, 1.0),
        train(1, 4, 7.0),  # a leftover of the first run, still writing
        '{"event": "train", "run": 2, "st',
        {"event": "eval", "run": 2, "step": 3, "loss": 0.5},
        train(2, 4, None),
    )
    assert metrics_of(tmp_path) == metrics
    assert losses(metrics) == {1: 9.0, 2: 8.0, 3: 1.0}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_losses_are_the_rows_that_the_trainer_counts(draw: st.DataObject, tmp_path_factory: Any) -> None:
    directory = tmp_path_factory.mktemp("checkpoints")
    (directory / "metrics").mkdir()
    for run in range(1, draw.draw(st.integers(1, 5)) + 1):
        origin = draw.draw(st.none() | st.tuples(st.integers(1, run), st.integers(0, 5)))
        steps = draw.draw(st.lists(st.integers(0, 9)))
        broken = st.sampled_from(
            ["", "{", "[]", "null", '{"event": "train"}', "[" * 100_000, start(run, None) | {"run": "x"}]
        )
        rows = [start(run, origin), *(train(run, step, 1.0) for step in steps), *draw.draw(st.lists(broken))]
        write(directory / "metrics" / f"run-{run:06d}.jsonl", *rows)
    assert list(losses(directory / "metrics")) == sorted({row["step"] for row in effective_rows(directory, "train")})


def test_a_run_that_does_not_say_from_where_it_resumed_has_only_its_own_steps(tmp_path: Path) -> None:
    rows = [start(1), train(1, 1, 9.0), start(2) | {"resumedFrom": "run-000001"}, train(2, 2, 8.0)]
    assert losses(write(tmp_path / "metrics.jsonl", *rows)) == {2: 8.0}


def test_missing_file_has_no_losses(tmp_path: Path) -> None:
    assert metrics_of(tmp_path) is None
    assert losses(tmp_path / "metrics.jsonl") == {}


def test_curve_fits_the_width_without_escape_sequences() -> None:
    lines = drawing({step: 2.3 * math.exp(-step / 600) for step in range(1, 5001)}, 76)
    assert len(lines) > 8
    assert all(len(line) <= 76 for line in lines)
    assert "\x1b" not in "".join(lines)
    assert "5,000" in lines[-1]


def test_two_points_draw_no_curve() -> None:
    assert drawing({1: 2.0, 2: 1.0}, 76) == []


def test_a_step_that_is_too_large_is_not_drawn() -> None:
    points = {step: 1.0 / (step + 1) for step in range(20)}
    assert drawing(points | {10**400: 0.5, 21: math.nan}, 60) == drawing(points, 60)
