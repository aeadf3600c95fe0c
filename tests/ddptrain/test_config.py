"""Settings: the order of their sources, the refusal of invalid values, and the identity of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddprun.distributed.rendezvous import DEFAULT_TIMEOUT, parse_rendezvous_timeout
from ddprun.errors import ConfigMismatch, Mismatch, UsageError
from ddprun.fault_injection import InjectedFault
from ddprun.resources import threads_per_rank
from ddptrain.cli import main
from ddptrain.config import SETTINGS, Config, resolve
from ddptrain.errors import DataMismatch
from ddptrain.training.checkpointer import check_compatible, check_same_as_rank_zero


def test_flags_override_the_environment_and_the_environment_overrides_defaults() -> None:
    env = {"DDPTRAIN_EPOCHS": "5", "DDPTRAIN_LR": "0.1"}
    config = resolve(env, {"epochs": "7", "seed": None})
    assert (config.epochs, config.learning_rate, config.seed) == (7, 0.1, 0)


def test_trainer_variables_override_job_variables() -> None:
    env = {"DDPJOB_DATA_DIR": "/data", "DDPJOB_CHECKPOINT_DIR": "/a", "DDPTRAIN_CHECKPOINT_DIR": "/b"}
    config = resolve(env, {})
    assert (config.data_dir, config.checkpoint_dir) == ("/data", "/b")


def test_an_unknown_trainer_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="DDPTRAIN_EPOCH") as caught:
        resolve({"DDPTRAIN_EPOCH": "5"}, {})
    assert caught.value.hint == "did you mean DDPTRAIN_EPOCHS?"
    assert caught.value.code == 2


def test_an_unknown_job_variable_is_ignored() -> None:
    assert resolve({"DDPJOB_FROM_THE_FUTURE": "1"}, {}) == Config()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", "0"), ("epochs", "many"), ("epochs", "1.5"), ("batch_size", "-1"), ("lr", "nan"), ("lr", "inf"),
        ("data", "imagenet"), ("bf16", "perhaps"), ("keep", "0"), ("seed", "-1"), ("model", "CNN"),
        ("collective_timeout", "0"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_refused_with_its_origin(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"DDPTRAIN_{name.upper()}"):
        resolve({f"DDPTRAIN_{name.upper()}": value}, {})
    with pytest.raises(UsageError, match="--" + name.replace("_", "-")):
        resolve({}, {name: value})


def test_accum_is_refused_with_bitwise() -> None:
    with pytest.raises(UsageError, match="--accum cannot be combined with --sync bitwise"):
        resolve({}, {"sync": "bitwise", "accum": "2"})


@pytest.mark.parametrize(("value", "hint"), [("nope", ""), ("digit", "did you mean digits?")])
def test_only_a_choice_that_is_like_the_value_is_suggested(value: str, hint: str) -> None:
    with pytest.raises(UsageError, match="is not one of mnist, digits, idx") as caught:
        resolve({}, {"data": value})
    assert caught.value.hint == hint


def test_the_identity_changes_only_with_settings_that_affect_the_weights() -> None:
    other: dict[str, Any] = {
        "data": "idx", "model": "mlp", "epochs": 3, "batch_size": 7, "optimizer": "sgd", "lr": 0.5, "weight_decay": 0.5,
        "shift": 0, "seed": 9, "dtype": "float64", "bf16": "on", "label_smoothing": 0.2,
        "data_dir": "/x", "download": True,
        "checkpoint_dir": "/x", "checkpoint_every": 1, "keep": 9, "device": "cpu", "backend": "gloo", "threads": 3,
        "rendezvous_timeout": 9.0, "collective_timeout": 9.0, "step_delay": 1.0,
        "stall_report": 9.0, "hang_timeout": 9.0, "volume_timeout": 9.0, "debug": True,
        "log_every": 5, "stop_grace": 9.0, "on_divergence": "restart",
        "chaos": "kill:0:1",
        "sync": "manual", "accum": 2, "stop_after": 1,
        "tf32": True, "deterministic": True,
    }  # fmt: skip
    for name, field in SETTINGS.items():
        changed = Config().replaced({name: other[name]})
        assert (changed.identity() != Config().identity()) == field.metadata["identity"], name


def test_a_manifest_with_an_unknown_setting_is_refused() -> None:
    with pytest.raises(Mismatch, match="settings differ in warmth") as caught:
        Config.identity_of({"config": {**Config().identity(), "warmth": 3}})
    assert caught.value.code == 78


def test_the_identity_has_the_resolved_batch_size() -> None:
    assert Config(batch_size=384).identity() == Config().identity()
    assert Config(data="digits").global_batch == 32


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("train --epocs 3", "ddptrain train has no flag --epocs; did you mean --epochs?"),
        ("eval --chekpoint-dir x", "ddptrain eval has no flag --chekpoint-dir; did you mean --checkpoint-dir?"),
        ("trian", "argument VERB: invalid choice: 'trian'"),
        ("train --epochs", "argument --epochs: expected one argument"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_and_reported(
    argv: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDPJOB_TERMINATION_LOG", str(tmp_path / "message"))
    assert main(argv.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert said in "; ".join(line.partition(":")[2].strip() for line in lines[:2])
    assert lines[-1].startswith("next:  `ddptrain ")
    message = json.loads((tmp_path / "message").read_text())
    assert (message["code"], message["phase"]) == (2, "start")


def test_digits_other_than_decimals_are_not_numbers() -> None:
    with pytest.raises(UsageError, match="is not ACTION:RANK:STEP"):
        InjectedFault.parse("kill:²:7")
    assert threads_per_rank(1, {"OMP_NUM_THREADS": "²"}) == threads_per_rank(1, {})
    assert parse_rendezvous_timeout("timeout=²") == DEFAULT_TIMEOUT


def facts(data: str = "a" * 64, **settings: Any) -> dict[str, Any]:
    return {"config": Config(**settings).identity(), "dataDigest": data}


def test_a_checkpoint_of_other_settings_or_other_data_is_refused(tmp_path: Path) -> None:
    check_compatible(facts(learning_rate=0.5), facts(learning_rate=0.5), tmp_path)
    with pytest.raises(ConfigMismatch, match=r"another configuration: model 'cnn' → 'strided', batch_size 256 → 384$"):
        check_compatible(facts(model="cnn", batch_size=256), facts(), tmp_path)
    with pytest.raises(ConfigMismatch, match=r"accum 1 → 2$"):
        check_compatible(facts(), facts(accum=2), tmp_path)
    with pytest.raises(DataMismatch, match=f"trained on other data: {'a' * 16}…, now {'b' * 16}…"):
        check_compatible(facts(), facts("b" * 64), tmp_path)


@pytest.mark.parametrize("other", [{"stop_after": 5}, {"log_every": 5}, {"checkpoint_every": 7}])
def test_ranks_must_share_every_setting_that_decides_their_collectives(other: dict[str, Any]) -> None:
    assert Config().shared("cuda") != Config(**other).shared("cuda")
    assert Config().shared("cuda") != Config().shared("cpu"), "the one reads losses late, the other after each step"


def test_a_rank_that_differs_from_rank_zero_is_refused_with_every_difference() -> None:
    check_same_as_rank_zero(facts(), facts(), 1)
    with pytest.raises(
        DataMismatch, match=f"rank 1 has different settings from rank 0: data {'a' * 16}… → {'b' * 16}…"
    ):
        check_same_as_rank_zero(facts(), facts("b" * 64), 1)
    with pytest.raises(ConfigMismatch, match=f"rank 2 .*: seed 0 → 3, data {'a' * 16}… → {'b' * 16}…"):
        check_same_as_rank_zero(facts(seed=0), facts("b" * 64, seed=3), 2)
