"""Count how many mistakes and flipped bits the launchers find, how soon, and how often they accuse a correct training.

    python -m tests.benchmarks.replica_audit --flips 200 --ranks 3

Mistakes and correct trainings are scripts under ddprun. A mistake is found at the first possible comparison if the step
of the verdict is after the mistake, and the step before it at which the tensor was equal is not. Flipped bits are of
replicas in one process, in which each step is audited: there the tensors themselves say what the first possible
comparison is.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed, nn

from ddprun.step_parts import SIZE, StepTimer
from tests.benchmarks.report import describe_machine, parser_of
from tests.ddprun.replicas import Group, Wrapped, audit_each_step, flip
from tests.processes import free_port

SCRIPT = Path(__file__).with_name("replica_audit_script.py")
PLANTED = 40
MISTAKES = {
    "bare module": "gradients",
    "no_sync": "noSync",
    "flag of no_sync": "noSync",
    "learning rate": "settings",
    "weight decay": "settings",
    "another seed": "seed",
    "weights loaded on one rank": "optimizer",
    "parameter outside": "outside",
    "optimizer state lost on one rank": "optimizer",
    "random numbers of the step": "optimizer",
    "write on one rank": "memory",
    "clipping on one rank": "gradients",
}
"""Each with the cause that explains it."""
CORRECT = (
    "bf16", "gradient accumulation", "clipping", "EMA", "BatchNorm", "BatchNorm, buffers not broadcast, frozen later",
    "frozen layers", "tied weights", "two models", "learning rate schedule", "ZeroRedundancyOptimizer",
)  # fmt: skip
_LONGEST, _STEPS = 60.0, 2000
_KINDS = ("parameter",) * 10 + ("state",) * 6


def training(name: str, ranks: int) -> tuple[dict[str, Any], float]:
    """Return the last progress of a training, at its verdict or after _STEPS, and the seconds until then."""
    port, began = free_port(), time.monotonic()
    command = [sys.executable, "-m", "ddprun", "--standalone", "--nproc-per-node", str(ranks), str(SCRIPT)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DDPJOB_PROGRESS_PORT": str(port)}
    seen: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ddprun-replicas-") as folder:
        end = Path(folder) / "end"
        process = subprocess.Popen(
            [*command, str(end), name], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while time.monotonic() - began < _LONGEST and process.poll() is None:
                time.sleep(0.2)
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=2) as answer:
                        seen = json.load(answer)
                except OSError:
                    continue
                if seen["diverged"] or seen["step"] >= _STEPS:
                    break
            return seen, time.monotonic() - began
        finally:
            end.touch()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def differs(group: Group, audited: bool = True) -> bool:
    """Return whether a tensor of the group that the next step audits, or any, is another on one of the ranks."""
    count = group.step_number + 1
    names = group.plan[count % len(group.plan)] if audited else [name for names in group.plan for name in names]
    return any(
        not torch.equal(group.tensor(0, name).view(torch.uint8), group.tensor(rank, name).view(torch.uint8))
        for name in names
        for rank in range(1, group.ranks)
    )  # fmt: skip


def flipped(rng: random.Random) -> tuple[str, str]:
    """Flip a bit, and return what it was of, and whether it is found at the first possible comparison."""
    kind, ranks = rng.choice(_KINDS), rng.choice((2, 3, 4))
    group = Group(ranks)
    group.run(20 + rng.randrange(20))
    rank = rng.randrange(ranks)
    parameter = rng.choice(list(group.modules[rank].parameters()))
    state = group.optimizers[rank].state[parameter]
    tensor = parameter.detach() if kind == "parameter" else state[rng.choice(("exp_avg", "exp_avg_sq"))]
    flip(tensor, rng.randrange(tensor.numel()), rng.randrange(32))
    expected = found = None
    for _ in range(8 * len(group.plan)):
        if expected is None and differs(group):
            expected = group.step_number
        group.step()
        if not all(bool(torch.isfinite(each).all()) for each in group.modules[0].parameters()):
            return kind, "not finite"  # in the next step on all ranks: the loss shows it
        if (found := group.compare()) is not None:
            break
    if expected is None:
        return kind, "reaches no parameter"
    is_right = found is not None and found.step == expected and (ranks == 2 or found.ranks == (rank,))
    return kind, "found" if is_right else f"missed: {expected} {found}"


def cost(width: int, batch: int, steps: int) -> str:
    """Return what the search for slow ranks and the audit cost of a step, in CPU time of the thread that trains."""
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    wrapped = nn.parallel.DistributedDataParallel(layers)
    parts = StepTimer(memoryview(bytearray(SIZE)), 2, lambda: 0.0)
    parts.follow(wrapped)
    size, names = SimpleNamespace(size=lambda: 2), set[str]()  # of two ranks, of which this is one
    replica = Wrapped(module=layers, process_group=size, require_backward_grad_sync=True, parameters_to_ignore=names)
    parts.audit._modules = lambda: [replica]
    optimizer, x = torch.optim.AdamW(layers.parameters()), torch.randn(batch, width)
    spent, began = {"audit": 0.0, "slow ranks": 0.0}, 0.0
    for step in range(steps):
        if step == steps // 5:
            spent, began = dict.fromkeys(spent, 0.0), time.thread_time()
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        before = time.thread_time()
        parts.audit.begin_step(optimizer)
        spent["audit"] += time.thread_time() - before
        optimizer.step()
        before = time.thread_time()
        parts.due -= 1
        if parts.due <= 0:
            parts.look(time.monotonic())
        spent["slow ranks"] += time.thread_time() - before
    total = time.thread_time() - began
    shares = ", ".join(f"{name} {seconds / total:.2%}" for name, seconds in spent.items())
    return f"cost of a step of {1000 * total / (0.8 * steps):.1f} ms: {shares}"


def costs() -> Iterator[str]:
    """Yield the costs of a short and of a long step."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    for width, batch, steps in ((128, 100, 3000), (512, 400, 200)):
        yield cost(width, batch, steps)
    distributed.destroy_process_group()


def main() -> None:
    parser = parser_of("tests.benchmarks.replica_audit", __doc__)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(describe_machine())
    torch.set_num_threads(1)
    for line in chain(costs(), flips(options.flips, options.seed), mistakes(options.ranks), correct(options.ranks)):
        print(line, flush=True)


def flips(count: int, seed: int) -> Iterator[str]:
    """Yield how many flipped bits that reach a tensor of the replicas are found."""
    audit_each_step(setattr)
    rng, outcomes = random.Random(seed), Counter[tuple[str, str]]()
    while sum(number for (_, text), number in outcomes.items() if text.startswith(("found", "missed"))) < count:
        outcomes[flipped(rng)] += 1
    for (kind, text), number in sorted(outcomes.items()):
        yield f"flipped bits, {kind}: {text}: {number}"


def mistakes(ranks: int) -> Iterator[str]:
    """Yield what is found of each mistake."""
    delays = []
    for name, cause in MISTAKES.items():
        seen, seconds = training(name, ranks)
        found, first = seen.get("diverged") or {}, 0 if name == "parameter outside" else PLANTED
        is_first = bool(found) and found["step"] >= first and (found["agreedStep"] or -1) <= first
        right = "right" if is_first and found["cause"] == cause else "WRONG"
        delays.append(seconds)
        yield f"mistake, {name}: {right}: {found.get('message')}"
    yield f"seconds from the start of ddprun to the verdict: median {median(delays):.1f}, most {max(delays):.1f}"


def correct(ranks: int) -> Iterator[str]:
    """Yield what is said of trainings without a mistake."""
    for name in CORRECT:
        seen, _ = training(name, ranks)
        said = "ALARM" if seen["diverged"] else "none"
        yield f"correct, {name}: {said}: all equal at step {seen['agreedStep']} of {seen['step']}"


if __name__ == "__main__":
    main()
