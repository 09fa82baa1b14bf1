"""Trainings over several processes: replicas, snapshots, and parameters that ranks share."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import gpipe
from gpipe import snapshot
from helpers import content_of_snapshot, make_linears, make_tied_model, named_gradients, results_of, tied_batch
from test_ranks import batch, make_model
from test_snapshot import Scale


def replicas(ranks, count, **options):
    """Ranks of the same processes, divided into replicas."""
    return gpipe.Ranks(dist.group.WORLD, timeout=60, join_timeout=60, replicas=count, **options)


def train(pipe, kind, part=None):
    """Returns the last loss and the state after it."""
    optimizer = kind(pipe.parameters(), lr=0.1)
    for samples in (24, 12, 8):
        x, y = (each[part(samples)] if part else each for each in batch(samples))
        optimizer.zero_grad()
        loss = pipe.step(x, y, F.cross_entropy)
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
    return {"loss": loss} | {name: value.clone() for name, value in pipe.state_dict().items()}


def train_as_replicas(ranks, *kinds):
    results = []
    for kind in kinds:
        with replicas(ranks, 2) as mesh:
            assert (mesh.replicas, mesh.replica) == (2, mesh.rank)
            assert [mesh.part(5, replica) for replica in range(2)] == [slice(0, 3), slice(3, 5)]
            torch.manual_seed(5 + mesh.replica)
            pipe = gpipe.GPipe(make_model(), [8], chunks=2, deferred_batch_norm=True, group=mesh)
            assert pipe.team.sum_over_replicas([0.1 * (mesh.replica + 1), torch.tensor(2)]) == [0.1 + 0.2, 4.0]
            torch.manual_seed(5)
            results.append(train(pipe, kind, mesh.part))
    return results


def test_replicas_equal_one_pipeline_also_with_zero_redundancy_optimizer():
    sgd = functools.partial(torch.optim.SGD, momentum=0.9)
    zero = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, momentum=0.9)
    torch.manual_seed(5)
    alone = gpipe.GPipe(make_model(), [4, 4], chunks=4, deferred_batch_norm=True)
    assert alone.team.sum_over_replicas([1, 0.5]) == [1.0, 0.5]
    torch.manual_seed(5)
    whole = train(alone, sgd)
    first, *others = [each for of_rank in results_of(2, train_as_replicas, sgd, zero) for each in of_rank]
    torch.testing.assert_close(first, whole)
    torch.testing.assert_close(others, [first] * 3, rtol=0, atol=0)


def scale_losses(ranks, clips, by_hand):
    torch.manual_seed(0)
    scales = []
    with replicas(ranks, 2, share_outputs=True) as mesh:
        pipe = gpipe.GPipe(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), [1, 1], chunks=2, group=mesh)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        overflows = False
        # On one rank only.
        next(pipe.parameters()).register_hook(lambda gradient: gradient / 0 if overflows and mesh.rank == 3 else gradient)
        for overflows in (False, True, False, False):
            before = [each.clone() for each in pipe.parameters()]
            x, y = (each[mesh.part(8)] for each in torch.rand(2, 8, 6))
            if overflows and by_hand:
                scaler.scale(F.mse_loss(pipe(x), y)).backward()
                pipe.team.spread_overflow()
            else:
                pipe.step(x, y, F.mse_loss, scale=scaler)
            if clips:
                scaler.unscale_(optimizer)
                pipe.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            assert overflows == all(map(torch.equal, before, pipe.parameters()))
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("clips, by_hand", [(True, False), (False, True)])
def test_all_ranks_skip_a_step_alike(clips, by_hand):
    assert results_of(4, scale_losses, clips, by_hand) == [[1024.0, 512.0, 512.0, 1024.0]] * 4


def scale_without_parameters(ranks):
    """The scaler of rank 1, which has the loss but no parameters, keeps its first scale."""
    torch.manual_seed(0)
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), [1, 1], chunks=2, group=ranks)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 - ranks.rank))
    x, y = torch.rand(2, 8, 6)
    pipe.step(x, y, F.mse_loss, scale=scaler)
    gradient = [each.grad / 2.0**10 for each in pipe.parameters()]
    pipe.zero_grad()
    pipe.step(x, y, F.mse_loss)
    torch.testing.assert_close(gradient, [each.grad for each in pipe.parameters()])
    both = gpipe.GPipe(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), [1, 1], group=ranks)
    with pytest.raises((ValueError, RuntimeError), match="scale is 512, but 1024 on another rank"):
        both.step(x, y, F.mse_loss, scale=scaler)
    with pytest.raises(TypeError, match=r"over ranks, give a GradScaler to step\(\), but compute_loss\(\) got it"):
        both.compute_loss(x, y, F.mse_loss, scale=scaler)


def test_the_scale_is_that_of_the_ranks_that_train():
    results_of(2, scale_without_parameters)


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


CASES = [  # balance, schedule, placement, checkpoint, how the model is made
    ([1, 1, 1, 4], "1f1b", "looped", "always", "converted"),  # two workers of a rank borrow
    ([1, 2, 2, 2], "zb_v", "v", "always", "meta"),
    ([2, 2, 2, 2], "interleaved_1f1b", [0, 1, 0, 1], "except_last", "structures"),
]


def make_case(how):
    """Returns the tied model, or the model of test_ranks.py."""
    if how == "structures":
        return make_model()
    with torch.device("meta" if how == "meta" else "cpu"):
        model = make_tied_model()
    return gpipe.to_sequential(model, batch_of(how)[0]) if how == "converted" else model


def batch_of(how, samples=8):
    x, y = batch() if how == "structures" else tied_batch()
    return x[:samples], y[:samples]


def make_pipe(case, group):
    balance, schedule, placement, checkpoint, how = case
    options = {"schedule": schedule, "placement": placement, "checkpoint": checkpoint, "deferred_batch_norm": True}
    return gpipe.GPipe(make_case(how), balance, chunks=4, group=group, **options)


def train_and_save(ranks, source, path):
    """Trains a pipeline of each case, from a snapshot or from the start. Returns losses, norms and outputs, and names."""
    results, names = [], []
    ranks = ranks and replicas(ranks, 1, share_outputs=True)
    for number, case in enumerate(CASES):
        pipe, (x, y) = make_pipe(case, ranks), batch_of(case[-1])
        kind = (torch.optim.SGD, torch.optim.AdamW)[number % 2]
        optimizer = kind([{"params": list(pipe.parameters())}], lr=0.1, weight_decay=0.1)
        named = pipe.named_parameters(), pipe.named_parameters(remove_duplicate=False), pipe.state_dict().items()
        names += [[name for name, _ in each] for each in named]
        if source:
            snapshot.load(source.format(number), pipe, optimizer=optimizer)
        for step in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(pipe(x), y) if step == 1 else pipe.step(x, y, F.cross_entropy)
            if step == 1:
                loss.backward()
            results += [loss.detach(), pipe.clip_grad_norm_(0.5)]
            optimizer.step()
        snapshot.save(path.format(number), pipe, optimizer=optimizer)
        pipe.eval()
        with torch.no_grad():
            results.append(pipe(batch_of(case[-1], 5)[0]))
    return results, names


def test_two_ranks_train_with_the_bits_of_one_process_and_save_its_state(tmp_path):
    for source, name in ((None, "start"), ("start_two", "on")):
        source = source and str(tmp_path / source) + ".{}"
        alone, names = train_and_save(None, source, str(tmp_path / name) + ".{}")
        ranks = results_of(2, train_and_save, source, str(tmp_path / f"{name}_two") + ".{}")
        for results, _ in ranks:
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, alone, strict=True))
        assert [sorted(one + two) for one, two in zip(ranks[0][1], ranks[1][1], strict=True)] == [*map(sorted, names)]
        for number in range(len(CASES)):
            one, two = (content_of_snapshot(tmp_path / f"{folder}.{number}") for folder in (name, f"{name}_two"))
            assert one == two


def evaluate(ranks):
    torch.manual_seed(0)
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)), [1, 1], chunks=2, group=ranks)
    x, y = torch.rand(8, 6), torch.rand(8, 4)
    called = []

    def score(output, target):
        called.append(output.device.type)
        return {"loss": F.mse_loss(output, target), "shape": tuple(output.shape)}

    result = pipe.evaluate(x, y, score)
    output = pipe(x)
    F.mse_loss(output, y.to(output.device)).backward()
    with pytest.raises(RuntimeError, match="^no score" if called else "rank 1 refused the call: RuntimeError: no score"):
        pipe.evaluate(x, y, lambda output, target: (_ for _ in ()).throw(RuntimeError("no score")))
    assert pipe.team.largest(ranks.rank if ranks else 1) == 1  # can be used again
    return result, called, output.device.type, named_gradients(pipe)


def test_only_the_rank_of_the_last_stage_has_outputs_and_evaluates():
    expected, *_, gradients = evaluate(None)
    (first, *of_first, one), (last, *of_last, two) = results_of(2, evaluate)
    assert (of_first, of_last) == ([[], "meta"], [["cpu"], "cpu"])
    assert first == last == expected
    torch.testing.assert_close(one | two, gradients, rtol=0, atol=0)


def keep_generators(ranks, path):
    """Returns whether each rank's generator goes on, and what an LBFGS says at another cut."""
    pipe = gpipe.GPipe(nn.Sequential(*make_linears(5), Scale()), [3, 3], chunks=2, group=ranks)
    lbfgs = torch.optim.LBFGS(pipe.parameters())
    pipe.step(*torch.rand(2, 4, 3), F.mse_loss)
    lbfgs.step(lambda: torch.tensor(1.0))
    torch.manual_seed(ranks.rank)
    snapshot.save(path, pipe, optimizer=lbfgs, extra=ranks.rank)
    drawn, last = torch.rand(4), pipe.partitions[-1][-1] if ranks.rank else Scale()
    calls, last.calls = last.calls, 0
    assert snapshot.load(path, pipe, optimizer=lbfgs).extra == 0
    assert torch.equal(torch.rand(4), drawn) and last.calls == calls
    other = gpipe.GPipe(nn.Sequential(*make_linears(5), Scale()), [2, 4], chunks=2, group=ranks)
    with pytest.raises(ValueError, match="fits the same cut only"):
        snapshot.load(path, other, optimizer=torch.optim.LBFGS(other.parameters()))
    with pytest.raises(TypeError if ranks.rank else RuntimeError, match="step must be an integer"):
        snapshot.save(path, pipe, step="1" if ranks.rank else 1)
    return drawn.tolist()


def test_ranks_have_their_own_generators_and_learn_of_errors(tmp_path):
    one, other = results_of(2, keep_generators, str(tmp_path / "s"))
    assert one != other


def checkpoint(ranks, path, balance):
    pipe = gpipe.GPipe(make_linears(6), balance, chunks=2, group=ranks)
    if balance == [2, 4]:
        with torch.no_grad():
            for each in pipe.parameters():
                each.add_(1)
        torch.distributed.checkpoint.save(pipe.state_dict(), checkpoint_id=path)
    state = pipe.state_dict()
    torch.distributed.checkpoint.load(state, checkpoint_id=path)
    pipe.load_state_dict(state)
    return pipe.state_dict()


@pytest.mark.filterwarnings("ignore")
def test_torch_distributed_checkpoint_takes_the_state_of_ranks(tmp_path):
    expected = {name: value + 1 for name, value in make_linears(6).state_dict().items()}
    for balance in [2, 4], [5, 1]:
        one, two = results_of(2, checkpoint, str(tmp_path), balance)
        whole = one | two
        assert all(torch.equal(whole[name], value) for name, value in expected.items()) and whole.keys() == expected.keys()
    model = make_linears(6).state_dict()
    torch.distributed.checkpoint.load(model, checkpoint_id=str(tmp_path))
    assert all(torch.equal(model[name], value) for name, value in expected.items())
