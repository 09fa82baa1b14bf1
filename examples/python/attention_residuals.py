"""Trains two small language models on the bytes of a text, with and without attention residuals, each as a pipeline.

    python attention_residuals.py --data FILE
    torchrun --nproc-per-node 2 attention_residuals.py --ranks

A layer with attention residuals (Kimi Team, arXiv:2603.15031) reads the outputs of all earlier blocks. A pipeline sends
each once to each worker that reads it. Prints the losses side by side while it trains, and draws them into --output.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe

MODELS = {"sums": "#888888", "attention": "#d62728"}  # how layers read earlier ones, and the color of the curve


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {text}")
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, default=Path(argparse.__file__), metavar="FILE", help="text; its last tenth is held out")
    add("--layers", type=positive, default=16, help="number of layers: attention and feed-forward networks in turn")
    add("--block", type=positive, default=4, help="number of layers whose outputs are summed")
    add("--width", type=positive, default=64, help="features of a position")
    add("--length", type=positive, default=64, help="bytes of a sample")
    add("--batch-size", type=positive, default=16, help="samples per mini-batch")
    add("--steps", type=positive, default=300, help="mini-batches to train with")
    add("--learning-rate", type=float, default=2e-3, help="of Adam at the start; falls to 0")
    add("--seconds", type=float, default=5, help="for measuring each model, to choose its cut and its schedule")
    add("--ranks", action="store_true", help="divide the stages among the processes that torchrun starts")
    add("--output", type=Path, default=Path("out/attention_residuals.svg"), metavar="FILE", help="for the picture")
    return parser.parse_args()


class DepthAttention(nn.Module):
    """Computes the input of layer l from earlier values v_i: h_l = sum_i alpha_{i->l} v_i, where alpha_{i->l} is the
    softmax over i of w_l · RMSNorm(v_i), and w_l a learned query. At first, all values have the same weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width))

    def forward(self, values: list[Tensor]) -> Tensor:
        stacked = torch.stack(values)
        scores = F.rms_norm(stacked, stacked.shape[-1:]) @ self.query
        mixed: Tensor = (scores.softmax(0)[..., None] * stacked).sum(0)
        return mixed


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Transformer(nn.Module):
    """Predicts each next byte. A layer reads the sum of all earlier outputs. With attention residuals, it reads the
    embedding, the sum of each earlier block's outputs, and the sum of its own block's outputs so far."""

    def __init__(self, layers: int, block: int, width: int, length: int, residuals: bool, heads: int = 4) -> None:
        super().__init__()
        self.block = block
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.randn(length, width) / 50)
        self.layers = nn.ModuleList(FeedForward(width) if i % 2 else Attention(width, heads) for i in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.reads = nn.ModuleList(DepthAttention(width) for _ in range(layers + 1)) if residuals else None

    def forward(self, bytes: Tensor) -> Tensor:
        values = [self.embedding(bytes) + self.positions]
        for index, layer in enumerate(self.layers):
            output = layer(self.reads[index](values) if self.reads else values[0])
            if self.reads and index % self.block == 0:
                values.append(output)  # begins a block
            else:
                values[-1] = values[-1] + output
        logits: Tensor = self.head(self.norm(self.reads[-1](values) if self.reads else values[0]))
        return logits


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, target)


def draw(history: list[list[float]], path: Path) -> None:
    """Draws the losses of the held-out text as a picture, in SVG. A row of the history has a step and the losses."""
    losses = [loss for row in history for loss in row[1:]]
    steps, low, high = history[-1][0], min(losses), max(losses) + 1e-6

    def at(step: float, loss: float) -> str:
        return f"{50 + 490 * step / steps:.1f},{250 - 210 * (loss - low) / (high - low):.1f}"

    style = 'style="font: 12px sans-serif; background: white"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 560 300" {style}>']
    lines.append('<text x="50" y="24">loss per byte of the held-out text</text>')
    lines.append('<text x="295" y="290" text-anchor="middle">step</text>')
    for part in (0, 0.25, 0.5, 0.75, 1):
        loss, step = low + part * (high - low), part * steps
        lines.append(f'<polyline points="{at(0, loss)} {at(steps, loss)}" stroke="#ddd"/>')
        lines.append(f'<text x="44" y="{254 - 210 * part}" text-anchor="end">{loss:.2f}</text>')
        lines.append(f'<text x="{50 + 490 * part}" y="270" text-anchor="middle">{step:.0f}</text>')
    for model, (name, color) in enumerate(MODELS.items(), 1):
        points = " ".join(at(row[0], row[model]) for row in history)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        text = f"{name}: {history[-1][model]:.3f}"
        lines.append(f'<text x="530" y="{40 + 20 * model}" text-anchor="end" fill="{color}">{text}</text>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "</svg>", ""]))


def train(args: argparse.Namespace, ranks: gpipe.Ranks | None) -> None:
    first = ranks is None or ranks.rank == 0  # this process prints and writes
    text = torch.tensor(list(args.data.read_bytes()))
    if len(text) < 20 * args.length:
        raise ValueError(f"{args.data} has {len(text)} bytes; give at least 20 times --length, {20 * args.length}")
    samples = text.unfold(0, args.length + 1, 1)  # begin at each byte
    count = len(samples) // 10
    training, held_out = samples[: -count - args.length], samples[-count :: args.length]
    pipes, optimizers = [], []
    for name in MODELS:
        torch.manual_seed(1)
        model = Transformer(args.layers, args.block, args.width, args.length, residuals=name == "attention")
        pipe = gpipe.GPipe.from_module(model, training[: args.batch_size, :-1], seconds=args.seconds, group=ranks)
        pipes.append(pipe)
        # A process whose stages have no parameters has an empty group.
        optimizers.append(torch.optim.Adam([{"params": list(pipe.parameters())}], lr=args.learning_rate))
        if first:
            print(f"{name}: {pipe.plan}")

    history: list[list[float]] = []
    sums = [0.0] * len(pipes)  # of the losses since the last line of the table
    every = max(1, args.steps // 20)
    generator = torch.Generator().manual_seed(1)  # each process draws the same samples
    if first:
        print("step" + "".join(f"{name:>22}" for name in MODELS) + "   loss per byte: training, held out")
    for step in range(1, args.steps + 1):
        chosen = training[torch.randint(len(training), (args.batch_size,), generator=generator)]
        for index, (pipe, optimizer) in enumerate(zip(pipes, optimizers)):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (step - 1) / args.steps)
            optimizer.zero_grad()
            sums[index] += pipe.step(chosen[:, :-1], chosen[:, 1:], cross_entropy).item()
            optimizer.step()
        if step % every == 0:
            losses = [pipe.evaluate(held_out[:, :-1], held_out[:, 1:], cross_entropy).item() for pipe in pipes]
            history.append([step, *losses])
            if first:
                cells = [f"{total / every:>14.3f}{loss:>8.3f}" for total, loss in zip(sums, losses)]
                print(f"{step:>4}" + "".join(cells), flush=True)
            sums = [0.0] * len(pipes)
    if first:
        draw(history, args.output)
        print(f"done: {args.steps} steps, in {args.output}")


def main() -> int:
    args = parse_args()
    try:
        with gpipe.Ranks.from_environment() if args.ranks else nullcontext() as ranks:
            train(args, ranks)
    except KeyboardInterrupt:
        return 130
    except (IndexError, OSError, RuntimeError, ValueError) as error:
        print("error:", str(error).splitlines()[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
