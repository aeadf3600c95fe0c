"""The exit codes that the operator knows, and those that the trainer uses."""

from types import ModuleType

import ddptrain.exit_codes
from ddpjob.api import exit_codes


def codes(module: ModuleType) -> dict[str, int]:
    return {name: value for name, value in vars(module).items() if name.isupper()}


def test_operator_and_trainer_define_the_same_exit_codes() -> None:
    assert codes(exit_codes) == codes(ddptrain.exit_codes)
    assert len(codes(exit_codes)) == 13
