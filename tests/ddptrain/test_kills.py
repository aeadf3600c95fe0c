"""SIGKILL of a rank in each phase: the resumed run ends with the weights of an uninterrupted one, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ddptrain.builders import SAVING, command
from tests.ddptrain.runs import ForkServer, Whole, assert_same_end

# (rank of three, step, place) of each kill
KILLS = [(0, 9, "save"), (0, 14, "evaluate"), (1, 3, "batch"), (2, 21, "all_reduce of gradients"), (2, 6, "step")]


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_killed_runs_resume_to_the_weights_of_an_uninterrupted_run(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, whole: Whole
) -> None:
    world_size = 3
    for number, (rank, step, place) in enumerate(KILLS):
        cut = tmp_path / str(number)
        killed = ddptrain.start(*command(world_size, idx, cut, "--chaos", f"kill:{rank}:{step}:{place}"))
        code = killed.wait()
        case = f"rank {rank} of {world_size} at {place} of step {step}"
        assert code == 137, f"{case}: {killed.output()}"
        message = killed.message()
        assert (message["rank"], message["signal"], message["cause"]) == (rank, 9, "own"), case
        if step > 4 and place != "save":
            assert message["checkpoint"]["run"] == 1, (
                f"{case}: the report has the last checkpoint even if rank 0 was killed"
            )
        ddptrain.run(*command(world_size, idx, cut))
        assert_same_end(whole(world_size, *SAVING).folder, cut)
