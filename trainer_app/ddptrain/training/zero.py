"""``--zero``: the optimizer's state divided among the ranks (ZeRO stage 1, Rajbhandari et al., arXiv:1910.02054).

Each rank updates some of the parameters, holds the optimizer's state for those alone, and broadcasts them. A parameter
is never divided, because Muon needs whole matrices, and its update does not depend on other parameters. The weights
are therefore those of the optimizer without ``--zero``, bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddprun.distributed.process_group import Group
from ddptrain.training.optim import Optimizer, ParameterState


class ShardedOptimizer(Optimizer):
    """An optimizer whose state is divided among the ranks of ``group``; ``step`` is collective."""

    def __init__(self, inner: Optimizer, group: Group) -> None:
        super().__init__(inner.parameters, inner.groups)
        self._group = group
        self._gathered: dict[int, ParameterState] = {}
        self._owned = owned_by([p.numel() for p in self.parameters], group.world_size)

    def step(self, found_inf: torch.Tensor | None = None) -> None:
        """Update this rank's parameters, then exchange the updated parameters."""
        self._gathered.clear()
        self._update([self.parameters[n] for n in self._owned[self._group.rank]], found_inf)
        with self._group.heartbeat.waiting_in("broadcast of updates"), torch.no_grad():
            for rank, numbers in enumerate(self._owned):
                owned = [self.parameters[n] for n in numbers]
                if not owned:
                    continue
                flat = torch.cat([p.flatten() for p in owned])  # in one exchange
                dist.broadcast(flat, src=rank)
                if rank != self._group.rank:
                    for parameter, part in zip(owned, torch.split(flat, [p.numel() for p in owned]), strict=True):
                        parameter.copy_(part.view(parameter.shape))

    def gather_state(self) -> None:
        """Collect the state of all ranks for the next ``state_dict``, which rank 0 saves; collective."""
        mine = {n: {k: v.cpu() for k, v in s.items()} for n, s in super().state_dict()["state"].items()}
        gathered = self._group.gather_tensors(mine, "gather of optimizer state")
        if self._group.rank == 0:
            self._gathered = {n: state for states in gathered for n, state in states.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that ``gather_state`` collected; only rank 0 has it."""
        whole = super().state_dict()
        return whole | {"state": {n: self._gathered[n] for n in sorted(self._gathered)}}

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        """Keep this rank's part of a whole state."""
        owned = self._owned[self._group.rank]
        super().load_state_dict({"state": {n: s for n, s in loaded["state"].items() if int(n) in owned}})


def owned_by(sizes: Sequence[int], world_size: int) -> list[list[int]]:
    """Return the numbers of each rank's parameters: the largest first, each to the rank with the fewest elements."""
    owned: list[list[int]] = [[] for _ in range(world_size)]
    total = [0] * world_size
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        rank = total.index(min(total))
        owned[rank].append(number)
        total[rank] += sizes[number]
    return [sorted(numbers) for numbers in owned]
