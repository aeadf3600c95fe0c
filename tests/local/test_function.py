"""A function of a notebook as a job of this machine: it trains with PyTorch, and its failure has its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpjob import Client, DDPJob

pytestmark = pytest.mark.timeout(600, func_only=True)

PATIENCE = 240.0


def fit(learning_rate: float, steps: int, fail_at: int = -1) -> float:
    """Train a layer on random data; the ranks must agree on its weights."""
    import torch  # noqa: PLC0415 - the function is sent alone
    import torch.distributed as dist  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for step in range(steps):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == fail_at and dist.get_rank() == 1:
            raise ValueError(f"broken at step {step}")
    weights = [torch.zeros(1, 4) for _ in range(2)]
    dist.all_gather(weights, model.module.weight.data)
    print(f"""trained
{steps} steps with {learning_rate}, ranks agree: {torch.equal(*weights)}""")
    dist.destroy_process_group()
    return 1.0


def test_a_function_trains_on_two_ranks_and_its_failure_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPJOB_STATE_DIR", str(tmp_path))
    client = Client.local()
    job = DDPJob.from_function(fit, {"learning_rate": 0.1, "steps": 5}, nproc_per_node=2, max_restarts=0)
    assert job.name == "fit"
    client.submit(job)
    assert client.wait("fit", timeout=PATIENCE).succeeded, list(client.logs("fit"))
    assert "5 steps with 0.1, ranks agree: True" in "".join(line.text for line in client.logs("fit"))
    arguments = {"learning_rate": 0.1, "steps": 5, "fail_at": 3}
    client.submit(DDPJob.from_function(fit, arguments, name="bad", nproc_per_node=2, max_restarts=0))
    assert not client.wait("bad", timeout=PATIENCE).succeeded
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "raise ValueError(f" in text)
    found = client.explain("bad")
    assert (found.exception, found.rank, found.where) == ("ValueError", 1, f"fit-.py:{line}")
    client.delete("fit")
    client.delete("bad")
