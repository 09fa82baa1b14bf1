"""Plans models for ten budgets of memory each, runs a step of every plan, and compares the counted bytes of each worker with
the budget. Draws the time of a step against the memory: every plan a dot, the chosen ones joined.

    python bench/memory_dial.py --models unet resnet50 gpt2 vit --output dial
    python bench/memory_dial.py --against-fixed  # runs the plan of a budget in turn with the best named schedules
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from gpipe.balance import Plan, Profile, profile

CHUNKS = 8
PARAM_SCALE = 4.0  # as for Adam


def make(name: str, samples: int) -> tuple[nn.Module, Any]:
    import diffusers
    import torchvision
    import transformers

    torch.manual_seed(0)
    if name == "resnet50":
        return torchvision.models.resnet50(), torch.randn(samples, 3, 96, 96)
    if name == "vit":
        return torchvision.models.VisionTransformer(96, 16, 6, 6, 192, 768), torch.randn(samples, 3, 96, 96)
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=512, use_cache=False)
        return transformers.GPT2LMHeadModel(config), torch.randint(512, (samples, 128))
    down, up = ["DownBlock2D"] * 3, ["UpBlock2D"] * 3
    if name == "attention_unet":
        down[1], up[1] = "AttnDownBlock2D", "AttnUpBlock2D"
    blocks = {"down_block_types": down, "up_block_types": up}
    unet = diffusers.UNet2DModel(32, block_out_channels=(32, 64, 64), layers_per_block=1, norm_num_groups=8, **blocks)
    return unet, (torch.randn(samples, 3, 32, 32), torch.arange(samples))


def loss(output: Any, _: Tensor) -> Tensor:
    first = next(each for each in torch.utils._pytree.tree_leaves(output) if isinstance(each, Tensor))
    return first.sum()


class Steps:
    """Runs steps of a plan on two workers."""

    def __init__(self, model: nn.Sequential, batch: Any, plan: Plan):
        self.pipe = gpipe.GPipe(model, devices=["cpu"] * 2, **plan.arguments)
        self.batch, self.target = batch, torch.zeros(len(batch[0] if isinstance(batch, tuple) else batch))
        self.loss = gpipe.Loss(loss, reduction="sum", check=False)
        self()

    def __call__(self) -> float:
        self.pipe.zero_grad()
        start = time.perf_counter()
        self.pipe.step(self.batch, self.target, self.loss)
        return time.perf_counter() - start


def counted(model: nn.Sequential, batch: Any, plan: Plan) -> list[int]:
    """The most bytes of each worker in a step, as counted."""
    timeline, step = gpipe.Timeline(), Steps(model, batch, plan)
    pipe = step.pipe
    pipe.trace(timeline)
    step()
    bytes_of = timeline.peak_bytes()
    seen: set[tuple[int, Tensor]] = set()  # stages of a worker share tied parameters
    for stage, worker in zip(pipe.partitions, plan.placement, strict=True):
        own = {(worker, each) for each in stage.parameters()} - seen
        seen |= own
        parameters = sum(each.nbytes for _, each in own)
        bytes_of[worker] += int((PARAM_SCALE - 1) * parameters) + sum(each.nbytes for each in stage.buffers())
    return bytes_of


def prepare(name: str, samples: int, chunks: int, param_scale: float) -> tuple[nn.Sequential, Any, list[Profile]]:
    module, batch = make(name, samples)
    model = gpipe.to_sequential(module, *(batch if isinstance(batch, tuple) else (batch,)))
    part = torch.utils._pytree.tree_map(lambda each: each[: samples // chunks], batch)
    return model, batch, [profile(model, part, workers=2, seconds=6, param_scale=param_scale)]


def name_of(plan: Plan) -> str:
    return "lists" if " " in plan.schedule else plan.schedule


def spared(memory: int) -> int:
    """What ``from_module`` plans for: a step can need a little more than its simulation."""
    return memory - memory // 50


def study(name: str, samples: int, budgets: int, schedule: str) -> dict[str, Any]:
    model, batch, profiles = prepare(name, samples, CHUNKS, PARAM_SCALE)
    given: dict[str, Any] = {"chunks": CHUNKS, "schedule": schedule}
    dots = [[max(each.bytes), each.seconds, name_of(each)] for each in gpipe.plan(profiles, samples, 2, **given).plans]
    most = max(gpipe.plan(profiles, samples, 2, **given).best.bytes)
    least = most // 20
    while most - least > most // 100:  # the smallest budget that fits
        middle = (least + most) // 2
        fits = gpipe.plan(profiles, samples, 2, memory=spared(middle), **given).fits
        most, least = (middle, least) if fits else (most, middle)
    least, most = most, max(gpipe.plan(profiles, samples, 2, checkpoint="never", **given).best.bytes)
    rows = []
    for i in range(budgets):
        memory = least + (most - least) * i // (budgets - 1)
        found = gpipe.plan(profiles, samples, 2, memory=spared(memory), **given)
        best = found.best
        bytes_of = counted(model, batch, best)
        recomputes = best.checkpoint != "never"
        rows.append({"memory": memory, "predicted": max(best.bytes), "counted": max(bytes_of), "seconds": best.seconds,
                     "schedule": name_of(best), "recomputes": recomputes})  # fmt: skip
        dots += [[max(each.bytes), each.seconds, name_of(each)] for each in found.plans if each.fits]
    return {"model": name, "rows": rows, "dots": dots}


def against_fixed(name: str, samples: int, chunks: int) -> list[str]:
    """Steps of the plan for three budgets, in turn with steps of three others: the fastest, by prediction, that fit the
    budget, of all named schedules, cut by ``balance_by_time``, with one checkpoint mode for all stages."""
    model, batch, profiles = prepare(name, samples, chunks, 2.0)
    fixed: list[Plan] = []
    for mode in ("never", "except_last", "always"):
        for stages in (2, 4):
            cut = profiles[0].balance_by_time(stages, chunks=chunks, checkpoint=mode)
            plans = gpipe.plan(profiles, samples, 2, chunks=chunks, balance=cut, checkpoint=mode).plans
            fixed += [each for each in plans if name_of(each) != "lists"]
    least, most = min(max(each.bytes) for each in fixed), max(min(fixed, key=lambda each: each.seconds).bytes)
    lines = []
    for share in (0.02, 0.25, 0.5):
        memory = int(least + (most - least) * share)
        best = gpipe.plan(profiles, samples, 2, chunks=chunks, memory=memory).best
        others = sorted((each for each in fixed if max(each.bytes) <= memory), key=lambda each: each.seconds)[:3]
        steps = [Steps(model, batch, each) for each in (best, *others)]
        seconds = list(zip(*([step() for step in steps] for _ in range(7))))
        planned, *rest = map(median, seconds)
        lines.append(f"{name:14} chunks {chunks}, budget {memory / 2**20:6.1f} MiB, planned {planned * 1e3:7.1f} ms, "
                     f"fixed {min(rest) * 1e3:7.1f} ms, {min(rest) / planned:.3f} times as long")  # fmt: skip
    return lines


def draw(found: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for schedule in sorted({each[2] for each in found["dots"]}):
        dots = [(size / 2**20, seconds * 1e3) for size, seconds, of in found["dots"] if of == schedule]
        sizes, times = zip(*dots)
        axes.scatter(sizes, times, s=12, label=schedule)
    chosen = [(row["predicted"] / 2**20, row["seconds"] * 1e3) for row in found["rows"]]
    axes.plot(*zip(*sorted(chosen)), "k.-", linewidth=1, markersize=8, label="chosen")
    axes.set_xlabel("MiB of the worker that needs most")
    axes.set_ylabel("ms per step, predicted")
    axes.set_title(found["model"])
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["unet", "resnet50", "gpt2", "vit", "attention_unet"])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--output", type=Path, default=Path("dial"))
    parser.add_argument("--against-fixed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.against_fixed:
        for name in options.models:
            for chunks in (4, 8):
                print(*against_fixed(name, options.samples, chunks), sep="\n", flush=True)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        found = study(name, options.samples, options.budgets, options.schedule)
        draw(found, options.output / f"{name}.png")
        for row in found["rows"]:
            used = row["counted"] / row["memory"]
            print(f"{name:9} budget {row['memory'] / 2**20:7.1f} MiB, counted {used:5.3f} of it, predicted "
                  f"{row['predicted'] / row['memory']:5.3f}, {row['seconds'] * 1e3:7.1f} ms, {row['schedule']}"
                  f"{', recomputes' if row['recomputes'] else ''}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
