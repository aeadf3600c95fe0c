"""The settings of a run, and where their values come from; ``flags`` declares a flag for each."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddprun.errors import ConfigMismatch, UsageError
from ddprun.settings import Settings, fields_of, given_settings, seconds, setting

PREFIX = "DDPTRAIN_"  # of the variable of each setting

_of_weights = functools.partial(setting, identity=True)
# With --debug; a value that is given wins. A rank at a breakpoint has no heartbeat, and its peers wait for it.
_DEBUG_DEFAULTS = {
    "hang_timeout": 0.0, "stall_report": 0.0, "collective_timeout": 86_400.0, "rendezvous_timeout": 86_400.0,
}  # fmt: skip


@dataclass(frozen=True)
class Config(Settings):
    """All settings of a run. Those of the weights affect the result, the others only how it is computed."""

    data: str = _of_weights("mnist", "dataset; idx reads any IDX files", choices=("mnist", "digits", "idx"))
    model: str = _of_weights("strided", "network", choices=("strided", "cnn", "mlp"))
    epochs: int = _of_weights(1, "passes over the training set", low=1, high=100_000)
    batch_size: int = _of_weights(0, "GLOBAL batch of all ranks; 0 = 384, for digits 32", low=0, high=1_000_000)
    optimizer: str = _of_weights(
        "muon",
        "muon updates the weights of all layers but the last, and adamw the rest; sgd has momentum",
        choices=("muon", "adamw", "sgd"),
    )
    learning_rate: float = _of_weights(
        0.006, "peak of the one-cycle learning rate; ten times this for muon's weights", name="lr", low=0, high=1_000
    )
    weight_decay: float = _of_weights(0.01, "decoupled weight decay (muon, adamw), L2 (sgd)", low=0, high=10)
    shift: int = _of_weights(1, "random shift of each step's batch by up to this many pixels", low=0, high=8)
    label_smoothing: float = _of_weights(
        0.05, "share of each label that is spread over all classes, in training", low=0, high=0.9
    )
    seed: int = _of_weights(0, "seed of weights, order and augmentation", low=0, high=2**62)
    dtype: str = _of_weights("float32", "type of weights and arithmetic", choices=("float32", "float64"))
    bf16: str = _of_weights(
        "auto", "bfloat16 autocast; auto = on a CPU with AVX512_BF16 or AMX only", choices=("auto", "on", "off")
    )
    sync: str = _of_weights(
        "bucketed",
        "gradient synchronization: bucketed = own overlapping buffers, ddp = DistributedDataParallel, manual = an "
        "all-reduce per parameter, bitwise = the same bits at any world size",
        choices=("bucketed", "ddp", "manual", "bitwise"),
    )
    tf32: bool = _of_weights(False, "TF32 in float32 convolutions and products (CUDA): faster, 10 bits")
    deterministic: bool = setting(False, "deterministic algorithms only: slower, the same bits on the same GPU")
    accum: int = _of_weights(1, "micro-batches of each rank's share of a batch, to save memory", low=1, high=100_000)
    data_dir: str = setting("", "directory of the four IDX files, gzipped or not", env="DDPJOB_DATA_DIR")
    download: bool = setting(False, "fetch missing MNIST files into --data-dir first")
    keep: int = setting(3, "number of newest checkpoints to keep", low=2, high=10**6)
    checkpoint_every: int = setting(50, "steps between checkpoints; 0 = at the end of each epoch", low=0, high=10**9)
    log_every: int = setting(
        0,
        "steps, at most, between two reads of losses and stop flags from the device; on slow steps they are read about "
        "once a second; 0 = 25 on a GPU, 1 on a CPU",
        low=0,
        high=10_000,
    )
    device: str = setting("auto", "auto: CUDA if there is a GPU", choices=("auto", "cpu", "cuda"))
    backend: str = setting("auto", "auto: nccl on CUDA, gloo on CPU", choices=("auto", "gloo", "nccl", "mpi"))
    threads: int = setting(0, "CPU threads per rank; 0 = the container's CPUs divided by its ranks", low=0, high=4096)
    rendezvous_timeout: float = seconds(0.0, "seconds to wait for all ranks; 0 = timeout= of PET_RDZV_CONF, else 600")
    collective_timeout: float = seconds(300.0, "seconds after which a rank that waits in a collective fails", low=1)
    debug: bool = setting(False, "for a debugger: no limit on the time that a rank pauses at a breakpoint")
    stop_after: int = setting(0, "debugging aid: stop after this step as after SIGTERM; 0 = never", low=0, high=10**12)
    step_delay: float = setting(0.0, "debugging aid: sleep this many seconds after every step", low=0, high=3_600)

    @property
    def global_batch(self) -> int:
        """The global batch in samples; its default is smaller for the digits, which are few."""
        return self.batch_size or (32 if self.data == "digits" else 384)

    def identity(self) -> dict[str, Any]:
        """Return the settings that affect the weights, by name, with the batch resolved."""
        values = {name: getattr(self, field.name) for name, field in SETTINGS.items() if field.metadata["identity"]}
        return values | {"batch_size": self.global_batch}

    def shared(self, device: str) -> dict[str, Any]:
        """Return the settings that must be the same on every rank: they decide the weights or which collectives run.

        Args:
            device: type of the rank's device, which decides how an update rounds and when losses are read.
        """
        names = ("log_every", "checkpoint_every", "stop_after")
        return self.identity() | {"device": device} | {name: getattr(self, name) for name in names}

    @classmethod
    def identity_of(cls, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the identity in a manifest.

        Raises:
            ConfigMismatch: its settings are those of another version.
        """
        theirs: dict[str, Any] = manifest["config"]
        if differ := sorted(set(theirs) ^ set(cls().identity())):
            raise ConfigMismatch(
                f"another version of ddptrain has trained the checkpoint; its settings differ in {', '.join(differ)}",
                next_step="use that version, or a new --checkpoint-dir",
            )
        return theirs

    def replaced(self, settings: Mapping[str, Any]) -> "Config":
        """Return the config with other values of the named settings."""
        return dataclasses.replace(self, **{SETTINGS[name].name: value for name, value in settings.items()})


SETTINGS = fields_of(Config)


def resolve(env: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """Return the config from defaults, ``DDPJOB_*`` variables, ``DDPTRAIN_*`` variables, and flags; a later one wins.

    Raises:
        UsageError: as ``given_settings``, or settings that exclude each other.
    """
    values = given_settings(SETTINGS, PREFIX, env, flags)
    config = Config().replaced((_DEBUG_DEFAULTS if values.get("debug") else {}) | values)
    if config.sync == "bitwise" and config.accum > 1:
        raise UsageError(
            "--accum cannot be combined with --sync bitwise",
            hint="bitwise already computes every global batch in twelve small parts",
            next_step="remove --accum",
        )
    return config
