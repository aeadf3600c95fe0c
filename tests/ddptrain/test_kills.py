"""SIGKILL of any rank at any step: the resumed run ends with the weights of an uninterrupted one, bit for bit.

Kills two of 3 ranks by default; ``DDPTRAIN_TEST_KILLS=20`` kills every rank of 2, 3 and 4 at twenty random steps each.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.ddptrain.builders import SAVING, STEPS, command
from tests.ddptrain.runs import ForkServer, Whole, assert_same_end

KILLS = int(os.environ.get("DDPTRAIN_TEST_KILLS", "0"))
PLACES = ("batch", "step", "all_reduce of gradients", "evaluate", "save")


def plans() -> list[tuple[int, int, int, str]]:
    """Return (world size, rank, step, place) of every kill."""
    dice, chosen = random.Random(6), []
    for world_size in (2, 3, 4):
        for rank in range(world_size):
            for _ in range(max(1, KILLS)):
                step = dice.randrange(1, STEPS + 1)
                place = dice.choice([p for p in PLACES if p != "save" or rank == 0])
                chosen.append((world_size, rank, step, place))
    return chosen if KILLS else [plan for plan in chosen if plan[1] in (0, plan[0] - 1)]


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world_size", [2, 3, 4] if KILLS else [3])
def test_killed_runs_resume_to_the_weights_of_an_uninterrupted_run(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, whole: Whole, world_size: int
) -> None:
    for number, (_, rank, step, place) in enumerate(plan for plan in plans() if plan[0] == world_size):
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
