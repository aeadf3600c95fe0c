"""The exit codes that the operator knows, and those that the trainer uses."""

from types import ModuleType

import ddprun.exit_codes
from ddpjob.api import exit_codes


def codes(module: ModuleType) -> dict[str, int]:
    return {name: value for name, value in vars(module).items() if isinstance(value, int)}


def test_operator_and_trainer_give_an_exit_code_the_same_meaning() -> None:
    assert len(codes(exit_codes)) == 11
    assert codes(exit_codes).items() <= codes(ddprun.exit_codes).items()
    assert len(codes(ddprun.exit_codes)) == 14
