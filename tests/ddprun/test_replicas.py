"""Which tensor differs between the ranks, since when, on which of them, and what mistake explains it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddprun import replica_audit
from ddprun.launcher import replicas
from ddprun.launcher.replicas import Replicas
from ddprun.replica_audit import MOST, RING, SIZE, Digests, ReplicaAudit, grouped, read, read_names
from tests.ddprun.replicas import Group, Wrapped, adamw, each_step, flip, model  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("each_step")


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


def trained(group: Group, steps: int = 12) -> Group:
    assert group.run(steps) is None
    return group


def test_equal_replicas_are_compared_and_no_difference_is_reported() -> None:
    group = trained(Group(), 40)
    assert group.replicas.agreed is not None
    assert group.replicas.agreed >= 38 - len(group.plan)
    assert len(group.plan) % 2 == 1
    assert all(len(names) <= MOST for names in group.plan)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", ["0.weight", "1.bias", "7.weight"])
def test_a_flipped_bit_is_found_in_the_first_comparison_of_its_tensor(ranks: int, name: str) -> None:
    group = trained(Group(ranks))
    first = group.first_after(name)
    flip(group.tensor(1, name), 3, 20)
    found = group.run(4 * len(group.plan))
    assert found is not None
    assert (group.name(found), found.step, found.cause) == (name, first, "memory")
    assert found.ranks == ((1,) if ranks > 2 else ())
    assert found.agreed is not None
    assert found.agreed < first
    assert group.replicas.agreed is not None
    assert group.replicas.agreed < first
    expected = "of rank 1 (node 0) differs from most others" if ranks > 2 else "differs between the ranks"
    assert f"{name} {expected} since step {first} (equal at step {found.agreed})" in found.message(name, 8)


def test_a_flipped_bit_of_the_optimizers_state_shows_in_the_parameter() -> None:
    group = trained(Group())
    parameter = group.modules[2][4].weight
    flip(group.optimizers[2].state[parameter]["exp_avg"], 5, 22)
    found = group.run(4 * len(group.plan))
    assert found is not None
    assert (group.name(found), found.ranks, found.cause) == ("4.weight", (2,), "memory")


def _settings(group: Group) -> None:
    group.optimizers[0].param_groups[0]["lr"] = 0.01


def _state(group: Group) -> None:
    for state in group.optimizers[0].state.values():
        state["exp_avg"].zero_()


@pytest.mark.parametrize(("mistake", "cause"), [(_settings, "settings"), (_state, "optimizer")])
def test_a_mistake_of_one_rank_is_named_with_the_rank(mistake, cause: str) -> None:  # type: ignore[no-untyped-def]
    group = trained(Group())
    mistake(group)
    found = group.run(4 * len(group.plan))
    assert found is not None
    assert (found.cause, found.ranks) == (cause, (0,))


@pytest.mark.parametrize("cause", ["gradients", "noSync"])
def test_gradients_that_are_not_exchanged_differ_on_all_ranks(cause: str) -> None:
    group = trained(Group())
    for audit, wrapped in zip(group.audits, group.wrapped, strict=True):
        if cause == "noSync":
            audit.without_synchronization()
            wrapped.require_backward_grad_sync = False
    found = group.run(4 * len(group.plan), is_averaged=False)
    assert found is not None
    assert (found.cause, found.ranks) == (cause, ())


def test_ranks_that_begin_with_different_parameters() -> None:
    group = Group()
    nn.init.normal_(group.modules[1][2].weight)
    found = group.run(40)
    assert found is not None
    assert (group.name(found), found.cause, found.ranks, found.agreed) == ("2.weight", "seed", (1,), None)


def test_the_step_at_which_all_agree_goes_on_after_another_training_in_the_same_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "_SILENT", 5)
    group = trained(Group(), 40)
    for rank in range(3):
        group.optimizers[rank] = adamw(group.modules[rank].parameters())
    trained(group, 40)
    assert group.replicas.agreed is not None
    assert group.replicas.agreed >= 78 - len(group.plan)


def test_a_parameter_that_is_in_no_module_and_began_equal_is_named_by_its_place() -> None:
    group = Group()
    for optimizer in group.optimizers:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4, 2))]})
    group.step()
    for rank, optimizer in enumerate(group.optimizers):
        optimizer.param_groups[1]["params"][0].detach().add_(float(rank))
    found = group.run(60)
    assert found is not None
    assert (group.name(found), found.cause) == ("param_groups[1] params[0] (4×2)", "outside")


def test_a_difference_that_ends_is_withdrawn() -> None:
    group = trained(Group(optimizers=sgd))
    before = group.tensor(1, "7.weight").clone()
    group.tensor(1, "7.weight").add_(1.0)
    assert group.run(4 * len(group.plan)) is not None
    for rank in range(3):
        group.tensor(rank, "7.weight").copy_(before)
    for _ in range(2 * len(group.plan)):
        group.step()
        group.compare()
    assert group.replicas.verdict is None


def test_a_difference_of_tensors_that_are_in_other_groups_now_is_forgotten() -> None:
    group = trained(Group(optimizers=sgd))
    before = group.tensor(1, "7.weight").clone()
    group.tensor(1, "7.weight").add_(1.0)
    assert group.run(4 * len(group.plan)) is not None
    for rank, optimizer in enumerate(group.optimizers):
        group.tensor(rank, "7.weight").copy_(before)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 2))]})
    changed = group.step_number
    for _ in range(4 * len(group.plan)):
        group.step()
        group.compare()
    assert group.replicas.verdict is None
    assert group.replicas.agreed is not None and group.replicas.agreed > changed


def test_one_comparison_is_no_verdict() -> None:
    group = trained(Group(optimizers=sgd))
    saved = group.tensor(1, "7.weight").clone()
    first = group.first_after("7.weight")
    group.tensor(1, "7.weight").add_(1.0)
    while group.step_number <= first:
        group.step()
    for rank in range(3):
        group.tensor(rank, "7.weight").copy_(saved)
    assert group.run(4 * len(group.plan)) is None


def test_buffers_are_not_compared_because_they_may_differ_by_design() -> None:
    group = trained(Group())
    group.modules[1].positions[0] += 1.0
    assert not torch.equal(group.modules[0][1].running_mean, group.modules[1][1].running_mean)
    assert group.run(60) is None


def test_parameters_that_a_script_divides_among_the_ranks_are_no_difference() -> None:
    group = Group()
    for rank, optimizer in enumerate(group.optimizers):
        optimizer.add_param_group({"params": [nn.Parameter(torch.full((4, 2), float(rank)))]})
    assert group.run(60) is None


def test_an_optimizer_of_one_rank_alone_shifts_no_number() -> None:
    group = Group()
    side = adamw([nn.Parameter(torch.ones(2))])
    group.audits[0].begin_step(side)
    trained(group)
    assert group.replicas.agreed is not None and group.replicas.verdict is None


def test_the_script_that_joins_uneven_inputs_is_not_compared() -> None:
    group = Group()
    for wrapped in group.wrapped:
        wrapped._join_config = SimpleNamespace(enable=True)
    group.step()
    assert "join" in read_names(bytes(group.memories[0][RING:]))["abstains"]


def test_another_tensor_that_differs_follows_the_first_one() -> None:
    group = trained(Group(optimizers=sgd))
    before = group.tensor(1, "7.weight").clone()
    group.tensor(1, "7.weight").add_(1.0)
    group.tensor(1, "0.weight").add_(1.0)
    first = group.run(6 * len(group.plan))
    assert first is not None
    other = "0.weight" if group.name(first) == "7.weight" else "7.weight"
    source = before if other == "0.weight" else group.tensor(0, "0.weight").clone()
    for rank in range(3):
        group.tensor(rank, group.name(first)).copy_(source)
    for _ in range(6 * len(group.plan)):
        group.step()
        group.compare()
    found = group.replicas.verdict
    assert found is not None and group.name(found) == other


def test_ranks_with_different_paces_are_compared_at_common_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    group = trained(Group())
    monkeypatch.setattr(replica_audit, "_MOST_STEPS", 4)
    for known in group.audits[1]._known.values():
        known.cost = 1e30
    flip(group.tensor(1, "7.weight"), 3, 20)
    found = group.run(12 * len(group.plan))
    assert found is not None
    assert group.name(found) == "7.weight"


def test_tensors_of_equal_elements_differ_in_their_digests() -> None:
    group = Group(module=nn.Sequential(nn.Linear(4, 4, bias=False)))
    group.tensor(1, "0.weight").fill_(2.0)
    for rank in (0, 2):
        group.tensor(rank, "0.weight").fill_(1.0)
    for optimizer in group.optimizers:
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["weight_decay"] = 0.0
    found = group.run(20)
    assert found is not None
    assert found.ranks == (1,)


def large(kind: str) -> nn.Parameter:
    """Return a parameter of 240 elements with memory in another order than they have."""
    if kind == "with gaps":
        return nn.Parameter(torch.randn(20, 24)[:, ::2])
    if kind == "channels_last":
        return nn.Parameter(torch.randn(2, 3, 4, 10).to(memory_format=torch.channels_last))
    return nn.Parameter(torch.randn(2, 120).t() if kind == "transposed" else torch.randn(2, 120))


@pytest.mark.parametrize("kind", ["long rows", "transposed", "with gaps", "channels_last"])
def test_all_parts_of_a_large_tensor_are_compared(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_audit, "_ELEMENTS", 100)
    module = nn.Sequential(nn.Linear(16, 4))
    module.register_parameter("large", large(kind))
    group = trained(Group(module=module))
    parts = list(replica_audit._Tensor("large", group.modules[2].large).parts())
    assert max(each.elements().numel() for each in parts) <= 100
    assert sum(each.elements().numel() for each in parts) == 240
    assert sum(names.count("large") for names in group.plan) == len(parts)
    last = parts[-1].elements()
    last[(-1,) * last.ndim] += 1.0
    found = group.run(6 * len(group.plan))
    assert found is not None
    assert (group.name(found), found.ranks) == ("large", (2,))


@pytest.mark.parametrize("kind", ["channels_last", "bfloat16", "float8", "complex64", "tied", "scalar"])
def test_all_kinds_of_tensors_have_digests(kind: str) -> None:
    module: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    if kind == "channels_last":
        module.register_parameter("filter", nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)))
    elif kind == "tied":
        module[0].weight = nn.Parameter(module[1].weight.detach().repeat(4, 1))
        module.register_parameter("filter", module[0].weight)
    else:
        kinds = {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn, "complex64": torch.complex64}
        value = torch.randn(()) if kind == "scalar" else torch.randn(6).to(kinds[kind])
        module.register_parameter("filter", nn.Parameter(value))
    group = trained(Group(module=module))
    flip(group.tensor(1, "filter"), 0, 5)
    found = group.run(20)
    assert found is not None
    assert group.name(found) == "filter"


@pytest.mark.parametrize("case", ["part of the ranks", "sharded", "averaged"])
def test_ranks_whose_parameters_are_not_to_be_equal_abstain_and_say_why(case: str) -> None:
    group = Group()
    for audit, wrapped, module in zip(group.audits, group.wrapped, group.modules, strict=True):
        if case == "part of the ranks":
            wrapped.process_group = SimpleNamespace(size=lambda: 2)
        elif case == "sharded":
            module[0].weight._local_tensor = None
        else:
            audit.abstain("the ranks average their parameters from time to time")
    nn.init.normal_(group.modules[1][2].weight)
    assert group.run(20) is None
    assert read(bytes(group.memories[0])) == []
    assert read_names(bytes(group.memories[0])[replica_audit.RING :])["abstains"]


def test_ranks_that_train_different_models_are_not_compared() -> None:
    group = Group(ranks=2)
    group.modules[1] = group.wrapped[1].module = model(width=8)
    group.optimizers[1] = adamw(group.modules[1].parameters())
    assert group.run(30, is_averaged=False) is None


def test_an_optimizer_that_trains_no_replica_is_not_compared() -> None:
    group = Group()
    for rank in range(3):
        own = nn.Linear(4, 4)
        optimizer = sgd(own.parameters())
        for _ in range(20):
            group.audits[rank].begin_step(optimizer)
    assert group.compare() is None
    assert read(bytes(group.memories[0])) == []


def test_a_tensor_that_cannot_be_read_ends_the_audit_and_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group()
    monkeypatch.setattr(torch, "hash_tensor", lambda _: None)
    assert group.run(20) is None
    assert all(audit._is_off for audit in group.audits)


def test_a_process_that_does_not_speak_for_the_rank_records_nothing() -> None:
    memory, group = bytearray(SIZE), Group(2)
    audit = ReplicaAudit(memoryview(memory), 2, lambda: group.wrapped[:1], lambda: False, lambda: 0)
    optimizer = group.optimizers[0]
    for _ in range(20):
        audit.begin_step(optimizer)
    assert not any(memory)


@pytest.mark.parametrize(
    "record", [[], [1] * 16, [1, 0, 1.0, *[1] * 14], [1, 1, 1, *[1] * 14], [1, 1, 1.0, *["x"] * 14]]
)
def test_a_message_with_other_content_is_refused(record: list[object]) -> None:
    good = Digests(1, 4, 2.5, 3, 5, 6, 7, 8, 9, tuple(range(MOST)))
    assert Digests.checked(good.wire()) == good
    with pytest.raises((ValueError, TypeError)):
        Digests.checked(record)


def test_ranks_of_which_one_is_missing_are_not_compared() -> None:
    replicas = Replicas(3)
    for rank in range(2):
        replicas.take(rank, [Digests(1, 4, 1.0, 3, 5, 0, 7, 8, 0, (rank,) * MOST)] * 2)
    replicas.turn()
    assert replicas._compared == {}


@pytest.mark.parametrize("where", ["of the first optimizer", "of the second optimizer"])
def test_no_step_is_agreed_if_a_parameter_has_no_digest(where: str) -> None:
    group = Group()
    others = [[nn.Parameter(torch.ones(2))] for _ in group.modules]
    for module, audit, wrapped, other in zip(group.modules, group.audits, group.wrapped, others, strict=True):
        second = Wrapped(**vars(wrapped) | {"module": nn.ParameterList(other)})
        (module if where == "of the first optimizer" else second.module).register_parameter(
            "wide", nn.Parameter(torch.zeros(2, dtype=torch.complex128))
        )
        audit._modules = partial(list, [wrapped, second])
    seconds = [adamw(other) for other in others]
    for _ in range(40):
        group.step()
        for audit, second in zip(group.audits, seconds, strict=True):
            audit.begin_step(second)
        assert group.compare() is None
    assert group.replicas.agreed is None
    group.tensor(1, "7.weight").add_(1.0)
    assert group.run(40) is not None, "the others are compared"


def test_records_of_one_rank_do_not_displace_each_other_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    now, group = 0.0, Group(2, nn.Sequential(*(nn.Linear(2, 2) for _ in range(17))))
    monkeypatch.setattr(replica_audit, "monotonic", lambda: now)
    *optimizers, one_more = [adamw(layer.parameters()) for layer in group.modules[0]]
    for step in range(1, 1201):
        now = 0.01 * step
        for optimizer in optimizers:
            group.audits[0].begin_step(optimizer)
    found = read(bytes(group.memories[0]))
    assert {one.optimizer for one in found} == set(range(1, 17)), "all optimizers are audited"
    assert found[-1].time - found[0].time > 1.0, "a launcher reads once a second"
    group.audits[0].begin_step(one_more)
    assert "more than 16 optimizers" in read_names(bytes(group.memories[0])[RING:])["abstains"]


def test_a_record_that_is_half_written_is_not_read() -> None:
    group = Group(2)
    side = adamw(group.modules[0].parameters())
    for _ in range(40):
        group.step()
        group.audits[0].begin_step(side)
        group.audits[0].begin_step(side)
    before = bytes(group.memories[0])
    for _ in range(20):
        group.audits[0].begin_step(side)
    after = bytes(group.memories[0])
    whole = {*read(before), *read(after)}
    for end in range(0, RING, 8):
        assert {*read(after[:end] + before[end:])} <= whole


def test_the_part_of_a_sharded_optimizer_that_is_one_ranks_takes_no_number() -> None:
    group = Group()
    group.optimizers[0].optim = part = adamw(group.modules[0].parameters())  # type: ignore[attr-defined]
    for _ in range(10):
        group.step()
        group.audits[0].begin_step(part)
    assert {one.optimizer for one in read(bytes(group.memories[0]))} == {1}


def test_a_parameter_that_the_script_keeps_out_of_the_exchange_may_differ() -> None:
    group = Group()
    for wrapped in group.wrapped:
        wrapped.parameters_to_ignore.add("7.weight")
    group.tensor(1, "7.weight").add_(1.0)
    assert trained(group, 40).replicas.agreed is not None


def test_an_optimizer_that_makes_no_steps_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_SILENT", 3)
    found = Replicas(2)
    for count in range(1, 12):
        for rank in range(2):
            differs = rank if count < 4 else 0
            record = Digests(1 + (count >= 4), count, 1.0, count, 5, 0, 7, 8, 1 << 16, (1 + differs,) * MOST)
            found.take(rank, [record])
        found.turn()
        assert (found.verdict is not None) == (1 < count < 7)
    assert {optimizer for optimizer, *_ in found._agreed} == {2}
    assert found.agreed == 11


def test_the_step_at_which_all_agree_is_that_of_the_slowest_round() -> None:
    found = Replicas(2)
    for count in range(1, 12):
        for rank in range(2):
            quick = Digests(1, count, 1.0, count, 5, 0, 7, 8, 1 << 16, (1,) * MOST)
            slow = Digests(2, count, 1.0, count, 6, count % 2, 7, 8, 2 << 16, (1,) * MOST)
            found.take(rank, [quick, slow][: 1 + (count in (2, 3))])
        found.turn()
    assert found.agreed == 2


def test_each_group_has_tensors_of_one_device() -> None:
    kinds = ["cpu", "meta", "cpu", "meta"]
    tensors = [replica_audit._Tensor(str(place), torch.ones(2, device=kind)) for place, kind in enumerate(kinds)]
    assert [[each.name for each in group] for group in grouped(tensors)] == [["0", "2"], ["1", "3"], []]


def test_groups_are_small_and_odd_in_number() -> None:
    tensors = [replica_audit._Tensor(str(number), torch.ones(2)) for number in range(20)]
    assert [len(group) for group in grouped(tensors)] == [8, 8, 4]
    assert [len(group) for group in grouped(tensors[:16])] == [8, 8, 0]
    assert grouped([]) == []
    large = [replica_audit._Tensor("", torch.ones(replica_audit._ELEMENTS // 2)) for _ in range(6)]
    assert [len(group) for group in grouped(large)] == [2, 2, 2]
