"""The settings of a run: their schema, their sources, and the checks that a run matches a checkpoint or rank 0.

Sources, the later the stronger: defaults, DDPJOB_* variables, YAML file, DDPTRAIN_* variables, flags. ``flags`` makes a
flag of each field. PyYAML is imported only if there is a file.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.errors import ConfigMismatch, DataMismatch, UsageError

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def setting(
    default: Any,
    text: str,
    *,
    identity: bool = False,
    before: Any = None,
    choices: tuple[str, ...] = (),
    low: float = -math.inf,
    high: float = math.inf,
    env: str = "",
) -> Any:
    """Return a field of ``Config`` with the metadata that the flag parser and the checks need.

    Args:
        text: the help of its flag.
        identity: it affects the weights, so a training resumes only if it is unchanged.
        before: its value in trainings that are older than the setting; None means the default.
        choices: the valid values; any value is valid if empty.
        low, high: bounds of a number, both included.
        env: another variable that sets it, stronger only than the default.
    """
    metadata = {
        "help": text, "identity": identity, "before": before, "choices": choices, "low": low, "high": high, "env": env,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def checked(field: dataclasses.Field[Any], value: Any, origin: str) -> Any:
    """Return the value, which may be text, in the type of the field's default.

    Args:
        origin: variable, flag or file that gave the value.
    Raises:
        UsageError: wrong type, not one of the choices, or out of bounds; it names ``origin``.
    """
    kind: type[Any] = type(field.default)
    try:
        if isinstance(value, bool) and kind is not bool:
            raise ValueError(value)  # `epochs: yes` in a file: int() would return 1
        parsed = _BOOLEANS[str(value).lower()] if kind is bool else kind(value)
    except (KeyError, ValueError, OverflowError):
        raise UsageError(f"{origin}={value!r} is not of type {kind.__name__}", next_step=f"correct {origin}") from None
    choices, low, high = (field.metadata[k] for k in ("choices", "low", "high"))
    if choices and parsed not in choices:
        raise UsageError(
            f"{origin}={value!r} is not one of {', '.join(choices)}",
            hint=nearest(str(value), list(choices)),
            next_step=f"correct {origin}",
        )
    if kind in (int, float) and not low <= parsed <= high:
        raise UsageError(f"{origin}={value} is not between {low:g} and {high:g}", next_step=f"correct {origin}")
    return parsed


def settings_of(path: str, names: Sequence[str]) -> list[tuple[str, Any, str]]:
    """Return (name, value, origin) of each setting in a YAML file; values other than booleans as text.

    The file maps field names, with dashes or underscores, to scalars.

    Raises:
        UsageError: the file cannot be read, is not a mapping, or has an unknown setting.
    """
    try:
        import yaml

        content = yaml.safe_load(Path(path).read_bytes())
    except ImportError:
        raise UsageError(
            f"cannot read {path}: PyYAML is not installed",
            next_step="pip install PyYAML, or use flags instead of the file",
        ) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise UsageError(f"cannot read {path}: {reason}", next_step=f"correct {path}, or give another file") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a mapping of settings to values", next_step="write lines such as `epochs: 3`")
    given = []
    for key, value in content.items():
        name, origin = str(key).replace("-", "_"), f"{path}: {key}"
        if name not in names:
            raise UsageError(
                f"unknown setting {key} in {path}",
                hint=nearest(name, names),
                next_step=f"correct {path}; `ddptrain config print` lists the settings",
            )
        if isinstance(value, (dict, list)) or value is None:
            raise UsageError(
                f"{origin} is not one value", next_step=f"give it one number, word or true/false in {path}"
            )
        given.append((name, value if isinstance(value, bool) else str(value), origin))
    return given


def nearest(key: str, known: Sequence[str]) -> str:
    """Return a hint with the known name that is most like ``key``."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"did you mean {close[0]}?" if close else ""


# With --debug; a value that is given wins. A rank at a breakpoint has no heartbeat, and its peers wait for it.
_DEBUG_DEFAULTS = {"hang_timeout": 0.0, "collective_timeout": 86_400.0, "rendezvous_timeout": 86_400.0}
PREFIX = "DDPTRAIN_"
FILE_VARIABLE = "DDPTRAIN_CONFIG"
DATASETS = ("mnist", "digits", "idx")
MODELS = ("strided", "cnn", "mlp")
_ON_OFF = {True: "on", False: "off"}  # how older manifests wrote bf16


@dataclass(frozen=True)
class Config:
    """All settings of a run. Fields with ``identity`` affect the weights, the others only how they are computed."""

    data: str = setting(
        "mnist",
        "dataset: mnist, digits (bundled with scikit-learn), idx (any IDX files)",
        identity=True,
        choices=DATASETS,
    )
    model: str = setting("strided", "network", identity=True, choices=MODELS)
    epochs: int = setting(1, "passes over the training set", identity=True, low=1, high=100_000)
    batch_size: int = setting(
        0, "GLOBAL batch, shared by all ranks; 0 means 384, for digits 32", identity=True, low=0, high=1_000_000
    )
    optimizer: str = setting(
        "muon",
        "muon for the weights of all layers but the last and adamw for the rest, adamw, or sgd with momentum",
        identity=True,
        choices=("muon", "adamw", "sgd"),
    )
    lr: float = setting(
        0.006, "peak learning rate of the one-cycle schedule; muon's is ten times this", identity=True, low=0,
        high=1_000,
    )  # fmt: skip
    weight_decay: float = setting(0.01, "decoupled weight decay (muon, adamw), L2 (sgd)", identity=True, low=0, high=10)
    shift: int = setting(1, "random shift of each step's batch by up to this many pixels", identity=True, low=0, high=8)
    label_smoothing: float = setting(
        0.05, "share of each label that is spread over all classes, in training", identity=True, before=0.0, low=0,
        high=0.9,
    )  # fmt: skip
    seed: int = setting(0, "seed of weights, order and augmentation", identity=True, low=0, high=2**62)
    dtype: str = setting("float32", "type of weights and arithmetic", identity=True, choices=("float32", "float64"))
    bf16: str = setting(
        "auto",
        "bfloat16 autocast: auto = on a CPU that has instructions for it (AVX512_BF16 or AMX), and not on CUDA",
        identity=True,
        choices=("auto", "on", "off"),
    )
    cuda_graph: bool = setting(False, "record a step and replay it (CUDA, one rank or --sync manual; untested)")
    sync: str = setting(
        "bucketed",
        "gradient synchronization: bucketed = own overlapping buffers, ddp = DistributedDataParallel, manual = an "
        "all-reduce per parameter, bitwise = the same bits at any world size",
        identity=True,
        choices=("bucketed", "ddp", "manual", "bitwise"),
    )
    init_from: str = setting("", "initial weights: a checkpoint, an exported state_dict, or a checkpoint directory")
    tf32: bool = setting(False, "TF32 in float32 convolutions and products (CUDA): faster, 10 bits", identity=True)
    deterministic: bool = setting(False, "deterministic algorithms only: slower, the same bits on the same GPU")
    zero: bool = setting(False, "ZeRO stage 1: shard the optimizer's state over the ranks; the weights stay the same")
    accum: int = setting(
        1, "split each rank's share into this many micro-batches, to save memory", identity=True, low=1, high=100_000
    )
    data_dir: str = setting("", "directory of the four IDX files, gzipped or not", env="DDPJOB_DATA_DIR")
    download: bool = setting(False, "fetch missing MNIST files into --data-dir first")
    checkpoint_dir: str = setting(
        "",
        "directory of checkpoints, metrics and progress.json; without it nothing is saved",
        env="DDPJOB_CHECKPOINT_DIR",
    )
    checkpoint_every: int = setting(
        50, "steps between checkpoints, besides each epoch's end; 0 = epoch ends only", low=0, high=10**9
    )
    log_every: int = setting(
        0,
        "steps, at most, between two reads of losses and stop flags from the device; every rank sends its stop flag "
        "with each step, and all stop after the next read, which comes within about a second also where steps are "
        "slow; 0 = 25 on a GPU, 1 on a CPU",
        low=0, high=10_000,
    )  # fmt: skip
    keep: int = setting(3, "number of newest checkpoints to keep", low=1, high=10**6)
    keep_best: bool = setting(True, "also keep the checkpoint of the highest test accuracy")
    device: str = setting("auto", "auto: CUDA if there is a GPU", choices=("auto", "cpu", "cuda"))
    backend: str = setting("auto", "auto: nccl on CUDA, gloo on CPU", choices=("auto", "gloo", "nccl", "mpi"))
    threads: int = setting(0, "CPU threads per rank; 0 = the container's CPUs divided by its ranks", low=0, high=4096)
    rendezvous_timeout: float = setting(
        0.0, "seconds to wait for all ranks; 0 = timeout= of PET_RDZV_CONF, else 600", low=0, high=86_400
    )
    collective_timeout: float = setting(
        300.0, "seconds after which a rank that waits in a collective fails", low=1, high=86_400
    )
    hang_timeout: float = setting(
        120.0, "seconds without progress of a rank after which its node is ended; 0 = never", low=0,
        high=86_400,
    )  # fmt: skip
    volume_timeout: float = setting(
        290.0, "the same while a checkpoint is read or written, if it is larger", low=0, high=86_400
    )
    stop_grace: float = setting(25.0, "seconds from SIGTERM to SIGKILL; less than the pod's", low=0.1, high=86_400)
    log_format: str = setting("text", "format of the output", choices=("text", "json"))
    chaos: str = setting(
        "", "debugging aid: crash, kill, hang, stop, slow, oom or diskfull as ACTION:RANK:STEP[:PHASE]"
    )
    stop_after: int = setting(0, "debugging aid: stop after this step as after SIGTERM; 0 = never", low=0, high=10**12)
    audit: str = setting("", "directory where every rank records which samples it used at which step")
    debug: bool = setting(False, "for a debugger: no limit on the time that a rank pauses at a breakpoint")
    profile: int = setting(
        0, "trace so many steps of each rank with torch.profiler, into the run's folder; 0 = none", low=0, high=1_000
    )
    show_env: bool = setting(False, "debugging aid: every rank prints its variables, such as RANK and GROUP_RANK")
    step_delay: float = setting(0.0, "debugging aid: sleep this many seconds after every step", low=0, high=3_600)

    @property
    def global_batch(self) -> int:
        """The global batch in samples; its default is smaller for the digits, which are few."""
        return self.batch_size or (32 if self.data == "digits" else 384)

    def checkpoint_root(self) -> Path:
        """Return the checkpoint directory, for verbs that need one.

        Raises:
            UsageError: none is set.
        """
        if not self.checkpoint_dir:
            raise UsageError(
                "no checkpoint directory given", next_step="add --checkpoint-dir DIR, or set DDPJOB_CHECKPOINT_DIR"
            )
        return Path(self.checkpoint_dir)

    def identity(self) -> dict[str, Any]:
        """Return the fields that affect the weights, with the batch resolved."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["identity"]}
        return values | {"batch_size": self.global_batch}

    def shared(self, device: str) -> dict[str, Any]:
        """Return the settings that must be the same on every rank: they decide the weights or which collectives run.

        Args:
            device: type of the rank's device, which decides how an update rounds and when losses are read.
        """
        names = ("zero", "profile", "cuda_graph", "log_every", "checkpoint_every", "stop_after")
        values = self.identity() | {"device": device} | {name: getattr(self, name) for name in names}
        values |= {"init_from": bool(self.init_from)}
        if self.zero:  # the optimizer's state is gathered before each save
            values |= {"checkpoint_dir": bool(self.checkpoint_dir)}
        return values

    @classmethod
    def identity_of(cls, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the identity in a manifest; a setting that did not exist yet gets the value from before it.

        Raises:
            ConfigMismatch: the manifest has a setting that this version does not know.
        """
        theirs: dict[str, Any] = {key: value for key, value in manifest.get("config", {}).items() if key != "init_from"}
        if isinstance(theirs.get("bf16"), bool):
            theirs["bf16"] = _ON_OFF[theirs["bf16"]]
        before = {f.name: f.metadata["before"] for f in dataclasses.fields(cls) if f.metadata["before"] is not None}
        defaults = cls(data=theirs.get("data", cls.data), **before).identity()
        if unknown := sorted(set(theirs) - set(defaults)):
            raise ConfigMismatch(
                f"the checkpoint was trained with settings that this version does not have: {', '.join(unknown)}",
                hint="a newer ddptrain wrote it",
                next_step="use that version, or a new --checkpoint-dir",
            )
        return defaults | theirs

    def digest(self) -> str:
        """Return the SHA-256 of the identity; it changes with every setting that a version adds."""
        return digest_of(self.identity())

    def environment(self) -> dict[str, str]:
        """Return the environment variables from which ``resolve`` returns this config in another process."""
        return {PREFIX + name.upper(): str(value) for name, value in dataclasses.asdict(self).items()}


def digest_of(settings: Mapping[str, Any]) -> str:
    """Return the SHA-256 of settings and their values."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def given_settings(env: Mapping[str, str], flags: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """Return (name, value, origin) of each setting that is given, the stronger the later; raises as ``resolve``."""
    names = [field.name for field in dataclasses.fields(Config)]
    shared = [(field.name, field.metadata["env"]) for field in dataclasses.fields(Config)]
    given: list[tuple[str, Any, str]] = [(name, env[key], key) for name, key in shared if env.get(key)]
    if path := flags.get("config") or env.get(FILE_VARIABLE):
        given += settings_of(str(path), names)
    known = {PREFIX + name.upper(): name for name in names}
    for key in sorted(k for k in env if k.startswith(PREFIX) and k != FILE_VARIABLE):
        if key not in known:
            raise UsageError(
                f"unknown environment variable {key}",
                hint=nearest(key, list(known)),
                next_step=f"correct or unset {key}; `ddptrain train --help` lists the settings",
            )
        given.append((known[key], env[key], key))
    return given + [(n, v, "--" + n.replace("_", "-")) for n, v in flags.items() if v is not None and n != "config"]


def resolve(env: Mapping[str, str], flags: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None) -> Config:
    """Return the config from defaults, configuration file, environment and flags.

    Args:
        env: the process environment; unknown DDPTRAIN_* variables are refused, others ignored.
        flags: field name to value, and ``config`` to the path of a YAML file; None means not given.
        defaults: field name to the verb's own default.
    Raises:
        UsageError: unknown name or invalid value; it names the origin.
    """
    fields = {field.name: field for field in dataclasses.fields(Config)}
    given = {name: checked(fields[name], value, origin) for name, value, origin in given_settings(env, flags)}
    debugging = _DEBUG_DEFAULTS if given.get("debug") else {}
    config = Config(**{**(defaults or {}), **debugging, **given})
    if config.sync == "bitwise" and config.accum > 1:
        raise UsageError(
            "--accum cannot be combined with --sync bitwise",
            hint="bitwise already computes every global batch in twelve small parts",
            next_step="remove --accum",
        )
    return config


def check_compatible(manifest: Mapping[str, Any], facts: Mapping[str, Any], root: Path) -> None:
    """Refuse to resume from the checkpoint of another training.

    Raises:
        ConfigMismatch: with the settings that differ. DataMismatch: the data differ.
    """
    if differ := _differences(Config.identity_of(manifest), facts["config"]):
        raise ConfigMismatch(
            f"the checkpoints in {root} belong to another configuration: {differ}",
            hint="resuming would mix two trainings",
            next_step="use the old settings, or a new --checkpoint-dir",
        )
    if manifest["dataDigest"] != facts["dataDigest"]:
        raise DataMismatch(
            f"the checkpoints in {root} were trained on other data: {manifest['dataDigest'][:16]}…, "
            f"now {facts['dataDigest'][:16]}…",
            hint="another volume is mounted as data directory",
            next_step="mount the old data, or use a new --checkpoint-dir",
        )


def check_same_as_rank_zero(theirs: Mapping[str, Any], facts: Mapping[str, Any], rank: int) -> None:
    """Refuse to train with settings or data that differ from rank 0's; the weights would drift apart without an error.

    Raises:
        ConfigMismatch: with everything that differs. DataMismatch: only the data differ.
    """
    differ = _differences(theirs["config"], facts["config"])
    error = ConfigMismatch if differ else DataMismatch
    if theirs["dataDigest"] != facts["dataDigest"]:
        data = f"data {theirs['dataDigest'][:16]}… → {facts['dataDigest'][:16]}…"
        differ = f"{differ}, {data}" if differ else data
    if differ:
        raise error(
            f"rank {rank} has different settings from rank 0: {differ}",
            hint="a flag, a variable or the data volume of its node differs",
            next_step="start every node with the same settings; `ddptrain preflight` compares them all",
        )


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return what differs, as in ``lr 0.006 → 0.5``; empty if nothing does."""
    return ", ".join(f"{k} {theirs.get(k)!r} → {v!r}" for k, v in ours.items() if theirs.get(k) != v)
