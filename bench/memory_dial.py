"""Plans models for ten budgets of memory each, runs a step of every plan, and compares the counted bytes of each worker with
the budget. Draws the time of a step against the memory: every plan a dot, the chosen ones joined.

    python bench/memory_dial.py --models unet resnet50 gpt2 vit --output dial
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from gpipe.balance import Plan, profile

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
    blocks = {"down_block_types": ["DownBlock2D"] * 3, "up_block_types": ["UpBlock2D"] * 3}
    unet = diffusers.UNet2DModel(32, block_out_channels=(32, 64, 64), layers_per_block=1, norm_num_groups=8, **blocks)
    return unet, (torch.randn(samples, 3, 32, 32), torch.arange(samples))


def loss(output: Any, _: Tensor) -> Tensor:
    first = next(each for each in torch.utils._pytree.tree_leaves(output) if isinstance(each, Tensor))
    return first.sum()


def counted(model: nn.Sequential, batch: Any, plan: Plan) -> list[int]:
    """The most bytes of each worker in a step, as counted."""
    workers = max(plan.placement) + 1
    pipe = gpipe.GPipe(model, devices=["cpu"] * workers, **plan.arguments)
    target, timeline = torch.zeros(len(batch[0] if isinstance(batch, tuple) else batch)), gpipe.Timeline()
    total = gpipe.Loss(loss, reduction="sum", check=False)
    pipe.step(batch, target, total)
    pipe.zero_grad()
    pipe.trace(timeline)
    pipe.step(batch, target, total)
    bytes_of = timeline.peak_bytes()
    seen: set[tuple[int, Tensor]] = set()  # stages of a worker share tied parameters
    for stage, worker in zip(pipe.partitions, plan.placement, strict=True):
        own = {(worker, each) for each in stage.parameters()} - seen
        seen |= own
        parameters = sum(each.nbytes for _, each in own)
        bytes_of[worker] += int((PARAM_SCALE - 1) * parameters) + sum(each.nbytes for each in stage.buffers())
    return bytes_of


def study(name: str, samples: int, budgets: int, schedule: str) -> dict[str, Any]:
    module, batch = make(name, samples)
    model = gpipe.to_sequential(module, *(batch if isinstance(batch, tuple) else (batch,)))
    part = torch.utils._pytree.tree_map(lambda each: each[: samples // CHUNKS], batch)
    profiles = [profile(model, part, workers=2, seconds=4, param_scale=PARAM_SCALE)]
    given: dict[str, Any] = {"chunks": CHUNKS, "schedule": schedule}
    dots = [[max(each.bytes), each.seconds, each.schedule] for each in gpipe.plan(profiles, samples, 2, **given).plans]
    most = max(gpipe.plan(profiles, samples, 2, **given).best.bytes)
    least = most // 20
    while most - least > most // 100:  # the smallest budget that fits
        middle = (least + most) // 2
        most, least = (middle, least) if gpipe.plan(profiles, samples, 2, memory=middle, **given).fits else (most, middle)
    least, most = most, max(gpipe.plan(profiles, samples, 2, checkpoint="never", **given).best.bytes)
    rows = []
    for i in range(budgets):
        memory = least + (most - least) * i // (budgets - 1)
        found = gpipe.plan(profiles, samples, 2, memory=memory, **given)
        best = found.best
        bytes_of = counted(model, batch, best)
        recomputes = best.checkpoint != "never"
        rows.append({"memory": memory, "predicted": max(best.bytes), "counted": max(bytes_of), "seconds": best.seconds,
                     "schedule": best.schedule, "recomputes": recomputes})  # fmt: skip
        dots += [[max(each.bytes), each.seconds, each.schedule] for each in found.plans if each.fits]
    return {"model": name, "rows": rows, "dots": dots}


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
    parser.add_argument("--models", nargs="+", default=["unet", "resnet50", "gpt2", "vit"])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--output", type=Path, default=Path("dial"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
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
