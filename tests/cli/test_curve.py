"""The loss curve shows the training as if it had not been interrupted."""

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ddpjob.cli.live import sparkline
from ddpjob.cli.summary import Point, drawing, losses
from ddptrain.reporting.metrics import effective_rows


def write(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def start(run: int, origin: tuple[int, int] | None = None) -> dict[str, Any]:
    return {"event": "start", "run": run, "resumedFrom": {"run": origin[0], "step": origin[1]} if origin else None}


def train(run: int, step: int, loss: float | None) -> dict[str, Any]:
    return {"event": "train", "run": run, "step": step, "loss": loss}


def test_steps_after_the_resumed_checkpoint_are_dropped(tmp_path: Path) -> None:
    write(
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
    assert losses(tmp_path) == [Point(1, 9.0), Point(2, 8.0), Point(3, 1.0)]


@given(
    st.lists(
        st.one_of(
            st.builds(start, st.integers(1, 4), st.none() | st.tuples(st.integers(1, 4), st.integers(0, 5))),
            st.builds(train, st.integers(1, 4), st.integers(0, 5), st.floats(0, 9)),
            st.sampled_from(["", "{", "[]", "null", '{"event": "train"}', '{"event": "start", "run": "x"}']),
            st.sampled_from(
                [json.dumps(start(4) | {"resumedFrom": origin}) for origin in ("run-000001", {"run": 1}, {})]
            ),
            st.sampled_from(['{"event": "start", "run": 3}', "[" * 100_000]),
        )
    )
)
def test_losses_are_the_rows_that_the_trainer_counts(tmp_path_factory: Any, rows: list[Any]) -> None:
    directory = tmp_path_factory.mktemp("checkpoints")
    (directory / "metrics").mkdir()
    for file in range(3):
        write(directory / "metrics" / f"run-{file:06d}.jsonl", *rows[file::3])
    theirs = {row["step"] for row in effective_rows(directory, "train")}
    assert [point.step for point in losses(directory)] == sorted(theirs)


def test_missing_file_has_no_points(tmp_path: Path) -> None:
    assert losses(tmp_path) == []


def test_curve_fits_the_width_without_escape_sequences() -> None:
    points = [Point(step, 2.3 * math.exp(-step / 600)) for step in range(1, 5001)]
    lines = drawing(points, 76)
    assert len(lines) > 8
    assert all(len(line) <= 76 for line in lines)
    assert "\x1b" not in "".join(lines)
    assert "5,000" in lines[-1]


def test_two_points_draw_no_curve() -> None:
    assert drawing([Point(1, 2.0), Point(2, 1.0)], 76) == []


def test_sparkline_scales_from_lowest_to_highest() -> None:
    assert sparkline([3, 2, math.nan, 1]) == "█▅▁"
    assert sparkline([1, 1]) == "▁▁"
    assert sparkline([1]) == ""


def test_a_step_that_is_too_large_is_not_drawn() -> None:
    points = [Point(step, 1.0 / (step + 1)) for step in range(20)]
    assert drawing([*points, Point(10**400, 0.5)], 60) == drawing(points, 60)
