"""``--cuda-graph``: a whole step (index, cast, forward, backward, update) as a CUDA graph that the host only starts.

On a fast GPU these small networks wait for Python to launch a hundred kernels for each step. A recorded step uses
nothing but tensors on the device: the host writes the indices, the corner, the learning rate and its own flags into
them, and replays the graph, up to ``--log-every`` times before it reads a loss. On a CPU the same functions run
without a recording, so that tests compare them with ``Step``. Follows PyTorch's notes on CUDA graphs.
"""

from collections.abc import Callable

import torch

from ddprun.distributed.process_group import Group
from ddprun.errors import RanksError, UsageError
from ddptrain.config import Config
from ddptrain.data.batches import TrainingBatches
from ddptrain.training.gradient_sync import LOSS, NUMBERS, STOP, GradientSync
from ddptrain.training.optim import Optimizer
from ddptrain.training.step import Step, note_not_finite

Work = Callable[[], None]
WARM_UPS = 3  # runs before the recording: lazy initialization must not be recorded


def record_cuda_graph(work: Work) -> Work:
    """Return a function that replays ``work`` on the GPU; ``work`` runs WARM_UPS times first."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class GraphedStep(Step):
    """Records the step of a full global batch, and replays it; the shorter last batch of an epoch is an ordinary step.

    Args:
        full: size of the global batch that is recorded.
        record: makes a function that repeats the given one.
    """

    def __init__(
        self, batches: TrainingBatches, gradients: GradientSync, optimizer: Optimizer, group: Group, *, full: int,
        record: Callable[[Work], Work] = record_cuda_graph,
    ) -> None:  # fmt: skip
        super().__init__(batches, gradients, optimizer, group)
        self._full, self._record, device = full, record, group.device
        self._indices = torch.zeros(full, dtype=torch.int64, device=device)
        self._corner = torch.zeros(2, dtype=torch.int64, device=device)
        self._learning_rate = torch.zeros((), dtype=torch.float64, device=device)
        self._flags = torch.zeros(NUMBERS - STOP, dtype=torch.float64, device=device)  # stop, seconds
        self._numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=device)
        self._replay: Work | None = None

    def run(self, step: int, learning_rate: float, *, stop: bool, seconds: float) -> torch.Tensor:
        if self._batches.at(step).count != self._full:
            self._gradients.clear()  # a replay leaves its own
            return super().run(step, learning_rate, stop=stop, seconds=seconds)
        self._indices.copy_(self._batches.chosen(step, slice(0, self._full)))
        for target, value in zip(self._corner, self._batches.corner(step), strict=True):
            target.fill_(value)
        for target, number in zip(self._flags, (float(stop), seconds), strict=True):
            target.fill_(number)
        self._learning_rate.fill_(learning_rate)
        self._optimizer.learning_rate = self._learning_rate
        if self._replay is None:
            before = self.found_inf.clone()
            self.found_inf.fill_(1.0)  # a warm-up runs whole steps, which must change neither weights nor state
            self._replay = self._record(self._whole)
            self.found_inf.copy_(before)
        self._replay()
        return self._numbers

    def _whole(self) -> None:
        self._gradients.clear()  # so that the backward pass writes gradients instead of adding to old ones
        piece = self._batches.gather(self._indices, self._corner)
        self._numbers[LOSS] = self._gradients.forward_and_backward(piece, self._full)
        self._numbers[STOP:] = self._flags
        note_not_finite(self.found_inf, self._numbers)
        self._optimizer.step(self.found_inf)


def check_cuda_graph(config: Config, group: Group) -> None:
    """Check that ``--cuda-graph`` is possible, before anything is claimed or loaded.

    Raises:
        RanksError: no GPU.
        UsageError: ranks exchange something, or gradients are accumulated, within what would be recorded.
    """
    if group.device.type != "cuda":
        raise RanksError("--cuda-graph needs CUDA", next_step="remove --cuda-graph to train on a CPU")
    if config.accum > 1 or config.sync == "bitwise" or group.has_process_group:
        raise UsageError(
            "--cuda-graph records the step of a single rank, without --accum and --sync bitwise",
            hint="an exchange between ranks cannot be part of the recording",
            next_step="remove --cuda-graph, or the other flag",
        )
