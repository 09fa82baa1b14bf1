"""Parameters that stages on different ranks share. They must train with the bits of one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe
from gpipe import snapshot
from gpipe.snapshot import Snapshot
from helpers import results_of
from test_tied import WORDS, Mix
from test_tied import batch as whole_batch
from test_to_sequential import Tied

CASES = [  # balance, schedule, placement, checkpoint, the device on which the model is made
    ([1, 1, 1, 4], "1f1b", "looped", "always", "cpu"),  # two workers of a rank borrow
    ([1, 6], "zb_h1", "looped", "never", "cpu"),
    ([1, 2, 2, 2], "interleaved_1f1b", [0, 1, 0, 1], "except_last", "cpu"),
    ([1, 2, 2, 2], "zb_v", "v", "always", "meta"),
]


def make_model(in_device="cpu"):
    """Returns seven layers. The first, third and last share a matrix."""
    torch.manual_seed(0)
    with torch.device(in_device):
        words = nn.Embedding(WORDS, 6)
        head = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, WORDS))
        head[1].weight = words.weight
        return nn.Sequential(words, nn.Linear(6, 6), Mix(words.weight), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), head)


def batch(samples=8):
    x, y = whole_batch()
    return x[:samples], y[:samples]


def make_pipe(case, group):
    balance, schedule, placement, checkpoint, in_device = case
    options = {"schedule": schedule, "placement": placement, "checkpoint": checkpoint, "chunks": 4}
    torch.manual_seed(0)
    return gpipe.GPipe(make_model(in_device), balance, group=group, **options)


def save(pipe, optimizer, path):
    mine = Snapshot(model=snapshot.capture_model(pipe), optimizer=snapshot.capture_optimizer(optimizer, pipe))
    whole = snapshot.gather(pipe, mine)
    if pipe.ranks is None or pipe.ranks.rank == 0:
        snapshot.write(path, whole)


def train_and_save(ranks, source, path):
    """Trains a pipeline of each case, from a snapshot or from the start. Returns losses, norms and outputs."""
    results = []
    x, y = batch()
    for number, case in enumerate(CASES):
        pipe = make_pipe(case, ranks)
        kind = (torch.optim.SGD, torch.optim.AdamW)[number % 2]
        optimizer = kind([{"params": list(pipe.parameters())}], lr=0.1, weight_decay=0.1)
        if source:
            part = snapshot.own_part(pipe, snapshot.read(source.format(number)))
            snapshot.restore_model(pipe, part.model)
            snapshot.restore_optimizer(optimizer, pipe, part.optimizer)
        for step in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(pipe(x), y) if step == 1 else pipe.step(x, y, F.cross_entropy)
            if step == 1:
                loss.backward()
            results += [loss.detach(), pipe.clip_grad_norm_(0.5)]
            optimizer.step()
        save(pipe, optimizer, path.format(number))
        pipe.eval()
        with torch.no_grad():
            results.append(pipe(batch(5)[0]))
    return results


def test_two_ranks_train_with_the_bits_of_one_process_and_write_its_file(tmp_path):
    def contents(name):
        return [path.read_bytes() for path in sorted(tmp_path.glob(f"{name}.*"))]

    torch.set_num_threads(2)  # a thread per stage, as over ranks
    for source, name in ((None, "start"), (str(tmp_path / "start.{}"), "on")):
        alone = train_and_save(None, source, str(tmp_path / name) + ".{}")
        for results in results_of(2, train_and_save, source, str(tmp_path / f"{name}_two") + ".{}"):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, alone, strict=True))
        assert len(contents(name)) == len(CASES) and contents(name) == contents(f"{name}_two")
    assert contents("start") != contents("on")


def names_and_refusals(ranks):
    pipe = make_pipe(CASES[1], ranks)
    names = [name for name, _ in pipe.named_parameters()]
    every_name = [name for name, _ in pipe.named_parameters(remove_duplicate=False)]
    state = list(pipe.state_dict())
    # Only the owner tells whether the parameter wants a gradient.
    pipe.requires_grad_(False)
    pipe(batch()[0])
    frozen = [parameter.requires_grad for layer in pipe for parameter in layer.parameters()]
    pipe.requires_grad_(True)
    pipe.step(*batch(), F.cross_entropy)
    trained = [parameter.requires_grad for layer in pipe for parameter in layer.parameters()]
    # The copies are not for an optimizer.
    optimizer = torch.optim.SGD(dict.fromkeys(p for layer in pipe for p in layer.parameters()), lr=0.1)
    with pytest.raises(ValueError if ranks.rank else RuntimeError, match="'2.matrix', which another rank trains as"):
        save(pipe, optimizer, "")
    # A parameter that is no longer shared.
    former = pipe[-1][1].weight if ranks.rank else None
    if ranks.rank:
        pipe[-1][1].weight = nn.Parameter(former.detach().clone())
    with pytest.raises(RuntimeError, match="make a new pipeline on all ranks"):
        pipe.step(*batch(), F.cross_entropy)
    if ranks.rank:
        pipe[-1][1].weight = former
    else:
        pipe[0].weight = nn.Parameter(pipe[0].weight.detach().clone())
    with pytest.raises(RuntimeError, match="make a new pipeline on all ranks"):
        pipe.step(*batch(), F.cross_entropy)
    return names, every_name, state, frozen, trained


def test_names_and_refusals():
    (first, every_first, state_first, frozen, trained), (second, every_second, state_second, *later) = results_of(
        2, names_and_refusals
    )
    model = make_model()
    assert first + second == [name for name, _ in model.named_parameters()]
    assert every_first + every_second == [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert state_first + state_second == list(model.state_dict())
    assert not any(frozen + later[0]) and all(trained + later[1])


def train_converted(ranks):
    torch.manual_seed(0)
    model, tokens = Tied(), torch.arange(12).view(6, 2) % 8
    sequence = gpipe.to_sequential(model, tokens)
    pipe = gpipe.GPipe(sequence, [1, 2], chunks=2, schedule="1f1b", group=ranks)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    results = []
    for _ in range(2):
        optimizer.zero_grad()
        results.append(pipe.step(tokens, tokens.roll(1, 1), lambda output, target: F.cross_entropy(output.mT, target)))
        results.append(pipe.clip_grad_norm_(0.5))
        optimizer.step()
    pipe.eval()
    with torch.no_grad():
        results.append(pipe(tokens))
    mine = Snapshot(model=snapshot.capture_model(pipe), optimizer=snapshot.capture_optimizer(optimizer, pipe))
    return results, dict(snapshot.gather(pipe, mine).model)


def test_a_converted_language_model():
    torch.set_num_threads(2)
    results, state = train_converted(None)
    assert {"embed.weight", "head.weight"} <= state.keys()
    for rank, (ours, whole) in enumerate(results_of(2, train_converted)):
        assert all(torch.equal(a, b) for a, b in zip(ours, results, strict=True))
        assert rank or (list(whole) == list(state) and all(torch.equal(whole[name], state[name]) for name in state))
