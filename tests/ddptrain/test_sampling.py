"""Properties of the global order, its batches and their shards, for any sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.data.batches import TrainingBatches
from ddptrain.data.sampling import Schedule, epoch_order, micro_shards, shard, shift_of
from ddptrain.training.evaluate import chunks_of

SIZES = st.integers(1, 2000)


@given(samples=SIZES, seed=st.integers(0, 2**62), epoch=st.integers(0, 99))
def test_epoch_order_is_a_permutation_that_depends_only_on_seed_and_epoch(samples: int, seed: int, epoch: int) -> None:
    order = epoch_order(samples, seed, epoch)
    assert sorted(order) == list(range(samples))
    assert (order == epoch_order(samples, seed, epoch)).all()


def test_orders_of_different_epochs_and_seeds_differ() -> None:
    orders = [epoch_order(1000, seed, epoch) for seed in range(3) for epoch in range(3)]
    for i, one in enumerate(orders):
        for other in orders[i + 1 :]:
            assert (one != other).mean() > 0.9


def test_epoch_order_equals_a_pinned_value_with_any_numpy_version() -> None:
    assert list(epoch_order(8, 0, 0)) == [6, 5, 7, 1, 2, 4, 3, 0]


@given(count=st.integers(0, 5000), world_size=st.integers(1, 64))
def test_shards_partition_the_batch_in_order_with_sizes_that_differ_by_at_most_one(count: int, world_size: int) -> None:
    parts = [shard(count, rank, world_size) for rank in range(world_size)]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(samples=SIZES, batch=st.integers(1, 300), epochs=st.integers(1, 4))
@settings(max_examples=50)
def test_batches_of_an_epoch_cover_every_sample_once(samples: int, batch: int, epochs: int) -> None:
    schedule = Schedule(samples, batch, epochs, seed=1)
    for epoch in range(epochs):
        steps = range(epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch)
        bounds = [schedule.bounds(step) for step in steps]
        assert {b[0] for b in bounds} == {epoch}
        assert [i for _, first, end in bounds for i in range(first, end)] == list(range(samples))
        assert [schedule.ends_epoch(step + 1) for step in steps] == [False] * (len(steps) - 1) + [True]


@given(seed=st.integers(0, 1000), step=st.integers(0, 10**6), most=st.integers(0, 4))
def test_shift_stays_within_its_bounds(seed: int, step: int, most: int) -> None:
    down, right = shift_of(seed, step, most)
    assert max(abs(down), abs(right)) <= most


def test_all_shifts_are_about_equally_frequent() -> None:
    seen = [shift_of(0, step, 1) for step in range(1800)]
    counts = [seen.count((down, right)) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    assert min(counts) > 140  # 200 expected, four standard deviations off


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 50])
@pytest.mark.parametrize("samples", [1, 70, 359, 10_000])
def test_evaluation_chunks_cover_every_sample_once_at_any_world_size(samples: int, world_size: int) -> None:
    seen = np.concatenate(
        [np.arange(first, end) for rank in range(world_size) for first, end in chunks_of(samples, rank, world_size)]
    )
    assert sorted(seen) == list(range(samples))


@given(count=st.integers(0, 500), world_size=st.integers(1, 8), accum=st.integers(1, 2000))
def test_micro_batches_partition_a_ranks_share_and_are_empty_only_without_samples(
    count: int, world_size: int, accum: int
) -> None:
    for rank in range(world_size):
        part = shard(count, rank, world_size)
        pieces = micro_shards(count, rank, world_size, accum)
        assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(part.start, part.stop))
        assert len(pieces) == max(1, min(accum, part.stop - part.start))


def test_each_global_batch_is_the_next_part_of_the_epochs_order() -> None:
    labels = np.arange(50, dtype=np.uint8)  # a sample's label is its index
    schedule = Schedule(50, 8, 2, seed=3)
    batches = TrainingBatches(
        np.zeros((50, 28, 28), np.uint8), labels, schedule, shift=1, device=torch.device("cpu"), dtype=torch.float32
    )
    for step in range(schedule.total_steps):
        batch, (epoch, first, end) = batches.at(step), schedule.bounds(step)
        _, labels = batch.piece(slice(0, batch.count))
        assert labels.tolist() == epoch_order(50, 3, epoch)[first:end].tolist()
