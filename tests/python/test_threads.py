"""Worker threads: how long they live, and calls from several threads."""

import contextlib
import copy
import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gpipe
from helpers import Double, Fail, gradients


def test_each_stage_keeps_its_worker_thread():
    seen, local = [], threading.local()

    class Note(nn.Module):
        def forward(self, x):
            local.count = getattr(local, "count", 0) + 1
            seen.append((threading.get_ident(), local.count))
            return x

    pipe = gpipe.GPipe(nn.Sequential(Note(), Note()), [1, 1], chunks=2)
    for _ in range(3):
        pipe(torch.zeros(2, 1))
    workers = {thread for thread, _ in seen}
    assert len(workers) == 2 and threading.get_ident() not in workers
    assert sorted(seen) == [(thread, count) for thread in sorted(workers) for count in range(1, 7)]


def test_pipelines_and_one_pipeline_in_several_threads():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    shared = gpipe.GPipe(copy.deepcopy(model), [2, 1], chunks=4)
    x = torch.rand(8, 8)

    def train(_):
        pipe = gpipe.GPipe(copy.deepcopy(model), [2, 1], chunks=4)
        for _ in range(20):
            pipe(x).sum().backward()
        return [shared(x), *gradients(pipe)]

    expected = train(0)
    with ThreadPoolExecutor(3) as threads:
        for result in threads.map(train, range(3)):
            assert all(map(torch.equal, result, expected))


def count_threads():
    return len(os.listdir("/proc/self/task"))


def await_threads(count):
    for _ in range(200):
        if count_threads() == count:
            return
        time.sleep(0.05)
    assert count_threads() == count


def test_pipelines_leave_no_threads_and_no_memory():
    class Log(nn.Module):
        def forward(self, x):
            threading.current_thread()  # Python now keeps an entry for the thread
            return x

    def use(fail):
        layers = [nn.Linear(2, 2), Log(), Fail() if fail else nn.Linear(2, 2)]
        pipe = gpipe.GPipe(nn.Sequential(*layers), [1, 2], chunks=2)
        with contextlib.suppress(ValueError):
            pipe(torch.rand(4, 2)).sum().backward()

    def counting():
        return profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)

    with counting():  # the profiler starts a thread of its own
        use(False)
    gc.collect()
    before = count_threads(), threading.active_count()
    with counting() as profiler:
        for i in range(30):
            use(i % 3 == 0)
        gc.collect()
    bytes_of = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(bytes_of) > 0 and sum(bytes_of) == 0
    await_threads(before[0])
    assert threading.active_count() == before[1]


def test_a_cycle_through_a_pipeline_is_collected():
    """A layer may refer to its pipeline. The cycle and its threads stay only while a graph needs them."""

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
    await_threads(before)
