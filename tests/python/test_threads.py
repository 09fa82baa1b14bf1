"""Threads, signals, processes."""

import copy
import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gpipe
from layers import Double, Fail
from processes import run


def test_stages_are_threads_that_stay():
    seen = []
    local = threading.local()

    class Note(nn.Module):
        def forward(self, x):
            seen.append(threading.get_ident())
            local.count = getattr(local, "count", 0) + 1
            counts.append(local.count)
            return x

    counts = []
    pipe = gpipe.GPipe(nn.Sequential(Note(), Note()), [1, 1], chunks=2)
    for _ in range(3):
        pipe(torch.zeros(2, 1))
    assert len(set(seen)) == 2 and threading.get_ident() not in seen
    assert sorted(counts) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def test_two_pipelines_in_two_threads():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.rand(8, 8)

    def train(gradients):
        pipe = gpipe.GPipe(copy.deepcopy(model), [2, 1], chunks=4)
        for _ in range(20):
            pipe(x).sum().backward()
        gradients.append([parameter.grad for parameter in pipe.parameters()])

    gradients = []
    train(gradients)
    threads = [threading.Thread(target=train, args=(gradients,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected, *actual = gradients
    assert len(actual) == 2
    assert all(torch.equal(a, b) for each in actual for a, b in zip(each, expected, strict=True))


def test_one_pipeline_in_two_threads():
    pipe = gpipe.GPipe(nn.Sequential(Double(), Double()), [1, 1], chunks=4)
    x = torch.rand(8, 8)
    results = []
    threads = [threading.Thread(target=lambda: results.append(pipe(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(result, 4 * x) for result in results) and len(results) == 4


def test_nested_pipelines():
    inner = gpipe.GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    pipe = gpipe.GPipe(nn.Sequential(inner, nn.Linear(2, 2)), [1, 1], chunks=2)
    pipe(torch.rand(8, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_a_pipeline_in_itself():
    class Call(nn.Module):
        def forward(self, x):
            return pipe(x)

    pipe = gpipe.GPipe(nn.Sequential(Call()), [1])
    with pytest.raises(RuntimeError, match="cannot contain itself"):
        pipe(torch.zeros(1))


def test_a_pipeline_among_its_layers_modules():
    pipe = gpipe.GPipe(nn.Sequential(Double()), [1])
    pipe[0].pipe = pipe
    with pytest.raises(RecursionError):
        pipe(torch.zeros(1))
    del pipe[0].pipe
    pipe(torch.zeros(1))


def count_threads():
    return len(os.listdir("/proc/self/task"))


def test_nothing_is_left():
    def use(fail):
        layers = [nn.Linear(2, 2), Fail() if fail else nn.Linear(2, 2)]
        pipe = gpipe.GPipe(nn.Sequential(*layers), [1, 1], chunks=2)
        try:
            y = pipe(torch.rand(4, 2))
            threading.current_thread()
            y.sum().backward()
        except ValueError:
            pass

    class Log(nn.Module):
        def forward(self, x):
            threading.current_thread()  # which notes the thread
            return x

    def counting():
        return profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)

    with counting():  # which has a thread of its own
        use(False)
    gc.collect()
    before = count_threads(), threading.active_count()
    with counting() as profiler:
        for i in range(200):
            use(i % 3 == 0)
            gpipe.GPipe(nn.Sequential(Log()), [1])(torch.zeros(1))
        gc.collect()
    bytes_of = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(bytes_of) > 0 and sum(bytes_of) == 0
    for _ in range(100):
        if (count_threads(), threading.active_count()) == before:
            break
        time.sleep(0.05)
    assert (count_threads(), threading.active_count()) == before


def test_a_layer_that_knows_its_pipeline():
    """A cycle of references through the pipeline is collected with its threads, unless a graph still needs it."""

    def make():
        pipe = gpipe.GPipe(nn.Sequential(nn.Linear(2, 2), Double()), [1, 1], chunks=2, checkpoint="always")
        pipe[0].register_forward_hook(lambda module, arguments, output: output * pipe.chunks)
        return pipe

    gc.collect()
    before = count_threads()
    for _ in range(3):
        pipe = make()
        y = pipe(torch.rand(4, 2))
        layer = weakref.ref(pipe[0])
        del pipe
        gc.collect()
        assert layer() is not None and count_threads() > before
        y.sum().backward()  # with a recompute
        assert layer().weight.grad is not None
        del y
        gc.collect()
        assert layer() is None
    for _ in range(100):
        if count_threads() == before:
            break
        time.sleep(0.05)
    assert count_threads() == before


INTERRUPTED = """
    class Slow(nn.Module):
        def forward(self, x):
            if gpipe.is_recomputing() == {backward}:
                calls.append(1)
                time.sleep(0.1)
            return x * 1

    calls = []

    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1), Slow()), [1, 1], chunks=50, checkpoint="always")
    x = torch.zeros(50, 1)
    loss = pipe(x).sum() if {backward} else None
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        loss.backward() if {backward} else pipe(x)
        print("not interrupted")
    except KeyboardInterrupt:
        print("interrupted", len(calls) < 50)
    Slow.forward = lambda self, x: x * 1
    pipe(x).sum().backward()
    print("usable")
"""


@pytest.mark.parametrize("backward", [False, True])
def test_interrupt(backward):
    code, text = run(INTERRUPTED.format(backward=backward))
    assert (code, text) == (0, "interrupted True\nusable\n")


@pytest.mark.parametrize(
    "program",
    [
        "pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1)), [1]); pipe(torch.zeros(1, 1))",
        "pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1)), [1]); y = pipe(torch.zeros(1, 1))",
        "pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1)), [1]); sys.modules['kept'] = pipe; pipe(torch.zeros(1, 1))",
        """
        class Slow(nn.Module):
            def forward(self, x):
                time.sleep(0.2)
                return x * 1
        pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1), Slow()), [1, 1], chunks=100)
        x = torch.zeros(100, 1)
        threading.Thread(target=pipe, args=(x,), daemon=True).start()
        time.sleep(0.5)
        """,
        """
        class Stuck(nn.Module):
            def forward(self, x):
                time.sleep(3)
                return x
        pipe = gpipe.GPipe(nn.Sequential(Stuck()), [1])
        threading.Thread(target=pipe, args=(torch.zeros(1),), daemon=True).start()
        time.sleep(0.3)
        """,
        """
        pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1)), [1], chunks=2)
        x = torch.zeros(2, 1)
        def loop():
            while True:
                pipe(x)
        threading.Thread(target=loop, daemon=True).start()
        time.sleep(0.5)
        """,
    ],
)
def test_exit(program):
    code, text = run(program, seconds=30)
    assert code == 0, text
    assert "terminate" not in text and "Fatal" not in text


def test_fork():
    code, text = run(
        """
        pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1)), [1])
        pipe(torch.zeros(1, 1))
        child = os.fork()
        if child == 0:
            code = 2
            try:
                pipe(torch.zeros(1, 1))
            except RuntimeError as error:
                code = 0 if "forked" in str(error) else 1
            del pipe
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        del pipe
        """
    )
    assert (code, text) == (0, "0\n")


def test_data_loader_workers():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.full((2,), float(index))

    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    for batch in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2):
        pipe(batch).sum().backward()
