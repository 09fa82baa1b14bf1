"""Replicas: several equal pipelines over ranks, which train as one does on the larger mini-batch."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn import functional
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import gpipe
from gpipe import snapshot
from gpipe.snapshot import Snapshot
from helpers import results_of
from test_ranks import batch, make_model


def replicas(ranks, count):
    """Ranks of the same processes, divided into replicas."""
    return gpipe.Ranks(dist.group.WORLD, timeout=20, join_timeout=20, replicas=count)


def sgd(pipe):
    return torch.optim.SGD(pipe.parameters(), lr=0.1)


def states(pipe):
    gradients = {f"gradient of {name}": each.grad for name, each in pipe.named_parameters()}
    return {name: value.clone() for name, value in (pipe.state_dict() | gradients).items() if value is not None}


def train(pipe, whole_batches, part=None):
    """The loss and the state after each step."""
    optimizer = sgd(pipe)
    record = []
    for samples in whole_batches:
        x, y = (each[part(samples)] if part else each for each in batch(samples))
        optimizer.zero_grad()
        loss = pipe.step(x, y, F.cross_entropy)
        norm = pipe.clip_grad_norm_(0.5)
        record.append({"loss": loss, "norm": norm} | states(pipe))
        optimizer.step()
    return record


def train_as_replicas(ranks, count, balance, chunks, batches, meta):
    with replicas(ranks, count) as mesh:
        assert mesh.replicas == count and mesh.replica == mesh.rank % count
        torch.manual_seed(5 + mesh.replica)
        with torch.device("meta" if meta else "cpu"):
            model = make_model()
        pipe = gpipe.GPipe(model, balance, chunks=chunks, deferred_batch_norm=True, schedule="1f1b", group=mesh)
        torch.manual_seed(5)
        return train(pipe, batches, mesh.part)


@pytest.mark.parametrize("count, balance, size", [(2, [8], 2), (2, [4, 4], 4)])
def test_replicas_equal_one_pipeline(count, balance, size):
    batches = [12 * count, 6 * count]
    of_ranks = results_of(size, train_as_replicas, count, balance, 2, batches, False)
    torch.manual_seed(5)
    model = make_model()
    alone = gpipe.GPipe(model, balance, chunks=2 * count, deferred_batch_norm=True, schedule="1f1b")
    torch.manual_seed(5)
    expected = train(alone, batches)
    for rank, record in enumerate(of_ranks):
        for actual, of_alone in zip(record, expected, strict=True):
            for name, value in actual.items():
                torch.testing.assert_close(value, of_alone[name], msg=lambda text: f"{name}: {text}")
                # Replicas are equal bit by bit.
                same = of_ranks[rank // count * count]
                assert torch.equal(value, same[record.index(actual)][name]), name


def test_models_without_memory():
    first, second = results_of(2, train_as_replicas, 2, [8], 2, [8, 12], True)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def backward_and_evaluate(ranks):
    with replicas(ranks, 2) as mesh:
        torch.manual_seed(mesh.rank)
        pipe = gpipe.GPipe(make_model(), [4, 4], chunks=2, deferred_batch_norm=True, group=mesh)
        x, y = batch(9)
        part = mesh.part(9)
        torch.manual_seed(2)
        output = pipe(x[part])
        F.cross_entropy(output, y[part]).backward()
        trained = states(pipe)
        pipe.eval()
        with torch.no_grad():
            evaluated = pipe(x)
        mine = Snapshot(
            model=snapshot.capture_model(pipe), optimizer=snapshot.capture_optimizer(sgd(pipe), pipe), epoch=1
        )
        return trained, evaluated, snapshot.gather(pipe, mine).model


def test_backward_evaluation_and_snapshots():
    results = results_of(4, backward_and_evaluate)
    whole = results[0][2]
    assert all(not result[2] for result in results[1:])
    assert list(whole) == list(make_model().state_dict())
    for rank, (trained, evaluated, _) in enumerate(results):
        assert torch.equal(evaluated, results[0][1])
        assert all(torch.equal(value, results[rank // 2 * 2][0][name]) for name, value in trained.items())
        for name, value in trained.items():
            if name in whole:
                assert torch.equal(value, whole[name])
    model = make_model()
    model.load_state_dict(whole)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(batch(9)[0]), results[0][1])


class Centred(nn.Module):
    """Subtracts the mean over the micro-batches of all replicas, as nn.SyncBatchNorm does, which needs GPUs."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        if self.group is None:
            return x - x.mean(0)
        sums = functional.all_reduce(torch.cat([x.sum(0), torch.ones(1) * len(x)]), group=self.group)
        return x - sums[:-1] / sums[-1]


def centred_model(group):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), Centred(group), nn.ReLU(), nn.Linear(6, 5), Centred(group), nn.Linear(5, 3))


def centre(ranks):
    group, _ = dist.new_subgroups(2)
    with replicas(ranks, 2) as mesh:
        assert dist.get_process_group_ranks(group) == [mesh.rank // 2 * 2, mesh.rank // 2 * 2 + 1]
        pipe = gpipe.GPipe(centred_model(group), [3, 3], chunks=1, schedule="1f1b", group=mesh)
        return train(pipe, [16], mesh.part)


def test_layers_that_communicate_over_replicas():
    alone = train(gpipe.GPipe(centred_model(None), [6]), [16])
    for record in results_of(4, centre):
        for name, value in record[0].items():
            torch.testing.assert_close(value, alone[0][name], msg=lambda text: f"{name}: {text}")


class Overflowing(nn.Module):
    """Has a gradient that is not finite while ``huge`` is set."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.huge = False

    def forward(self, x):
        return x * self.weight * (torch.inf if self.huge else 1.0)


def add_numbers(ranks):
    with replicas(ranks, 2) as mesh:
        pipe = gpipe.GPipe(make_model(), [4, 4], group=mesh)
        first = mesh.rank < 2  # of its replica
        sums = pipe.sum_over_replicas([0.1 * (mesh.replica + 1) if first else 100.0, torch.tensor(2)])
        assert pipe.sum_over_replicas(range(0)) == []
        with pytest.raises(RuntimeError, match="make the same calls"):
            pipe.sum_over_replicas([1.0] * mesh.rank)
        parts = [mesh.part(5, replica) for replica in range(2)]
        assert parts == [slice(0, 3), slice(3, 5)] and mesh.part(5) == parts[mesh.replica]
        return sums


def test_sums_over_replicas():
    assert results_of(4, add_numbers) == [[0.1 + 0.2, 4.0]] * 4
    assert gpipe.GPipe(make_model(), [8]).sum_over_replicas([1, 0.5]) == [1.0, 0.5]


def scale_losses(ranks):
    torch.manual_seed(0)
    scales = []
    layer = Overflowing()
    with gpipe.Ranks(dist.group.WORLD, timeout=20, join_timeout=20, replicas=1 if ranks is None else 2) as mesh:
        pipe = gpipe.GPipe(nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 6)), [1, 2], chunks=2, group=mesh)
        optimizer = sgd(pipe)
        scaler = gpipe.GradScaler(pipe, init_scale=2.0**10, growth_interval=2)
        for huge in (False, True, False, False):
            layer.huge = huge and mesh.rank == 3  # on one rank only
            optimizer.zero_grad()
            before = [each.clone() for each in pipe.parameters()]
            x = torch.arange(48.0).view(8, 6).sin()
            pipe.step(x[mesh.part(8)], x[mesh.part(8)].cos(), lambda out, y: F.mse_loss(out, y), scale=scaler)
            scaler.step(optimizer)
            changed = any(not torch.equal(a, b) for a, b in zip(before, pipe.parameters(), strict=True))
            assert changed is not huge
            scaler.update()
            scales.append(scaler.get_scale())
    return scales


def test_all_ranks_skip_a_step_alike():
    assert results_of(4, scale_losses) == [[1024.0, 512.0, 512.0, 1024.0]] * 4


def use_zero(ranks):
    torch.manual_seed(1)
    x, y = batch(8)
    records = []
    for zero in (False, True):
        with replicas(ranks, 2) as mesh:
            torch.manual_seed(1)
            pipe = gpipe.GPipe(make_model(), [8], chunks=2, deferred_batch_norm=True, group=mesh)
            parameters = pipe.parameters()
            optimizer = (
                ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.1)
                if zero
                else torch.optim.Adam(parameters, lr=0.1)
            )
            for seed in range(3):
                torch.manual_seed(seed)
                optimizer.zero_grad()
                pipe.step(x[mesh.part(8)], y[mesh.part(8)], F.cross_entropy)
                optimizer.step()
            records.append(states(pipe))
    assert all(torch.equal(value, records[1][name]) for name, value in records[0].items())


def test_zero_redundancy_optimizer():
    results_of(2, use_zero)


def load_parts(ranks):
    dataset = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))
    with replicas(ranks, 2) as mesh:
        parts = []
        for epoch in range(2):
            order = RandomSampler(dataset, generator=torch.Generator().manual_seed(epoch))
            batches = gpipe.data.PartSampler(BatchSampler(order, batch_size=3, drop_last=False), mesh)
            assert len(batches) == 4
            parts += DataLoader(dataset, batch_sampler=batches, collate_fn=gpipe.data.collate_part(dataset))
        return parts


def test_replicas_read_their_parts_of_each_mini_batch():
    of_ranks = results_of(2, load_parts)
    seen = []
    for parts in zip(*of_ranks, strict=True):
        assert [len(x) for x, _ in parts] in ([2, 1], [1, 0])
        assert all(x.shape[1:] == (2,) and torch.equal(x[:, 0].long(), 2 * y) for x, y in parts)
        seen += torch.cat([y for _, y in parts]).tolist()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


def drop_with_empty_parts(ranks):
    with replicas(ranks, 4) as mesh:
        pipe = gpipe.GPipe(nn.Sequential(nn.Dropout(0.5)), [1], group=mesh)
        torch.manual_seed(3)
        return pipe(torch.ones(2, 6)[mesh.part(2)])


def test_empty_parts_take_no_random_numbers():
    outputs = results_of(4, drop_with_empty_parts)
    assert [len(output) for output in outputs] == [1, 0, 1, 0]
    torch.manual_seed(3)
    alone = gpipe.GPipe(nn.Sequential(nn.Dropout(0.5)), [1], chunks=2)(torch.ones(2, 6))
    assert torch.equal(torch.cat(outputs), alone)
