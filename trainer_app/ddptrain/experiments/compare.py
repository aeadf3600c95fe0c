"""The verb ``compare``: measures on this machine whether the number of ranks changes a training.

``Comparison`` runs one small training with one process and with several ranks, with every method of ``--sync``. The
functions below it compare what the trials left behind with fixed limits.
"""

import contextlib
import functools
import io
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddprun.checkpoint_files import newest_valid
from ddprun.errors import UsageError
from ddprun.exit_codes import STOPPED
from ddprun.files import dumps_json, make_directory
from ddprun.reporting.metrics import effective_rows
from ddptrain import weights
from ddptrain.config import Config
from ddptrain.data import mnist
from ddptrain.data.batches import normalise
from ddptrain.data.sampling import Schedule, read_audit
from ddptrain.experiments.trials import Trial, Trials, data_flags
from ddptrain.inference.trained_model import as_trained, model_of

BATCH = 37  # not divisible by any number of ranks, and the last batch of an epoch is smaller
CHECKS = ("losses", "gradients", "bits", "resume")
WAYS = ("ddp", "manual", "bucketed", "accum", "zero")
RECIPES: dict[str, tuple[object, ...]] = {
    "muon": ("--optimizer", "muon", "--lr", 0.006),
    "adamw": ("--optimizer", "adamw", "--lr", 0.006),
    "sgd": ("--optimizer", "sgd", "--lr", 0.05),
}
_FLAGS_OF: dict[str, tuple[object, ...]] = {
    "accum": ("--sync", "ddp", "--accum", 3),
    "zero": ("--sync", "bucketed", "--zero"),
}


@dataclass(frozen=True)
class CompareOptions:
    """What is compared.

    Attributes:
        config: gives the data and the model.
        worlds: numbers of ranks to compare with one process.
        steps: minimum number of steps; rounded up to whole epochs.
    """

    config: Config
    worlds: tuple[int, ...]
    checks: tuple[str, ...]
    ways: tuple[str, ...]
    steps: int


LOSS_LIMIT = 1e-12  # absolute, in double precision
SAME_PLACES = 0.1  # share of equal positions in the orders of two epochs; random ones share about one position
EVALUATION_LIMIT = 1e-9  # absolute, of accuracy and of loss, in double precision
GRADIENT_LIMIT = 1e-6  # relative, in single precision


@dataclass(frozen=True)
class Proof:
    """One line of the table: a measured value and its limit."""

    what: str
    subject: str
    limit: str
    measured: str
    holds: bool


class Comparison:
    """Runs all trials, then compares them, because a process that has run tensor operations must not fork."""

    def __init__(self, options: CompareOptions, trials: Trials, *, quiet: bool = False) -> None:
        self._options, self._trials, self._quiet = options, trials, quiet
        dataset = mnist.load(options.config.data, options.config.data_dir)
        self._dataset, self._test_samples = dataset, len(dataset.test_labels)
        per_epoch = Schedule(len(dataset.train_labels), BATCH, 1, 0).steps_per_epoch
        self._schedule = Schedule(len(dataset.train_labels), BATCH, -(-options.steps // per_epoch), seed=0)
        self._several = [world for world in options.worlds if world > 1]

    def proofs(self) -> list[Proof]:
        """Run the trials and return the result of every comparison, in the order of the checks."""
        checks = {"losses": self._losses, "gradients": self._gradients, "bits": self._bits, "resume": self._resume}
        comparisons = [comparison for check in self._options.checks for comparison in checks[check]()]
        return [comparison() for comparison in comparisons]  # only now, when every trial has run

    def _losses(self) -> Iterator[Callable[[], Proof]]:
        for recipe, flags in RECIPES.items():
            alone = self._train(f"losses-{recipe}-1", 1, "--dtype", "float64", *flags)
            yield self._samples(f"{recipe}, 1 process", alone)
            yield self._evaluation(f"{recipe}, 1 process", alone)
            for world in self._several:
                for way in self._options.ways:
                    name = f"losses-{recipe}-{way}-{world}"
                    trial = self._train(name, world, *_flags(way), "--dtype", "float64", *flags)
                    subject = f"{recipe}, {way}, {world} ranks"
                    yield functools.partial(equal_losses, subject, alone, trial)
                    yield self._samples(subject, trial)
                    yield self._evaluation(subject, trial)

    def _gradients(self) -> Iterator[Callable[[], Proof]]:
        flags = ("--optimizer", "sgd", "--weight-decay", 0, "--bf16", "off")
        alone = self._train("gradients-1", 1, *flags, stop_after=1)
        for world in self._several:
            for way in (*self._options.ways, "bitwise"):
                trial = self._train(f"gradients-{way}-{world}", world, *_flags(way), *flags, stop_after=1)
                yield functools.partial(equal_first_gradients, f"{way}, {world} ranks", alone, trial)

    def _bits(self) -> Iterator[Callable[[], Proof]]:
        equal = functools.partial(equal_bits, "weights' SHA-256, bitwise")
        alone = self._train("bits-1", 1, *_flags("bitwise"))
        for world in self._several:
            trial = self._train(f"bits-{world}", world, *_flags("bitwise"))
            yield functools.partial(equal, f"{world} ranks", alone, trial)
        if self._several:
            route = [*sorted({1, *self._several}, reverse=True), max(self._several)]
            for leg, world in enumerate(route[:-1], 1):  # one training that stops and resumes with each world
                stop = self._schedule.total_steps * leg // len(route)
                self._train("bits-changing", world, *_flags("bitwise"), stop_after=stop)
            changing, subject = self._train("bits-changing", route[-1], *_flags("bitwise")), "→".join(map(str, route))
            yield functools.partial(equal, subject, alone, changing)
            yield self._samples(subject, changing)

    def _resume(self) -> Iterator[Callable[[], Proof]]:
        half = self._schedule.total_steps // 2
        for way in [way for way in self._options.ways if self._several]:
            world = self._several[-1]
            whole = self._train(f"resume-{way}-whole", world, *_flags(way))
            self._train(f"resume-{way}-cut", world, *_flags(way), stop_after=half)
            cut = self._train(f"resume-{way}-cut", world, *_flags(way))
            subject = f"{way}, {world} ranks, stopped after step {half}"
            yield functools.partial(equal_bits, "weights' SHA-256, resumed", subject, whole, cut)

    def _samples(self, subject: str, trial: Trial) -> Callable[[], Proof]:
        return functools.partial(samples_used_once, subject, trial, self._schedule, self._test_samples)

    def _evaluation(self, subject: str, trial: Trial) -> Callable[[], Proof]:
        return functools.partial(evaluation_is_right, subject, trial, self._options.config, self._dataset)

    def _train(self, name: str, world: int, *flags: object, stop_after: int = 0) -> Trial:
        config = self._options.config
        common = [*data_flags(config), "--device", config.device, "--model", config.model]
        common += ["--batch-size", BATCH, "--threads", 1]
        common += ["--epochs", self._schedule.epochs, "--checkpoint-every", 0, "--stop-after", stop_after]
        if config.device == "cuda":
            common.append("--deterministic")  # else no two runs on a GPU have the same bits
        if not self._quiet:
            print(f"running {name} …", file=sys.stderr, flush=True)
        return self._trials.train(name, world, *common, *flags, code=STOPPED if stop_after else 0)


def compare(
    options: CompareOptions, main: Callable[[Sequence[str]], int], *, as_json: bool = False, keep: str = ""
) -> int:
    """Run every check and print a table, or one JSON object. Returns 0 if all limits hold, else 1.

    Args:
        main: runs one command line of ddptrain.
        keep: an empty directory in which to leave the trials.
    Raises:
        UsageError: there is only one number of ranks, so nothing would be compared.
    """
    if max(options.worlds) == 1:
        raise UsageError(
            "--worlds 1 compares nothing: one process is always the reference",
            next_step="add another number of ranks, for example --worlds 1,2",
        )
    with _folder(keep) as folder:
        proofs = Comparison(options, Trials(folder, main), quiet=as_json).proofs()
    failed = [proof for proof in proofs if not proof.holds]
    if as_json:
        proved = [asdict(proof) for proof in proofs]
        print(dumps_json({"holds": not failed, "worlds": list(options.worlds), "proofs": proved}))
    else:
        print(table(proofs))
        print(f"\n{len(proofs) - len(failed)} of {len(proofs)} hold" + (f"; {len(failed)} FAIL" if failed else ""))
    return 1 if failed else 0


def _flags(way: str) -> tuple[object, ...]:
    return _FLAGS_OF.get(way, ("--sync", way))


@contextlib.contextmanager
def _folder(keep: str) -> Iterator[Path]:
    if not keep:
        with tempfile.TemporaryDirectory(prefix="ddptrain-compare-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    folder = make_directory("--keep", keep)
    if any(folder.iterdir()):
        raise UsageError(
            f"--keep {keep} is not empty", hint="the runs in it would be resumed", next_step="use an empty directory"
        )
    yield folder


def equal_losses(subject: str, alone: Trial, trial: Trial) -> Proof:
    """Compare the losses of all steps with those of one process."""
    ours, theirs = alone.losses(), trial.losses()
    worst = max((abs(theirs[step] - loss) for step, loss in ours.items() if step in theirs), default=1.0)
    whole = ours.keys() == theirs.keys() and len(ours) > 0
    learned = whole and min(ours.values()) < 0.9 * ours[1]  # else equality means nothing
    return Proof(
        f"loss of {len(ours)} steps, float64",
        subject,
        f"≤ {LOSS_LIMIT:g}",
        f"{worst:.1e}" if learned else "steps are missing" if not whole else "it learned nothing",
        learned and worst <= LOSS_LIMIT,
    )


def equal_first_gradients(subject: str, alone: Trial, trial: Trial) -> Proof:
    """Compare the first gradients; SGD's momentum after one step is the first gradient."""
    states = [_checkpoint(one, step=1)["optimizer"]["state"] for one in (alone, trial)]
    ours, theirs = (torch.cat([state[key]["momentum_buffer"].flatten() for key in sorted(state)]) for state in states)
    worst = float((ours - theirs).norm() / ours.norm())
    return Proof("first gradient, float32", subject, f"≤ {GRADIENT_LIMIT:g}", f"{worst:.1e}", worst <= GRADIENT_LIMIT)


def equal_bits(what: str, subject: str, reference: Trial, trial: Trial) -> Proof:
    """Compare the SHA-256 of the final weights, and every loss."""
    ours, theirs = (weights.digest(_checkpoint(one)["model"]) for one in (reference, trial))
    losses = reference.losses() == trial.losses()
    return Proof(
        what, subject, ours[:12], theirs[:12] + ("" if losses else ", other losses"), ours == theirs and losses
    )


def samples_used_once(subject: str, trial: Trial, schedule: Schedule, test_samples: int) -> Proof:
    """Check by the audit files that every epoch and evaluation used each sample once, and every epoch another order."""
    used = read_audit(trial.audit)
    train, evaluated = used.get("train", {}), used.get("eval", {})
    epochs: list[list[int]] = [[] for _ in range(schedule.epochs)]
    for step, indices in train.items():
        epochs[schedule.bounds(step)[0]] += indices.tolist()
    wrong = sum(_misused(epoch, schedule.samples) for epoch in epochs)
    wrong_tests = sum(_misused(indices.tolist(), test_samples) for indices in evaluated.values())
    # Epochs of other lengths are found above.
    pairs = [(np.array(a), np.array(b)) for a, b in itertools.pairwise(epochs) if len(a) == len(b)]
    equal = max((float(np.mean(a == b)) for a, b in pairs), default=0.0)
    faults = [f"{len(train)} of {schedule.total_steps} steps recorded"] * (len(train) != schedule.total_steps)
    faults += [f"{len(evaluated)} of {schedule.epochs} evaluations recorded"] * (len(evaluated) != schedule.epochs)
    faults += [f"{wrong} training samples not once in an epoch"] * (wrong > 0)
    faults += [f"{wrong_tests} test samples not evaluated once"] * (wrong_tests > 0)
    faults += [f"two epochs have the same sample at {equal:.0%} of their positions"] * (equal > SAME_PLACES)
    return Proof(
        "samples used, as recorded by the ranks",
        subject,
        "each once",
        "; ".join(faults) or f"each of {schedule.samples} + {test_samples} once in {schedule.epochs} epochs",
        not faults,
    )


def evaluation_is_right(subject: str, trial: Trial, config: Config, dataset: mnist.Dataset) -> Proof:
    """Compare the last evaluation with one pass of the last checkpoint's model over the test set, computed here."""
    found = newest_valid(trial.checkpoints, lambda path, reason: None)
    assert found is not None, f"{trial.folder} holds no checkpoint"
    model = model_of(as_trained(config, found[0].manifest), found[1], torch.device("cpu"), str(trial.checkpoints))
    with torch.no_grad():
        pixels = normalise(torch.from_numpy(dataset.test_images.copy()), next(model.parameters()).dtype)
        logits, labels = model(pixels.unsqueeze(1)), torch.from_numpy(dataset.test_labels.astype(np.int64))
        accuracy = float((logits.argmax(1) == labels).double().mean())
        loss = float(torch.nn.functional.cross_entropy(logits.double(), labels))
    last = effective_rows(trial.checkpoints, "eval")[-1]
    off = max(abs(last["accuracy"] - accuracy), abs(last["loss"] - loss))
    return Proof(
        "last evaluation, computed again, float64",
        subject,
        f"≤ {EVALUATION_LIMIT:g}",
        f"{off:.1e}",
        bool(off <= EVALUATION_LIMIT),
    )


def table(proofs: Sequence[Proof]) -> str:
    """Return aligned columns, one line per proof."""
    rows = [("what", "of", "must be", "measured", "")]
    rows += [(p.what, p.subject, p.limit, p.measured, "holds" if p.holds else "FAILS") for p in proofs]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, (*widths, 0), strict=True)).rstrip() for row in rows)


def _misused(indices: Iterable[int], samples: int) -> int:
    """Return how many of range(samples) do not occur exactly once."""
    return int((np.bincount(np.fromiter(indices, np.int64), minlength=samples) != 1).sum())


def _checkpoint(trial: Trial, step: int | None = None) -> dict[str, dict[str, Any]]:
    found = newest_valid(trial.checkpoints, lambda path, reason: None, step=step)
    assert found is not None, f"{trial.folder} holds no checkpoint"
    loaded: dict[str, dict[str, Any]] = torch.load(io.BytesIO(found[1]), weights_only=True)
    return loaded
