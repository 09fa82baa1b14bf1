"""Times steps of torchgpipe 0.0.7 or of this project's Python package, which have the same interface, or of the plain model.
Prints a JSON line.

A step is a forward and a backward from the sum of the output. With a schedule, it is a call of step() with the sum of the
output as the loss, which only this project has.

torchgpipe is used as published, without changes for torch 2.11. It runs all CPU stages on one worker thread, and
backwards on the calling thread.
"""

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import models
import steps

LIBRARIES = {"torchgpipe": "torchgpipe", "gpipe": "gpipe python", "plain": "plain"}


def skippables(layers: models.Layers, skip: ModuleType) -> nn.Sequential:
    """Converts the model to the skippable layers of a library."""
    namespaces = {layer.name: skip.Namespace() for layer in layers if isinstance(layer, models.Stash)}

    class Wrapper(nn.Module):
        def __init__(self, layer: models.Stash):
            super().__init__()
            self.layer = layer

    @skip.skippable(stash=["skip"])
    class StashSkip(Wrapper):
        def forward(self, x: Tensor) -> Iterator[object]:
            yield skip.stash("skip", self.layer(x))
            return x

    @skip.skippable(pop=["skip"])
    class JoinSkip(Wrapper):
        def forward(self, x: Tensor) -> Iterator[object]:
            popped = yield skip.pop("skip")
            return self.layer(x, popped)

    def convert(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, models.Stash):
            return layer
        kind = JoinSkip if isinstance(layer, models.Join) else StashSkip
        return kind(layer).isolate(namespaces[layer.name])

    return nn.Sequential(*map(convert, layers))


def step_of(pipe: Any, x: Tensor, schedule: str | None = None) -> Callable[[], None]:
    """Returns a function that clears the gradients and trains on the sum of the output."""
    if schedule:
        total = importlib.import_module("gpipe").Loss(lambda output, _: output.sum(), reduction="sum")

    def step() -> None:
        steps.clear_gradients(pipe)
        if schedule:
            pipe.step(x, x, total)
        else:
            pipe(x).sum().backward()

    return step


def main() -> None:
    parser = steps.flags(__doc__, ["never", "except_last", "always"])
    parser.add_argument("--library", choices=LIBRARIES, default="torchgpipe")
    parser.add_argument("--schedule", help="run step() with this schedule; of gpipe only")
    parser.add_argument("--threads", type=int, default=1, help="threads per operator; default: %(default)s")
    parser.add_argument("--whole", action="store_true", help="the plain model takes the mini-batch at once")
    args = parser.parse_args()
    if args.schedule and args.library != "gpipe":
        parser.error(f"{args.library} has no schedules; leave out --schedule")
    name = " ".join(filter(None, [LIBRARIES[args.library], args.schedule]))
    torch.set_num_threads(args.threads)
    layers, x = models.subject(args.model, args.chunks)
    plain = models.Stage(layers)

    def plain_step() -> None:
        steps.plain_step(plain, x, 1 if args.whole else args.chunks, args.checkpoint == "always")

    if args.library == "plain":
        for _ in range(steps.WARM_UP):
            plain_step()
        steps.report(args, name, seconds=[steps.seconds(plain_step) for _ in range(args.repeats)])
        return
    library = importlib.import_module(args.library)
    scheduling = {"schedule": args.schedule} if args.schedule else {}
    settings = {"devices": ["cpu"] * len(args.balance), "chunks": args.chunks, "checkpoint": args.checkpoint}
    skip = importlib.import_module(f"{args.library}.skip")
    pipe = library.GPipe(skippables(layers, skip), args.balance, **settings, **scheduling)
    step = step_of(pipe, x, args.schedule)
    for _ in range(steps.WARM_UP):
        step()
    if args.model == "tiny":
        for _ in range(steps.WARM_UP):
            plain_step()
        plain_times, times = zip(*((steps.seconds(plain_step), steps.seconds(step)) for _ in range(args.repeats)))
        figures: dict[str, object] = {"us_per_cell": steps.us_per_cell(args, times, plain_times)}
    else:
        figures = {"seconds": [steps.seconds(step) for _ in range(args.repeats)]}
    if args.library == "gpipe":
        timeline = library.Timeline()
        pipe.trace(timeline)
        step()
        pipe.trace(None)
        figures["idle"] = timeline.bubble()  # of the workers' time
    steps.report(args, name, **figures)


if __name__ == "__main__":
    main()
