"""What several tests share: layers and models, programs in processes of their own, and jobs of several ranks."""

import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import OrderedDict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gpipe
from gpipe.skip import pop, skippable, stash


def make_linears(layers=4):
    """Returns a model of linear layers of width 3."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))


def make_dropouts():
    """Returns a model of three layers of width 4 with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)))


def training_step(pipe, x):
    """Returns the output of a training step and the gradients of all parameters."""
    torch.manual_seed(1)
    pipe.zero_grad()
    y = pipe(x)
    y.sum().backward()
    return [y.detach(), *(gradient.clone() for gradient in gradients(pipe))]


def gradients(module):
    return [parameter.grad for parameter in module.parameters()]


def named_gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def notes(error):
    return getattr(error, "__notes__", [])


WORDS = 11


class Mix(nn.Module):
    """Uses the matrix of another layer twice."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix

    def forward(self, x):
        return x + torch.tanh(x @ self.matrix.t()) @ self.matrix


def make_tied_model():
    """Returns seven layers. The first, third and last share a matrix."""
    torch.manual_seed(0)
    words = nn.Embedding(WORDS, 6)
    head = nn.Linear(6, WORDS, bias=False)
    head.weight = words.weight
    middle = [nn.Linear(6, 6), Mix(words.weight), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(words, *middle, head).double()


def tied_batch(step=0):
    torch.manual_seed(step)
    x = torch.randint(WORDS, (8,))
    return x, (7 * x + 3) % WORDS


class Double(nn.Module):
    def forward(self, x):
        return x * 2


class Fail(nn.Module):
    """Raises an error in its forward."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error or ValueError("from the layer")


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


class Split(nn.Module):
    """Returns an object of several containers."""

    def forward(self, x):
        return {"pair": Pair(x * 2, None), "list": [x.sum(1, keepdim=True), (x.argmax(1),)], 3: OrderedDict(a=x)}


class Join(nn.Module):
    def forward(self, x):
        assert type(x["pair"]) is Pair and x["pair"].second is None and type(x[3]) is OrderedDict
        total, (index,) = x["list"]
        return x["pair"].first + total + x[3]["a"] * index[:, None]


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x):
        stash("skip", x)
        return x


@skippable(pop=["skip"])
class Add(nn.Module):
    def forward(self, x):
        return x + pop("skip")


@skippable(stash=["skip"])
class YieldStash(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class YieldAdd(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x + skip


_IMPORTS = "import gpipe, torch, threading, time, os, signal, sys\nfrom torch import nn\n"


def run(program, *arguments, seconds=300):
    """Runs a program. Returns its exit code and its output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IMPORTS + textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=os.path.dirname(__file__),
    )
    return done.returncode, done.stdout + done.stderr


_context = multiprocessing.get_context("forkserver")
# What each rank would import: use_deterministic_algorithms() imports _inductor, a group of gloo imports device_mesh.
_context.set_forkserver_preload(["torch._inductor.config", "torch.distributed.device_mesh", "gpipe", "pytest"])


def join(rank, size, folder):
    """Makes this process a member of the default process group of torch.distributed."""
    store = dist.FileStore(f"{folder}/store", -1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _run_program(rank, folder, port, arguments):
    os.chdir(folder)
    sys.argv = ["train.py", *arguments]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    torch.set_num_threads(1)
    with open(f"{rank}.out", "w") as file, contextlib.redirect_stdout(file):
        runpy.run_path("train.py", run_name="__main__")


def run_on_two_ranks(program, folder, *arguments):
    """Runs a program for torchrun in two processes in a folder. Returns their output. Fails if either fails."""
    (Path(folder) / "train.py").write_text(program)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as the agent of torchrun has
    processes = [_context.Process(target=_run_program, args=(rank, folder, store.port, arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    return "".join((Path(folder) / f"{rank}.out").read_text() for rank in range(2))


def _end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def _start(rank, size, folder):
    threading.Thread(target=_end_with_parent, daemon=True).start()  # also if the tests are killed
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    join(rank, size, folder)


def _run(body, arguments):
    result = error = None
    try:
        with gpipe.Ranks(dist.group.WORLD, timeout=60, join_timeout=60) as ranks:
            result = body(ranks, *arguments)
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    return pickle.dumps((result, error))  # as they are, tensors would share their memory


class _Job:
    """New processes, which are the default process group of torch.distributed."""

    def __init__(self, size):
        self.folder = tempfile.TemporaryDirectory()
        options = {"mp_context": _context, "initializer": _start}
        ranks = range(size)
        self.processes = [ProcessPoolExecutor(1, initargs=(rank, size, self.folder.name), **options) for rank in ranks]

    def run(self, body, arguments):
        results = [process.submit(_run, body, arguments) for process in self.processes]
        return [pickle.loads(result.result()) for result in results]


def run_job(size, body, *arguments):
    """Calls ``body(ranks, *arguments)`` in new processes. Returns for each rank a tuple (result, error), where the error is
    the text of the exception that ended it, or None."""
    job = _Job(size)
    results = job.run(body, arguments)
    for wait in (False, True):  # the processes may wait for each other at their end
        for process in job.processes:
            process.shutdown(wait)
    return results


_lasting_job = functools.cache(_Job)


def results_of(size, body, *arguments):
    """The results of a job in which no rank fails. Its processes remain for the next one."""
    try:
        results = _lasting_job(size).run(body, arguments)
    except BaseException:  # a process may have died
        _lasting_job.cache_clear()
        raise
    errors = [error for _, error in results]
    if any(errors):
        _lasting_job.cache_clear()
    assert errors == [None] * size, errors
    return [result for result, _ in results]


def content_of_snapshot(folder):
    """Returns what a snapshot has, whoever wrote which part of it, except the plan and most generators."""
    content = json.loads((folder / "snapshot.json").read_text())
    del content["crc32"], content["plan"]
    content["random"] = content["random"][0]["torch"]
    for group in content["optimizer"]["param_groups"]:
        group["params"].sort()
    for file in content.pop("files"):
        tensors = safetensors.torch.load_file(folder / file)
        bytes_of = {name: value.flatten().view(torch.uint8).numpy().tobytes() for name, value in tensors.items()}
        content |= {name: (value.dtype, value.shape, bytes_of[name]) for name, value in tensors.items()}
    return content
