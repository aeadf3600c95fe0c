"""The second part of ``make gpu``: scripts under ``ddprun`` on a GPU, with NCCL, and what is said of their failures.

Two nodes are two launchers on this machine. NCCL refuses two ranks on one GPU, so their ranks get different values of
NCCL_HOSTID: NCCL takes them for two machines, and connects them by sockets on loopback. Exits with 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ddprun.distributed.topology import free_port
from tests.ddptrain.gpu import print_table
from tests.ddptrain.runs import Run, wait_until

SECONDS = 180.0  # for one case
TOGETHER = 4
FAULT_STEP = 5
SCRIPT = f"""
import datetime, os, sys, time
import torch
import torch.distributed as dist

fault, victim, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3]
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if fault == "too-many" else 0)

def fail():
    if fault in ("raise", "busy"):
        torch.cuda._sleep(2**62 if fault == "busy" else 1)  # a kernel that still runs
        raise ValueError("sample 17 has 3 channels, expected 1")
    if fault == "kill" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)
    if fault == "hang":
        time.sleep(1000)
    if fault == "memory":
        torch.empty(2**50, device=device)
    if fault == "index":
        torch.zeros(3, device=device)[torch.tensor([5], device=device)].sum().item()
    if fault == "kernel":
        torch.cuda._sleep(2**62)
        torch.cuda.synchronize()

torch.cuda.set_device(device)
dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
rank, model = dist.get_rank(), torch.nn.Linear(256, 256).to(device)
model = torch.nn.parallel.DistributedDataParallel(torch.compile(model) if fault == "compile" else model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(800, 256))
workers = dict(num_workers=2, pin_memory=True) if fault == "loader" else dict()
for step, (batch,) in enumerate(torch.utils.data.DataLoader(data, 8, **workers), start=1):
    optimizer.zero_grad()
    loss = model(batch.to(device)).square().mean()
    loss.backward()
    optimizer.step()
    if (step, rank) == ({FAULT_STEP}, victim):
        fail()
    loss.item()
    time.sleep(0.02)
model = loss = None
dist.destroy_process_group()
"""
GRAPH = """
import time, torch
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
data = torch.randn(8, 256, device="cuda")
def step():
    optimizer.zero_grad(set_to_none=True)
    model(data).square().mean().backward()
    optimizer.step()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
for _ in range(250):
    graph.replay()
    time.sleep(0.1)
torch.cuda.synchronize()
"""
IN_PLACE = {"DDPJOB_INPLACE_RESTARTS": "3"}
HANGS = ("--hang-timeout", 10)
DONE, RAISED = (0, None), (1, "ValueError")


@dataclass(frozen=True)
class Case:
    """One run of a script or of ``ddptrain``.

    Attributes:
        ends: exit code, and kind of the termination report, of each node's launcher.
        names: text in the message or place of the last node's report.
        fault: of SCRIPT, of the last rank; another text is a script of its own.
        digits: in place of a script, flags of ``ddptrain launch``.
        lives: of node 0's report: the number of the last one.
        innocent: node 0's report blames another node.
        kills, stops: the last node's launcher is killed, or all get SIGTERM, when some steps have been made.
    """

    ends: tuple[tuple[int, str | None], ...]
    names: str = ""
    fault: str = "none"
    nproc: int = 1
    backend: str = "nccl"
    flags: tuple[object, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    digits: tuple[object, ...] | None = None
    lives: int = 1
    kills: bool = False
    stops: bool = False
    innocent: bool = False


CASES = {
    "one rank": Case((DONE,)),
    "two forked ranks, gloo": Case((DONE,), nproc=2, backend="gloo"),
    "DataLoader with workers": Case((DONE,), fault="loader", nproc=2, backend="gloo"),
    "torch.compile": Case((DONE,), fault="compile", nproc=2, backend="gloo"),
    "replays of a CUDA graph": Case((DONE,), fault=GRAPH, flags=HANGS),
    "two nodes": Case((DONE, DONE)),
    "exception": Case((RAISED,), "sample 17", "raise"),
    "exception beside a kernel": Case((RAISED,), "sample 17", "busy"),
    "GPU memory": Case(((1, "GPUOutOfMemory"),), "out of memory", "memory"),
    "assertion of a kernel": Case(((1, "DeviceFailed"),), "device-side assert", "index"),
    "kernel without end": Case(((76, "Hang"),), "train.py:", "kernel", flags=HANGS),
    "two ranks on one GPU": Case(((71, "RanksImpossible"),), "two ranks use one GPU", nproc=2),
    "no GPU visible": Case(((1, "DeviceFailed"),), "No CUDA GPUs", env={"CUDA_VISIBLE_DEVICES": ""}),
    "more ranks than GPUs": Case(
        ((1, "DeviceFailed"),), "invalid device ordinal", "too-many", nproc=torch.cuda.device_count() + 1
    ),
    "killed rank, in place, gloo": Case((DONE,), fault="kill", nproc=2, backend="gloo", env=IN_PLACE, lives=2),
    "killed rank, in place": Case((DONE, DONE), fault="kill", env=IN_PLACE, lives=2),
    "killed launcher, in place": Case(((77, "PeerLost"), (-9, None)), env=IN_PLACE, kills=True),
    "hang of a rank": Case(
        ((76, "Hang"), (76, "Hang")), "rank 1 (node 1) is in phase train", "hang", flags=HANGS, innocent=True
    ),
    "SIGTERM": Case(((75, "Stopped"), (75, "Stopped")), stops=True),
    "ddptrain": Case((DONE, DONE), digits=("--epochs", 2)),
    "ddptrain, killed launcher": Case(
        ((77, "PeerLost"), (-9, None)), digits=("--step-delay", 0.1), env=IN_PLACE, kills=True
    ),
    "ddptrain, hang": Case(
        ((76, "Hang"), (76, "Hang")),
        "rank 1 (node 1) is in phase",
        digits=(*HANGS, "--chaos", "hang:1:5"),
        innocent=True,
    ),
    "ddptrain, in place": Case((DONE, DONE), digits=("--chaos", "kill:1:5"), env=IN_PLACE, lives=2),
}


@dataclass
class Ended:
    """A case after the end of its launchers: exit codes and reports by node, and seconds since the fault."""

    codes: list[int]
    reports: list[dict[str, Any]]
    seconds: float
    output: str


def carry_out(case: Case, folder: Path) -> Ended:
    """Start the launchers, kill or stop them if the case says so, and wait for their end."""
    folder.mkdir()
    port, progress = free_port(), free_port()
    processes = [_start(case, folder, node, port, progress) for node in range(len(case.ends))]
    began = time.monotonic()
    try:
        if case.kills or case.stops:
            node = Run(processes[0].pid, folder / "output-0", folder / "termination-0", progress)
            wait_until(lambda: (node.progress() or {"step": -1})["step"] >= FAULT_STEP, "some steps", SECONDS)
            began = time.monotonic()
        if case.kills:
            processes[-1].kill()
        if case.stops:
            for process in processes:
                process.send_signal(signal.SIGTERM)
        codes = [process.wait(SECONDS) for process in reversed(processes)][::-1]
    finally:
        for process in processes:
            process.kill()
    seconds = time.monotonic() - began
    reports = [_report(folder, node) for node in range(len(case.ends))]
    return Ended(codes, reports, seconds, "".join(path.read_text() for path in sorted(folder.glob("output-*"))))


def _start(case: Case, folder: Path, node: int, port: int, progress: int) -> subprocess.Popen[bytes]:
    script = folder / "train.py"
    script.write_text(SCRIPT if "\n" not in case.fault else case.fault)
    world = len(case.ends) * case.nproc
    place = ["--nnodes", len(case.ends), "--node-rank", node, "--nproc-per-node", case.nproc]
    place += ["--master-addr", "localhost", "--master-port", port, "--log-dir", folder / "logs"]
    if case.digits is None:
        command = ["-m", "ddprun", *place, *case.flags, script, case.fault, world - 1, case.backend]
    else:
        data = ("--data", "digits", "--device", "cuda", "--backend", "nccl")
        command = ["-m", "ddptrain", "launch", *place, *data, *case.digits]
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("PET_", "DDP"))}
    env = kept | {
        "DDPJOB_CHECKPOINT_DIR": str(folder / "checkpoints"), "DDPJOB_UID": folder.name, "DDPJOB_ATTEMPT": "1",
        "DDPJOB_PROGRESS_PORT": str(progress), "DDPJOB_TERMINATION_LOG": str(folder / f"termination-{node}"),
    }  # fmt: skip
    if len(case.ends) > 1:
        env |= {"NCCL_HOSTID": f"node-{node}", "NCCL_SOCKET_IFNAME": "lo"}
    with (folder / f"output-{node}").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=folder, env=env | case.env, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def _report(folder: Path, node: int) -> dict[str, Any]:
    path = folder / f"termination-{node}"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def problem(case: Case, ended: Ended) -> str:
    """Return what differs from the case; empty for nothing."""
    ends = [(code, report.get("kind")) for code, report in zip(ended.codes, ended.reports, strict=True)]
    if case.innocent and ends[0] == (77, "PeerLost"):  # NCCL reported the lost peer before the launcher ended the rank
        ends[0] = (76, "Hang")
    if ends[0] in ((134, "DeviceFailed"), (134, "GPUOutOfMemory")):  # NCCL's watchdog was faster than Python
        ends[0] = (1, ends[0][1])
    if ends != list(case.ends):
        return f"ended with {ends}, wanted {list(case.ends)}"
    last = ended.reports[-1]
    if case.names not in f"{last.get('message')} {last.get('where')}":
        return f"{case.names!r} is not in {last.get('message')!r}, {last.get('where')!r}"
    if case.innocent and (ended.reports[0]["cause"], ended.reports[0].get("root", {}).get("node")) != ("peer", 1):
        return f"node 0 blames itself: {ended.reports[0].get('message')!r}"
    if ended.reports[0].get("life", 1) != case.lives:
        return f"{ended.reports[0].get('life')} lives, wanted {case.lives}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ddprun.gpu_scripts", description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--together", type=int, default=TOGETHER, help="cases at the same time")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: PyTorch finds no GPU on this machine", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="ddprun-gpu-", ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor(arguments.together) as pool,
    ):
        rows = list(pool.map(lambda name: outcome(name, Path(folder)), arguments.cases))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return print_table(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {nccl}", rows)


def outcome(name: str, folder: Path) -> tuple[str, str, str, str]:
    """Return a row of the table: name, verdict, seconds, and what is said of the failure or differs."""
    case, ended = CASES[name], None
    print(f"running {name} …", file=sys.stderr, flush=True)
    try:
        ended = carry_out(case, folder / name.replace(" ", "-").replace(",", ""))
        differs = problem(case, ended)
    except Exception as error:  # of any kind: the other cases still run
        differs = f"{type(error).__name__}: {error}".partition("\n")[0]
    if differs:
        print(f"{name}: {differs}\n{ended.output[-4000:] if ended else ''}", file=sys.stderr, flush=True)
    said = _said(case, ended) if ended else ""
    seconds = f"{ended.seconds:.0f} s" if ended else ""
    return name, "FAILED" if differs else "ok", seconds, (differs or said)[:120]


def _said(case: Case, ended: Ended) -> str:
    if case.lives > 1 and (lives := ended.reports[0].get("lives")):
        return f"steps again {lives[-1]['recoveryMilliseconds'] / 1000:.1f} s after the kill"
    return next((report["message"] for report in reversed(ended.reports) if report.get("code")), "")


if __name__ == "__main__":
    sys.exit(main())
