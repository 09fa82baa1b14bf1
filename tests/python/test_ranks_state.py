"""The state of pipelines over several processes: snapshots, clipping, timelines."""

import os
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import gpipe
from gpipe import snapshot
from gpipe.snapshot import Snapshot
from helpers import results_of
from test_ranks import batch, make_model

FIRST = ([4, 4], "looped")  # balance and placement
SECOND = ([1, 3, 2, 2], "v")


def make_training(kind, cut, group=None):
    balance, placement = cut
    pipe = gpipe.GPipe(make_model(), balance, placement=placement, chunks=2, deferred_batch_norm=True, group=group)
    groups = [[], []]
    for name, parameter in pipe.named_parameters():
        groups["bias" in name].append(parameter)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {"amsgrad": True} if kind is torch.optim.AdamW else {}
    return pipe, kind([{"params": groups[0], "lr": 0.1}, {"params": groups[1], "lr": 0.2}], lr=0.1, **options)


def step(pipe, optimizer, samples):
    optimizer.zero_grad()
    loss = pipe.step(*batch(samples), F.cross_entropy)
    optimizer.step()
    return loss


def save(pipe, optimizer, path):
    mine = Snapshot(
        model=snapshot.capture_model(pipe),
        optimizer=snapshot.capture_optimizer(optimizer, pipe),
        epoch=3,
        random=torch.get_rng_state(),
        options={"--seed": "1"},
    )
    whole = snapshot.gather(pipe, mine)
    if pipe.ranks is None or pipe.ranks.rank == 0:
        snapshot.write(path, whole)
    else:
        assert whole == Snapshot()


def train_and_save(ranks, kind, cut, path):
    pipe, optimizer = make_training(kind, cut, ranks)
    step(pipe, optimizer, 8)
    step(pipe, optimizer, 7)
    save(pipe, optimizer, path)


def resume_and_save(ranks, kind, cut, source, path):
    pipe, optimizer = make_training(kind, cut, ranks)
    part = snapshot.own_part(pipe, snapshot.read(source))
    snapshot.restore_model(pipe, part.model)
    snapshot.restore_optimizer(optimizer, pipe, part.optimizer)
    torch.set_rng_state(part.random)
    step(pipe, optimizer, 6)
    save(pipe, optimizer, path)


KINDS = [torch.optim.SGD, torch.optim.AdamW]


def run_all(ranks, function, folder, cut, source, name):
    for kind in KINDS:
        sources = [] if source is None else [f"{folder}/{kind.__name__}.{source}"]
        function(ranks, kind, cut, *sources, f"{folder}/{kind.__name__}.{name}")


def test_ranks_write_the_file_of_one_process_and_read_it_at_any_cut(tmp_path):
    def contents(name):
        return [(tmp_path / f"{kind.__name__}.{name}").read_bytes() for kind in KINDS]

    run_all(None, train_and_save, tmp_path, FIRST, None, "one")
    results_of(2, run_all, train_and_save, tmp_path, FIRST, None, "two")
    results_of(2, run_all, train_and_save, tmp_path, SECOND, None, "v")
    assert contents("one") == contents("two") == contents("v")
    run_all(None, resume_and_save, tmp_path, SECOND, "one", "one_on")
    results_of(4, run_all, resume_and_save, tmp_path, ([2, 2, 2, 2], "looped"), "two", "four_on")
    assert contents("one_on") == contents("four_on") != contents("one")


def gather_wrong_states(ranks):
    pipe, optimizer = make_training(KINDS[ranks.rank], FIRST, ranks)
    step(pipe, optimizer, 8)
    with pytest.raises(RuntimeError, match="SGD.*AdamW|AdamW.*SGD"):
        save(pipe, optimizer, os.devnull)
    mine = Snapshot(model=snapshot.capture_model(pipe))
    own = next(iter(mine.model))
    other = next(name for name in pipe.whole_state if name not in mine.model)
    tensor = mine.model[own]
    for changes, error, message in [
        ({"model": {**mine.model, own: object()}}, TypeError, "object"),
        ({"model": {**mine.model, other: tensor}}, ValueError, f"has '{other}', which is not of this rank's layers"),
        ({"model": {name: tensor for name in mine.model if name != own}}, ValueError, f"lacks '{own}' of this rank's layers"),
        ({"optimizer": {"type": "SGD", "param_groups": [{"params": [other]}], "state": {}}}, ValueError, f"has '{other}'"),
        ({"optimizer": {"type": "SGD", "param_groups": [], "state": {other: {}}}}, ValueError, f"has '{other}'"),
    ]:
        if ranks.rank == 1:
            with pytest.raises(error, match=re.escape(message)):
                snapshot.gather(pipe, replace(mine, **changes))
        else:
            with pytest.raises(RuntimeError, match="rank 1 refused the call"):
                snapshot.gather(pipe, mine)
    step(pipe, optimizer, 8)  # the pipeline still works
    assert pipe.largest(5 * ranks.rank) == 5
    assert pipe.gather(b"rank %d" % ranks.rank) == ([] if ranks.rank else [b"rank 0", b"rank 1"])
    with pytest.raises(RuntimeError, match="make the same calls"):
        pipe.gather(b"", f"what {ranks.rank}")


def test_states_that_do_not_fit_together_are_refused():
    results_of(2, gather_wrong_states)


def clip(group, norm_type):
    pipe = gpipe.GPipe(make_model(), [4, 4], chunks=2, group=group)
    pipe.step(*batch(8), F.cross_entropy)
    of_all = dict(pipe.named_parameters())
    if "0.weight" in of_all:
        of_all["0.weight"].grad = None
    if norm_type is None:
        total = torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.1)
    else:
        total = pipe.clip_grad_norm_(0.1, norm_type)
    return total, {name: each.grad for name, each in of_all.items() if each.grad is not None}


def clip_all(ranks):
    return [clip(ranks, norm_type) for norm_type in (2.0, float("inf"))]


def test_clipping_has_the_bits_of_one_process():
    by_rank = results_of(2, clip_all)
    for number, norm_type in enumerate((2.0, float("inf"))):
        alone, alone_gradients = clip(None, norm_type)
        if norm_type == 2.0:
            expected, expected_gradients = clip(None, None)
            assert torch.equal(alone, expected)
            assert all(torch.equal(alone_gradients[name], expected_gradients[name]) for name in expected_gradients)
        assert alone > 0.1
        for rank in (0, 1):
            total, gradients = by_rank[rank][number]
            assert torch.equal(total, alone)
            assert all(torch.equal(gradient, alone_gradients[name]) for name, gradient in gradients.items())
