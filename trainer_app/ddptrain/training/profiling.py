"""``--profile N``: trace N steps of each rank with torch.profiler, as Chrome trace files in the run's folder.

Imported only with the setting. The ranges in a trace come from three places: the phases and collectives that the rank
reports to its heartbeat, hooks on the model (``forward``) and the optimizer (``optimizer``), and PyTorch's operators.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from ddprun.files import share, write_atomically
from ddprun.heartbeat import Heartbeat
from ddptrain.training.optim import Optimizer

WAIT, WARMUP = 5, 2  # steps: the first ones allocate memory, and the profiler's own first ones are slower
_MOST_OF_FAILED = 20  # micro-batches; ending the profiler took 10 to 30 ms for each, and no thread could interrupt it


class StepProfiler:
    """Traces some steps of one rank and closes itself after the last of them. A step begins with the phase ``batch``.

    Args:
        path: the file to write.
        steps: how many steps to trace; fewer if fewer than that are ``left`` in this run.
        accum: micro-batches of a step.
        first: number of the first step of this run.
        log: called with a line that says which steps were traced.
    """

    def __init__(
        self,
        path: Path,
        *,
        steps: int,
        accum: int,
        first: int,
        left: int,
        device: torch.device,
        heartbeat: Heartbeat,
        log: Callable[[str], None],
    ) -> None:
        active = min(steps, left)
        warmup = min(WARMUP, left - active)
        wait = min(WAIT, left - active - warmup)
        self._path, self._heartbeat, self._log = path, heartbeat, log
        self._device, self._accum, self._first = device, accum, first
        self._first_traced, self._last_traced = first + wait + warmup, first + wait + warmup + active - 1
        self._last = first - 1  # the step that has begun last
        self._phase = contextlib.ExitStack()  # holds the range of the current phase
        self._undo: list[Callable[[], None]] = []
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        plan = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        self._profile = profile(
            activities=activities, schedule=lambda step: plan(max(0, step - first)), on_trace_ready=self._write
        )
        self._profile.step_num = first  # so that ProfilerStep#N is step N of the training
        self._has_failed = False
        heartbeat.listener = self

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Also record each forward pass and each step of the optimizer as a range."""
        forward = contextlib.ExitStack()

        def begin(*_: Any) -> None:
            forward.enter_context(record_function("forward"))

        def end(*_: Any) -> None:
            forward.close()

        original = optimizer.step

        def step(found_inf: torch.Tensor | None = None) -> None:
            with record_function("optimizer"):
                original(found_inf)

        hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
        setattr(optimizer, "step", step)  # noqa: B010 - on this object alone
        self._undo = [*(hook.remove for hook in hooks), lambda: delattr(optimizer, "step")]

    def phase(self, name: str) -> None:
        """End the range of the phase before and begin that of ``name``; called by the heartbeat."""
        self._phase.close()
        if name == "batch" and self._last == self._last_traced:
            self.close()
        elif name == "batch":
            self._last += 1
            if self._last == self._first:
                self._profile.start()
            else:
                self._profile.step()
        if self._heartbeat.listener is self:
            self._phase.enter_context(record_function(name))

    @contextlib.contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Record the time in the context as a range; called by the heartbeat."""
        with record_function(name):
            yield

    def close(self) -> None:
        """End the trace and write what it has; nothing happens the second time."""
        if self._heartbeat.listener is not self:
            return
        self._heartbeat.listener = None
        self._phase.close()
        for undo in self._undo:
            undo()
        if self._last >= self._first:
            self._profile.stop()
        if self._last < self._first_traced:
            self._log(f"no profile: the run ended after step {self._last}, before step {self._first_traced}")

    def failed(self) -> None:
        """End and write a short trace of a rank that fails; called by the worker.

        On a GPU the profiler's end waits for the device, which may be what failed.
        """
        if self._device.type == "cpu" and (self._last - self._first_traced + 1) * self._accum <= _MOST_OF_FAILED:
            self._has_failed = True
            self.close()
        else:
            self._log("no profile: the run failed before the last step to trace")

    def _write(self, finished: profile) -> None:
        self._heartbeat.touch()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._has_failed:
                # The profiler blocks all Python threads while it writes: not to a volume that may not answer.
                with tempfile.TemporaryDirectory(prefix="ddptrain-") as folder:
                    trace = Path(folder) / "trace.json"
                    finished.export_chrome_trace(str(trace))
                    write_atomically(self._path, trace.read_bytes(), durable=False)
            else:
                finished.export_chrome_trace(str(self._path))
            share(self._path, 0o664)
            self._log(f"profile: steps {self._first_traced} to {self._last} are in {self._path}, and so for each rank")
        except (OSError, RuntimeError) as error:
            # Not through the log, which is rank 0's: another node's folder may be the one that cannot be written.
            print(f"warning: no profile in {self._path}: {error}", file=sys.stderr, flush=True)
        self._heartbeat.touch()
