"""Verbs about runs: what is configured, what was saved, what went wrong. None of them imports torch.

``config``, ``ckpt`` and ``why``; ``cli`` adds them to its own.

Verbs about the MNIST files: ``data fetch`` and ``data verify``. Neither imports torch.

``cli`` adds them to its own; ``fetch`` downloads, ``mnist`` knows what the files must be.

Verbs that use or judge trained models: ``infer``, ``predict``, ``export``, ``compare``, ``bench``.

``cli`` adds them to its own. torch is imported when one of them runs, not when its help is asked for.

The verbs ``ckpt ls``, ``verify`` and ``rollback``: checkpoints as a person sees and mends them. No torch.

They read what ``checkpoint_writer`` writes; only ``rollback`` changes anything, and it deletes nothing.

How the verdict of ``preflight`` looks to a person and to a program. No torch: the launcher prints it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddptrain.checkpoint import manifests, read_newest, reading, run_numbers, set_aside
from ddptrain.checkpoint import verify as check_file
from ddptrain.config import Config, resolve, resolve_with_origins
from ddptrain.distributed import topology as ranks
from ddptrain.errors import DataError, DataMissing, UsageError, volume_error
from ddptrain.files import dumps_json
from ddptrain.flags import add_config, add_place, add_verb, chosen, whole, worlds_of
from ddptrain.resources import set_torch_defaults
from ddptrain.signals import StopFlag

Main = Callable[[Sequence[str]], int]  # the whole command line
_PLACE = "--checkpoint-dir /tmp/ddptrain-checkpoints"


def add_run_verbs(verbs: Any) -> None:
    """Declare the verbs."""
    config = add_verb(verbs, "config", "what a run would be told", None, example="ddptrain config print --origin")
    config_verbs = config.add_subparsers(metavar="VERB", required=True)
    shown = add_verb(
        config_verbs, "print", "every setting after file, environment and flags", _print_config,
        example="ddptrain config print --origin --epochs 3",
    )  # fmt: skip
    shown.add_argument("--origin", action="store_true", help="say of each value where it came from")
    add_config(shown, [f.name for f in dataclasses.fields(Config)])
    _add_ckpt(verbs)
    why = add_verb(
        verbs, "why", "who is to blame for the last failure, out of the reports that all nodes left", _why,
        example="ddptrain why /tmp/ddptrain-checkpoints",
    )  # fmt: skip
    why.add_argument("directory", metavar="DIR", help="checkpoint or log directory of the run")
    why.add_argument("--json", action="store_true", help="one JSON object")


def _add_ckpt(verbs: Any) -> None:
    ckpt = add_verb(verbs, "ckpt", "list, verify or roll back checkpoints", None, example=f"ddptrain ckpt ls {_PLACE}")
    ckpt_verbs = ckpt.add_subparsers(metavar="VERB", required=True)
    for name, text, run in (
        ("ls", "what is saved, newest first", _list),
        ("verify", "read every checkpoint and compare its digest; 66 if one is damaged", _verify_checkpoints),
    ):
        verb = add_verb(ckpt_verbs, name, text, run, example=f"ddptrain ckpt {name} {_PLACE}")
        verb.add_argument("--json", action="store_true", help="one JSON array")
        add_config(verb, ["checkpoint_dir"])
    back = add_verb(
        ckpt_verbs, "rollback", "set newer checkpoints aside, so that the next start resumes from an older one",
        _rollback, example=f"ddptrain ckpt rollback --step 50 {_PLACE}",
    )  # fmt: skip
    back.add_argument("--run", dest="only_run", type=whole(1), metavar="N", help="of this run (default: the newest)")
    back.add_argument("--step", type=whole(0), metavar="N", help="this step")
    add_config(back, ["checkpoint_dir"])


def _print_config(arguments: dict[str, Any]) -> int:
    origin = arguments.pop("origin")
    config, origins = resolve_with_origins(os.environ, arguments)
    for name, value in dataclasses.asdict(config).items():
        text = dumps_json(value)
        print(f"{name + ': ' + text:<40} # {origins.get(name, 'default')}" if origin else f"{name}: {text}")
    return 0


def _directory(arguments: dict[str, Any]) -> Path:
    config = resolve(os.environ, arguments)
    if not config.checkpoint_dir:
        raise UsageError("no --checkpoint-dir (or DDPJOB_CHECKPOINT_DIR)", next_step="name the directory")
    return Path(config.checkpoint_dir)


def _list(arguments: dict[str, Any], *, verify: bool = False) -> int:

    as_json = arguments.pop("json")
    return show(_directory(arguments), verify=verify, as_json=as_json)


def _verify_checkpoints(arguments: dict[str, Any]) -> int:
    return _list(arguments, verify=True)


def _rollback(arguments: dict[str, Any]) -> int:

    run, step = arguments.pop("only_run"), arguments.pop("step")
    return rollback(_directory(arguments), run=run, step=step)


def _why(arguments: dict[str, Any]) -> int:
    from ddptrain.launcher.failure_report import explain

    return explain(Path(arguments["directory"]), as_json=arguments["json"])


def add_data_verbs(verbs: Any) -> None:
    """Declare the verbs."""
    data = add_verb(
        verbs, "data", "fetch or verify the MNIST files", None, example="ddptrain data verify --data-dir ./data"
    )
    data_verbs = data.add_subparsers(metavar="VERB", required=True)
    default = os.environ.get("DDPJOB_DATA_DIR")
    for name, text, run in (("fetch", "download what is missing", _fetch), ("verify", "check the files", _verify_data)):
        verb = add_verb(data_verbs, name, text, run, example=f"ddptrain data {name} --data-dir ./data")
        verb.add_argument(
            "--data-dir", default=default, required=not default, metavar="DIR",
            help="of the four files [DDPJOB_DATA_DIR]",
        )  # fmt: skip
        if name == "fetch":
            verb.add_argument("--url", action="append", metavar="URL", help="base URL of a mirror; may be repeated")
            verb.add_argument(
                "--tries", type=whole(1, 10), metavar="N", help="how often to ask each mirror (default: 3)"
            )


def _fetch(arguments: dict[str, Any]) -> int:
    from ddptrain.data import download as fetch

    stop = StopFlag()
    stop.install()
    with stop.interruptible("data"):
        mirrors, tries = arguments["url"] or fetch.MIRRORS, arguments["tries"] or fetch.TRIES
        fetch.fetch(arguments["data_dir"], mirrors=mirrors, tries=tries)
    return _verify_data(arguments)


def _verify_data(arguments: dict[str, Any]) -> int:
    """Print one line per file; returns 0, or 66 if any is absent or not MNIST's."""
    from ddptrain.data.mnist import MNIST_FILES, find, read_content  # late: NumPy would delay every help

    data_dir = arguments["data_dir"]
    good = True
    print(f"{'file':<26}{'bytes':>12}  {'sha256 of content':<18}verdict")
    for file in MNIST_FILES:
        try:
            content = read_content(Path(data_dir), file)
            digest = hashlib.sha256(content).hexdigest()
            size, verdict = f"{len(content):,}", "ok" if digest == file.sha256 else "not MNIST's content"
        except DataError as error:
            absent = find(Path(data_dir), file) is None
            size, digest, verdict = "-", "-", "absent" if absent else str(error)
        good &= verdict == "ok"
        print(f"{file.name:<26}{size:>12}  {digest[:16]:<18}{verdict}")
    if not good:
        print(f"next:  ddptrain data fetch --data-dir {data_dir}")
    return 0 if good else DataError.code


_COMPARED = {"data": "digits"}  # defaults of ``compare`` that differ: it proves as much with the set that all have


def add_model_verbs(verbs: Any, main: Main) -> None:
    """Declare the verbs; ``compare`` and ``bench`` run whole commands through ``main`` in forked processes."""
    infer = add_verb(
        verbs,
        "infer",
        "a checkpoint's answer for every sample, in index order; alone or under torchrun",
        _infer,
        example="ddptrain infer --checkpoint-dir /tmp/ddptrain-checkpoints --out /tmp/ddptrain-answers.csv",
    )
    infer.add_argument("--out", required=True, metavar="FILE", help="CSV: index,label,predicted,probability")
    infer.add_argument("--split", choices=("test", "train"), default="test", help="which samples (default: test)")
    add_place(infer)
    add_config(infer, ["checkpoint_dir", "data_dir", "device", "backend", "threads", "rendezvous_timeout"])
    predict = add_verb(
        verbs,
        "predict",
        "which digit a PNG image shows",
        _predict,
        example="ddptrain predict /tmp/digit.png --checkpoint-dir /tmp/ddptrain-checkpoints",
    )
    predict.add_argument("images", nargs="+", metavar="PNG", help="8-bit grey or RGB, any size, dark or light ink")
    predict.add_argument("--weights", default="", metavar="FILE", help="a state_dict or checkpoint of --model")
    predict.add_argument("--json", action="store_true", help="one JSON object per image, with all probabilities")
    add_config(predict, ["checkpoint_dir", "model", "threads"])
    export = add_verb(
        verbs,
        "export",
        "a checkpoint's model for other programs",
        _export,
        example="ddptrain export --checkpoint-dir /tmp/ddptrain-checkpoints --format program --out /tmp/ddptrain.pt2",
    )
    export.add_argument("--out", required=True, metavar="FILE", help="file to write")
    export.add_argument(
        "--format", choices=("state-dict", "program"), default="state-dict",
        help="state-dict, or a program of torch.export that takes raw pixels (default: state-dict)",
    )  # fmt: skip
    add_place(export)
    add_config(export, ["checkpoint_dir"])
    compare = add_verb(
        verbs,
        "compare",
        "prove that the number of ranks does not change the training",
        functools.partial(_compare, main),
        example="ddptrain compare --worlds 1,2 --checks gradients --ways ddp",
    )
    _add_compare_flags(compare)
    bench = add_verb(
        verbs,
        "bench",
        "time to accuracy over seeds and ranks, and speed beside plain loops",
        functools.partial(_bench, main),
        example="ddptrain bench --data digits --seeds 1 --worlds 1 --parts accuracy",
    )
    _add_bench_flags(bench)


def _infer(arguments: dict[str, Any]) -> int:
    stop = StopFlag()
    stop.install()
    if ranks.needs_launch(os.environ):
        raise UsageError(
            "infer is one rank, but NNODES × NPROC_PER_NODE says several and RANK is not set",
            hint="every pod would judge everything and write the same file",
            next_step="torchrun --nnodes N --nproc-per-node M … -m ddptrain infer …",
        )
    set_torch_defaults()
    from ddptrain.inference import Wanted
    from ddptrain.reporting.console import Console
    from ddptrain.worker import run_here

    wanted = Wanted(
        Path(arguments.pop("out")), arguments.pop("split"), arguments.pop("only_run"), arguments.pop("step")
    )
    config, place = resolve(os.environ, arguments), ranks.from_rank_environment(os.environ)
    return run_here(config, place, Console(place.rank, None), stop, job="infer", wanted=wanted)


def _predict(arguments: dict[str, Any]) -> int:
    set_torch_defaults()
    from ddptrain.inference import predict

    images, weights, as_json = arguments.pop("images"), arguments.pop("weights"), arguments.pop("json")
    return predict(resolve(os.environ, arguments), images, weights_file=weights, as_json=as_json)


def _export(arguments: dict[str, Any]) -> int:
    set_torch_defaults()
    from ddptrain.inference import export

    out, kind = Path(arguments.pop("out")), arguments.pop("format")
    run, step = arguments.pop("only_run"), arguments.pop("step")
    return export(resolve(os.environ, arguments), out, kind, run=run, step=step)


def _compare(main: Main, arguments: dict[str, Any]) -> int:
    set_torch_defaults()
    from ddptrain.experiments import compare

    worlds, checks, ways = (arguments.pop(name) for name in ("worlds", "checks", "ways"))
    steps, as_json, keep = (arguments.pop(name) for name in ("steps", "json", "keep"))
    config = resolve(os.environ, arguments, defaults=_COMPARED)
    plan = compare.Plan(
        worlds=worlds_of(worlds),
        checks=chosen("--checks", checks or ",".join(compare.CHECKS), compare.CHECKS),
        ways=chosen("--ways", ways or ",".join(compare.WAYS), compare.WAYS),
        data=config.data,
        data_dir=config.data_dir,
        model=config.model,
        steps=steps,
    )
    with _stoppable("compare"):
        return compare.compare(plan, main, as_json=as_json, keep=keep)


def _bench(main: Main, arguments: dict[str, Any]) -> int:
    set_torch_defaults()
    from ddptrain.experiments import bench

    seeds, worlds, parts, as_json = (arguments.pop(name) for name in ("seeds", "worlds", "parts", "json"))
    config = resolve(os.environ, arguments)
    plan = bench.Plan(
        data=config.data,
        data_dir=config.data_dir,
        seeds=seeds,
        worlds=worlds_of(worlds),
        parts=chosen("--parts", parts or ",".join(bench.PARTS), bench.PARTS),
        batch=config.global_batch,
    )
    with _stoppable("bench"):
        return bench.bench(plan, main, as_json=as_json)


def _stoppable(phase: str) -> contextlib.AbstractContextManager[None]:
    """Inside, a signal ends the running trial, and what was written for it is removed."""
    stop = StopFlag()
    stop.install()
    return stop.interruptible(phase)


def _add_bench_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds", type=whole(1, 1000), default=5, metavar="N", help="runs per number of ranks (default: 5)"
    )
    parser.add_argument("--worlds", default="1,2", metavar="N,N", help="numbers of ranks (default: 1,2)")
    parser.add_argument("--parts", metavar="A,B", help="accuracy,throughput,tutorial (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    add_config(parser, ["data", "data_dir", "batch_size"])


def _add_compare_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worlds", default="1,2,4", metavar="N,N", help="numbers of ranks (default: 1,2,4)")
    parser.add_argument("--checks", metavar="A,B", help="losses,gradients,bits,resume (default: all)")
    parser.add_argument("--ways", metavar="A,B", help="ddp,manual,bucketed,accum,zero (default: all)")
    parser.add_argument(
        "--steps", type=whole(1, 100_000), default=100, metavar="N", help="at least, in whole epochs (default: 100)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--keep", default="", metavar="DIR", help="leave every run's directory there")
    add_config(parser, ["data", "data_dir", "model"], defaults=_COMPARED)


def listing(root: Path, *, verify: bool) -> list[dict[str, Any]]:
    """One row per checkpoint, newest first: run, step, what its manifest says, and the verdict.

    Args:
        verify: read the contents and compare the digests; otherwise ``verdict`` is ``not verified``.
    Raises:
        DataError: the directory is absent, or holds no checkpoint.
    """
    rows: list[dict[str, Any]] = []
    with reading(root):
        for run in run_numbers(root) if root.is_dir() else []:
            for step, path in manifests(root, run):
                try:
                    verdict = (check_file(path)[0] or "ok") if verify else "not verified"
                except FileNotFoundError:
                    continue  # retired by a training that runs
                rows.append({"run": run, "step": step, **_told(path), "verdict": verdict})
    if not rows:
        raise DataMissing(
            f"no checkpoint in {root}",
            hint="runs are folders run-000001, run-000002 … in there",
            next_step="name the --checkpoint-dir of a training",
        )
    return rows


def _told(manifest_path: Path) -> dict[str, Any]:
    """What a manifest says that is worth a column; None for what it does not say, or not as a manifest would."""
    manifest: Any = None
    with contextlib.suppress(OSError, ValueError):
        manifest = json.loads(manifest_path.read_bytes())
    manifest = manifest if isinstance(manifest, dict) else {}
    evaluation = manifest.get("evaluation")
    values = manifest | {"accuracy": evaluation.get("accuracy") if isinstance(evaluation, dict) else None}
    numbers = {name: values.get(name) for name in ("bytes", "time", "accuracy", "complete", "worldSize")}
    return {name: value if isinstance(value, int | float) else None for name, value in numbers.items()}


def show(root: Path, *, verify: bool, as_json: bool) -> int:
    """Print the listing. Returns 0, or 66 if a verified checkpoint is damaged."""
    rows = listing(root, verify=verify)
    if as_json:
        print(dumps_json(rows))
    else:
        print(f"{'run':>4} {'step':>9} {'accuracy':>9} {'size':>10} {'saved':<19}  {'':<8} verdict")
        for row in rows:
            accuracy = f"{row['accuracy']:.4f}" if row["accuracy"] is not None else "-"
            size = f"{row['bytes'] / 1e6:.2f} MB" if row["bytes"] else "-"
            saved = "-"
            with contextlib.suppress(ValueError, OverflowError, OSError):  # a damaged one may name any moment
                saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])) if row["time"] else "-"
            end = "finished" if row["complete"] else ""
            print(f"{row['run']:>4} {row['step']:>9} {accuracy:>9} {size:>10} {saved:<19}  {end:<8} {row['verdict']}")
    bad = [row for row in rows if row["verdict"] not in ("ok", "not verified")]
    return DataError.code if bad else 0


def rollback(root: Path, *, run: int | None, step: int | None) -> int:
    """Set aside every checkpoint newer than the one named, so that the next start resumes from that. Returns 0.

    Raises:
        UsageError: no step was named. DataError: that checkpoint is absent or damaged. VolumeError: cannot rename.
    """
    if step is None:
        raise UsageError("rollback needs --step", next_step=f"ddptrain ckpt ls --checkpoint-dir {root}")
    found, _ = read_newest(root, run=run, step=step)
    target = (found.run, found.step)
    newer = [(r, s, path) for r in run_numbers(root) for s, path in manifests(root, r) if (r, s) > target]
    for number, at, path in newer:
        try:
            set_aside(path, "rolled-back")
        except OSError as error:
            raise volume_error(error, path) from error
        print(f"run {number}, step {at}: set aside as *.rolled-back")
    print(f"the next start resumes from run {target[0]}, step {target[1]}")
    return 0


def text(found: Mapping[str, Any], *, as_json: bool) -> str:
    """The verdict as one JSON object, or as two tables."""
    if as_json:
        return dumps_json(found)
    lines = [f"{check['verdict']:<8} {check['check']:<16} {check['detail']}" for check in found["checks"]]
    if found["bandwidth"]:
        lines.append(f"\n{'collective':<16}{'bytes':>12}{'ms':>10}{'algbw GB/s':>12}{'busbw GB/s':>12}")
    for row in found["bandwidth"]:
        milliseconds = row["seconds"] * 1000
        lines.append(
            f"{row['collective']:<16}{row['bytes']:>12,}{milliseconds:>10.2f}{row['algbw']:>12.3f}{row['busbw']:>12.3f}"
        )
    verdict = "fit for training" if found["code"] == 0 else f"not fit, code {found['code']}"
    return "\n".join([*lines, "", f"{found['worldSize']} rank(s): {verdict}"])
