"""Pipeline parallelism: every rank holds some layers, and parts of the batch pass through the ranks one after another.

    torchrun --nproc-per-node 4 pipeline.py

The batch is divided into microbatches. While rank 1 computes on the first, rank 0 computes on the second. GPipe runs
all forwards, then all backwards, and keeps the activations of every microbatch. 1F1B alternates one forward and one
backward as soon as the last rank has its first loss, and keeps those of at most as many as there are stages. torch's
earlier ``Pipe`` and its form with RPC no longer exist; ``PipelineStage`` sends activations and gradients as messages.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SIZE, BATCH, MICROBATCHES, LAYERS = 8, 16, 8, 4


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    for schedule in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(1234)  # the same on every rank
        whole, mine = layers(), layers()
        mine.load_state_dict(whole.state_dict())
        x, target = torch.randn(2, BATCH, SIZE, dtype=torch.float64)
        loss = mean_loss(whole(x), target)  # the control: the whole model in one process
        loss.backward()

        first, end = LAYERS * rank // world, LAYERS * (rank + 1) // world
        part = mine[first:end]
        # What stages exchange. Without it they ask each other, which needs NumPy.
        micro = x[: BATCH // MICROBATCHES].clone().requires_grad_()
        stage = PipelineStage(part, rank, world, torch.device("cpu"), input_args=micro, output_args=micro)
        pipeline = schedule(stage, n_microbatches=MICROBATCHES, loss_fn=mean_loss)  # divides by their number, too
        losses: list[Tensor] = []
        is_last = rank == world - 1
        inputs, targets = [x] if rank == 0 else [], target if is_last else None
        pipeline.step(*inputs, target=targets, losses=losses if is_last else None)
        if is_last:
            torch.testing.assert_close(torch.stack(losses).mean(), loss, rtol=1e-12, atol=1e-12)
        for parameter, control in zip(part.parameters(), whole[first:end].parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, control.grad, rtol=1e-12, atol=1e-12)
        kept = MICROBATCHES if schedule is ScheduleGPipe else min(world - rank, MICROBATCHES)
        assert part.most == kept, f"rank {rank} kept the activations of {part.most} microbatches, not of {kept}"
        if rank == 0:
            print(
                f"{schedule.__name__}: {LAYERS} layers on {world} ranks, {MICROBATCHES} microbatches: equal gradients; "
                f"rank 0 kept the activations of at most {part.most} microbatches"
            )
    dist.destroy_process_group()


class Layers(nn.Sequential):
    """Layers that count the microbatches whose activations they keep: from a forward to its backward."""

    kept = most = 0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        self.kept += 1
        self.most = max(self.most, self.kept)
        output.register_hook(self.release)
        return output

    def release(self, _: Tensor) -> None:
        self.kept -= 1


def layers() -> Layers:
    return Layers(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(LAYERS))).double()


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


if __name__ == "__main__":
    main()
