"""What docs/concepts/torch-distributed/corrections.md says about PyTorch, in this process."""

from __future__ import annotations

import importlib.util
import runpy
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import launch
from torch.distributed.run import config_from_args, get_args_parser
from torch.testing._internal.distributed import fake_pg
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddprun.distributed.rendezvous import key_prefix
from ddprun.distributed.topology import Ranks
from ddptrain.data.batches import MEAN, STD
from ddptrain.data.mnist import load
from ddptrain.lesson import SCRIPTS
from tests.ddptrain.builders import REAL, needs_mnist
from tests.processes import free_port

# What the lesson defines; its main does not run.
TUTORIAL = runpy.run_path(str(SCRIPTS / "tutorial.py"))


def test_launch_passes_local_rank_with_a_dash() -> None:
    assert any(str(word).startswith("--local-rank=") for word in _words_of_a_worker())


def test_use_env_only_stops_passing_the_argument() -> None:
    assert not any("local" in str(word) for word in _words_of_a_worker("--use_env"))
    torchrun = config_from_args(get_args_parser().parse_args(["train.py"]))[2]
    assert not any("local" in str(word) for word in torchrun)


def _words_of_a_worker(*flags: str) -> list[str]:
    return list(config_from_args(launch.parse_args([*flags, "train.py"]))[2])


def test_torchrun_restarts_nothing_by_default() -> None:
    assert get_args_parser().parse_args(["train.py"]).max_restarts == 0


@pytest.mark.parametrize("flag", ["--master_adderss=h", "--use_syn"])
def test_torchrun_refuses_flags_that_tutorials_invent(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        get_args_parser().parse_args([flag, "train.py"])
    capsys.readouterr()
    assert get_args_parser().parse_args(["–nnodes", "2", "train.py"]).training_script == "–nnodes"


@pytest.mark.parametrize("method", ["tcp://127.0.0.1:{port}", "file://{folder}/store", "env://"])
def test_init_needs_a_rank_and_a_meeting_point(
    method: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    method = method.format(port=free_port(), folder=tmp_path_factory.mktemp("store"))
    with pytest.raises(ValueError, match=r"rank parameter missing|RANK expected, but not set"):
        dist.init_process_group("gloo", init_method=method)
    if method == "env://":
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        with pytest.raises(ValueError, match="MASTER_ADDR expected, but not set"):
            dist.init_process_group("gloo")


def test_wait_orders_the_stream_under_nccl_says_its_documentation() -> None:
    assert "Letting the current stream block on the completion of the NCCL work" in str(dist.Work.wait.__doc__)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_layer_that_was_not_used_has_no_gradient_to_average() -> None:
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    model[0](torch.ones(1, 2)).sum().backward()
    TUTORIAL["average_gradients"](model)
    assert model[0].weight.grad is not None and model[1].weight.grad is None
    assert not model[0].weight.grad.requires_grad


@pytest.mark.parametrize(("parts", "fraction", "lost", "lost_by_ends"), [(3, 0.3333, 6, 6), (7, 1 / 7, 3, 0)])
def test_a_partition_by_rounded_lengths_loses_samples(
    parts: int, fraction: float, lost: int, lost_by_ends: int
) -> None:
    assert 60_000 - parts * int(fraction * 60_000) == lost
    assert 60_000 - round(60_000 * sum([fraction] * parts)) == lost_by_ends
    partitioner = TUTORIAL["DataPartitioner"]
    whole = partitioner(TensorDataset(torch.arange(60_000)), [fraction] * parts)
    assert sorted(index for part in whole.parts for index in part.indices) == list(range(60_000))
    thirds = partitioner(TensorDataset(torch.arange(60_000)))
    assert [len(part) for part in thirds.parts] == [42_000, 12_000, 6_000]


def test_gradients_divided_again_slow_down_sgd_and_not_adamw() -> None:
    steps = {}
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        for world in (1, 4):
            weight = nn.Parameter(torch.ones(3))
            weight.grad = torch.tensor([0.3, -0.2, 1.0]) / world
            optimizer([weight], lr=0.01).step()
            steps[optimizer, world] = weight.detach() - 1
    torch.testing.assert_close(steps[torch.optim.SGD, 4] * 4, steps[torch.optim.SGD, 1])
    torch.testing.assert_close(steps[torch.optim.AdamW, 4], steps[torch.optim.AdamW, 1])


def test_init_waits_for_all_ranks_because_gloo_connects_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DIST_INIT_BARRIER", raising=False)
    rank_1_is_missing: dict[str, Any] = {"rank": 0, "world_size": 2, "timeout": timedelta(seconds=1)}
    with pytest.raises(dist.DistStoreError):
        dist.init_process_group("gloo", store=dist.HashStore(), **rank_1_is_missing)
    # The import of this store has registered a backend that connects nothing.
    dist.init_process_group("fake", store=fake_pg.FakeStore(), **rank_1_is_missing)
    dist.destroy_process_group()


@needs_mnist
def test_mean_and_deviation_of_mnist_are_the_usual_constants() -> None:
    pixels = torch.tensor(load("mnist", str(REAL)).train_images).float() / 255
    assert (round(pixels.mean().item(), 4), round(pixels.std().item(), 4)) == (MEAN, STD)


def test_a_batch_size_must_be_an_integer() -> None:
    with pytest.raises(ValueError, match="batch_size should be a positive integer"):
        DataLoader(TensorDataset(torch.arange(300)), batch_size=128 / float(2))  # type: ignore[arg-type]


def test_the_sampler_strides_and_shuffles() -> None:
    data = TensorDataset(torch.arange(8))
    for shuffle in (False, True):
        order = [*range(8)] if not shuffle else torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist()
        ranks = [list(DistributedSampler(data, 2, rank, shuffle=shuffle)) for rank in (0, 1)]
        assert ranks == [order[0::2], order[1::2]]
    assert list(DistributedSampler(data, 1, 0)) == order, "shuffle is the default"
    with pytest.raises(ValueError, match="mutually exclusive"):
        DataLoader(data, sampler=DistributedSampler(data, 1, 0), shuffle=True)


def test_without_set_epoch_every_epoch_has_the_same_order() -> None:
    sampler = DistributedSampler(TensorDataset(torch.arange(8)), 2, 0)
    first, second = list(sampler), list(sampler)
    sampler.set_epoch(1)
    assert first == second != list(sampler)


def test_every_node_has_a_local_rank_0() -> None:
    nodes = [Ranks(nnodes=2, node_rank=node, nproc_per_node=2, world_size=4) for node in (0, 1)]
    everyone = [node.of_local_rank(local) for node in nodes for local in (0, 1)]
    assert [rank.rank for rank in everyone if rank.local_rank == 0] == [0, 2]
    assert [rank.rank for rank in everyone if rank.is_zero] == [0]


def test_pipe_is_gone_and_pipelining_is_there() -> None:
    assert importlib.util.find_spec("torch.distributed.pipeline") is None
    assert importlib.util.find_spec("torch.distributed.pipelining") is not None


def test_two_jobs_on_one_port_keep_their_keys_apart() -> None:
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True)
    jobs = [dist.PrefixStore(key_prefix({"DDPJOB_UID": uid}), store) for uid in ("a", "b")]
    jobs[0].set("rank/0", "of a")
    assert jobs[0].check(["rank/0"]) and not jobs[1].check(["rank/0"])


def test_keys_of_the_store_show_neither_job_nor_attempt_nor_token() -> None:
    """A program that reaches the port can list them."""
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True)
    env = {
        "DDPJOB_UID": "0a1b2c3d-uid",
        "DDPJOB_ATTEMPT": "attempt-9",
        "DDPJOB_TOKEN": "secret",
        "TORCHELASTIC_RUN_ID": "run-7",
    }
    others = [env | {name: "another"} for name in env]
    for one in (env, *others):
        dist.PrefixStore(key_prefix(one), store).set("rank/0", "")
    stranger = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    keys = stranger.list_keys()
    assert len(set(keys)) == 1 + len(others)
    assert not any(value in key for key in keys for value in (*env.values(), "another"))
