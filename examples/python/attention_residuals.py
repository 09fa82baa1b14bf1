"""Trains two small language models on the bytes of a text, with and without attention residuals, each as a pipeline.

    python attention_residuals.py --data FILE
    torchrun --nproc-per-node 2 attention_residuals.py --ranks

A layer with attention residuals (Kimi Team, arXiv:2603.15031) reads the outputs of all earlier blocks. A pipeline sends
each once to each worker that reads it. Prints the losses side by side while it trains.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe

MODELS = "sums", "attention"  # how layers read earlier ones


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, default=Path(argparse.__file__), metavar="FILE", help="text; its last tenth is held out")
    add("--layers", type=int, default=16, help="number of layers: attention and feed-forward networks in turn")
    add("--block", type=int, default=4, help="number of layers whose outputs are summed")
    add("--width", type=int, default=64, help="features of a position")
    add("--length", type=int, default=64, help="bytes of a sample")
    add("--batch-size", type=int, default=16, help="samples per mini-batch")
    add("--steps", type=int, default=300, help="mini-batches to train with")
    add("--learning-rate", type=float, default=2e-3, help="of Adam at the start; falls to 0")
    add("--seconds", type=float, default=5, help="for measuring each model, to choose its cut and its schedule")
    add("--ranks", action="store_true", help="divide the stages among the processes that torchrun starts")
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


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Transformer(nn.Module):
    """Predicts each next byte. A layer reads the sum of all earlier outputs. With attention residuals, it reads the
    embedding, the sum of each earlier block's outputs, and the sum of its own block's outputs so far."""

    def __init__(self, layers: int, block: int, width: int, length: int, residuals: bool, heads: int = 4) -> None:
        super().__init__()
        self.block = block
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.randn(length, width) / 50)
        self.layers = nn.ModuleList(feed_forward(width) if i % 2 else Attention(width, heads) for i in range(layers))
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


def train(args: argparse.Namespace, ranks: gpipe.Ranks | None) -> None:
    first = ranks is None or ranks.rank == 0  # this process prints and writes
    text = torch.tensor(list(args.data.read_bytes()))
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
            if first:
                cells = [f"{total / every:>14.3f}{loss:>8.3f}" for total, loss in zip(sums, losses)]
                print(f"{step:>4}" + "".join(cells), flush=True)
            sums = [0.0] * len(pipes)


if __name__ == "__main__":
    arguments = parse_args()
    with gpipe.Ranks.from_environment() if arguments.ranks else nullcontext() as processes:
        train(arguments, processes)
