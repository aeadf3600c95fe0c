"""Verbs that use or judge trained models: ``infer``, ``predict``, ``export``, ``compare``, ``bench``.

``cli`` adds them to its own. torch is imported when one of them runs, not when its help is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import Any

from ddptrain import ranks
from ddptrain.config import resolve
from ddptrain.cpus import calm_torch
from ddptrain.errors import UsageError
from ddptrain.flags import add_config, add_place, add_verb, chosen, whole, worlds_of
from ddptrain.stop import StopFlag

_COMPARED = {"data": "digits"}  # defaults of ``compare`` that differ: it proves as much with the set that all have


def add_to(verbs: Any) -> None:
    """Declare the verbs."""
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
        _compare,
        example="ddptrain compare --worlds 1,2 --checks gradients --ways ddp",
    )
    _add_compare_flags(compare)
    bench = add_verb(
        verbs,
        "bench",
        "time to accuracy over seeds and ranks, and speed beside plain loops",
        _bench,
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
    calm_torch()
    from ddptrain.console import Console
    from ddptrain.entry import run_here
    from ddptrain.infer import Wanted

    wanted = Wanted(
        Path(arguments.pop("out")), arguments.pop("split"), arguments.pop("only_run"), arguments.pop("step")
    )
    config, place = resolve(os.environ, arguments), ranks.from_rank_environment(os.environ)
    return run_here(config, place, Console(place.rank, None), stop, job="infer", wanted=wanted)


def _predict(arguments: dict[str, Any]) -> int:
    calm_torch()
    from ddptrain.predict import predict

    images, weights, as_json = arguments.pop("images"), arguments.pop("weights"), arguments.pop("json")
    return predict(resolve(os.environ, arguments), images, weights_file=weights, as_json=as_json)


def _export(arguments: dict[str, Any]) -> int:
    calm_torch()
    from ddptrain.export import export

    out, kind = Path(arguments.pop("out")), arguments.pop("format")
    run, step = arguments.pop("only_run"), arguments.pop("step")
    return export(resolve(os.environ, arguments), out, kind, run=run, step=step)


def _compare(arguments: dict[str, Any]) -> int:
    calm_torch()
    from ddptrain import compare

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
        return compare.compare(plan, as_json=as_json, keep=keep)


def _bench(arguments: dict[str, Any]) -> int:
    calm_torch()
    from ddptrain import bench

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
        return bench.bench(plan, as_json=as_json)


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
