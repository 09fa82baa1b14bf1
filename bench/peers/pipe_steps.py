"""Times steps of torchgpipe 0.0.7, or of this project's Python package, which takes the same program; or counts the
bytes of one. Prints a JSON line.

Torchgpipe is as published: it runs all stages that are on the CPU on one worker thread, and every
backward on the thread that asks for it. Nothing in it had to be changed for torch 2.11.
"""

import ctypes
import gc
import importlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import models
import steps

LIBRARIES = {"torchgpipe": "torchgpipe", "gpipe": "gpipe python"}


def skippables(layers: models.Layers, skip: ModuleType) -> nn.Sequential:
    """The model in the terms of the library's module for skips."""
    namespaces = {
        layer.name: skip.Namespace() for layer in layers if isinstance(layer, models.Stash)
    }

    @skip.skippable(stash=["skip"])
    class StashSkip(nn.Module):
        def __init__(self, layer: models.Stash):
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Iterator[object]:
            yield skip.stash("skip", self.layer(x))
            return x

    @skip.skippable(pop=["skip"])
    class JoinSkip(nn.Module):
        def __init__(self, layer: models.Join):
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Iterator[object]:
            popped = yield skip.pop("skip")
            return self.layer(x, popped)

    def convert(layer: nn.Module) -> nn.Module:
        if isinstance(layer, models.Stash):
            return StashSkip(layer).isolate(namespaces[layer.name])
        if isinstance(layer, models.Join):
            return JoinSkip(layer).isolate(namespaces[layer.name])
        return layer

    return nn.Sequential(*map(convert, layers))


def counted_threads() -> None:
    """Has the running profiler count what threads yet to start allocate, too.

    PyTorch counts memory on threads that took over the profiler's state. Those that Python starts
    do not, and the function by which they could is one of C++ alone.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    join = library["_ZN5torch8autograd8profiler27enableProfilerInChildThreadEv"]

    def at_start(*_: object) -> None:
        sys.setprofile(None)
        join()

    threading.setprofile(at_start)


def peak_bytes(step: Callable[[], None]) -> int:
    """The most bytes that the step has in use at once, on all threads, above what was before it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        counted_threads()
        step()
        threading.setprofile(None)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def main() -> None:
    parser = steps.flags(__doc__, ["never", "except_last", "always"])
    parser.add_argument("--library", choices=LIBRARIES, default="torchgpipe")
    parser.add_argument("--memory", action="store_true", help="count bytes instead of seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    layers, x = steps.subject(args)
    library = importlib.import_module(args.library)
    pipe = library.GPipe(
        skippables(layers, importlib.import_module(f"{args.library}.skip")),
        args.balance,
        devices=["cpu"] * len(args.balance),
        chunks=args.chunks,
        checkpoint=args.checkpoint,
    )
    plain = nn.Sequential(*layers)

    def step() -> None:
        steps.clear_gradients(pipe)
        pipe(x).sum().backward()

    def plain_step() -> None:
        steps.plain_step(plain, x, args.chunks, args.checkpoint == "always")

    def timed(function: Callable[[], None]) -> float:
        start, end = steps.span(function)
        return end - start

    for _ in range(steps.WARM_UP):
        step()
    if args.memory:
        steps.clear_gradients(pipe)
        steps.report(args, LIBRARIES[args.library], bytes=peak_bytes(step))
    elif args.model == "tiny":
        for _ in range(steps.WARM_UP):
            plain_step()
        plain_seconds, seconds = zip(
            *((timed(plain_step), timed(step)) for _ in range(args.repeats))
        )
        cost = steps.us_per_cell(args, seconds, plain_seconds)
        figures = {"plain_seconds": plain_seconds, "seconds": seconds, "us_per_cell": cost}
        steps.report(args, LIBRARIES[args.library], **figures)
    else:
        steps.report(args, LIBRARIES[args.library], seconds=[timed(step) for _ in range(args.repeats)])


if __name__ == "__main__":
    main()
