"""The clock of status times follows the local one, but never jumps."""

from datetime import UTC

import pytest

from ddpjob.clock import SLEW, SteadyClock

HOUR = 3600.0


@pytest.mark.parametrize("step", [0.0, HOUR, -HOUR])
def test_step_of_the_local_clock_is_approached_slowly(step: float) -> None:
    """Setting it by an hour would make every running job an hour older at once."""
    passed, wall = 50.0, 1_800_000_000.0
    clock = SteadyClock(monotonic=lambda: passed, wall=lambda: wall)
    assert clock.now().timestamp() == wall and clock.now().tzinfo is UTC
    began, wall = wall, wall + step
    passed, wall = passed + 60, wall + 60
    sign = (step > 0) - (step < 0)
    assert clock.now().timestamp() - began == pytest.approx(60 * (1 + SLEW * sign))
    passed, wall = passed + HOUR / SLEW, wall + HOUR / SLEW
    assert clock.now().timestamp() == pytest.approx(wall)
