"""Reproduces failures that users reported for torch.distributed.pipelining, small, on CPUs with Gloo.

``python docs/museum/torch_failures.py [NAME...]`` prints what the installed torch does. A case is a function that each rank
calls in a process of its own. It returns None, or what is wrong. An exception is a result too, and so is a hang.
"""

import copy
import multiprocessing
import os
import signal
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble, SplitPoint, _backward, pipeline
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.nn.parallel import DistributedDataParallel

SECONDS = 60  # A rank that has not answered by then hangs.
CPU = torch.device("cpu")
CASES = {}  # by name: the number of processes, and the function


def case(processes):
    return lambda function: CASES.update({function.__name__: (processes, function)}) or function


def layers(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(count)]


def batch(samples=8):
    torch.manual_seed(1)
    return torch.randn(2, samples, 8).double().unbind()


def placed(rank, parts, group=None):
    return [PipelineStage(parts[index], index, len(parts), CPU, group=group) for index in range(rank, len(parts), 2)]


def step(rank, schedule, x, y, last=1, **more):
    schedule.step(*([] if rank else [x]), target=y if rank == last else None, **more)


def plain(parts, x, y, chunks=4, loss=F.mse_loss):
    """Returns copies of the stages, with the gradients of the mean of the micro-batches' losses."""
    copies = copy.deepcopy(nn.Sequential(*parts))
    for part, target in zip(x.chunk(chunks), y.chunk(chunks)):
        (loss(copies(part), target) / chunks).backward()
    return list(copies)


def compare(stage, expected):
    """Names the first gradient of a stage that differs from the expected one."""
    wanted = dict(expected.named_parameters(remove_duplicate=False))
    for name, parameter in stage.named_parameters():
        ours, theirs = parameter.grad, wanted[name].grad
        if ours is None or theirs is None or not torch.allclose(ours, theirs):
            return f"wrong gradient of {name}"
    return None


def train(rank, kind, parts, data=None, chunks=4, **more):
    """Compares the gradients of a step with the plain stages' gradients."""
    x, y = data or batch()
    expected, stages = plain(parts, x, y, chunks), placed(rank, parts)
    step(rank, kind(stages if len(stages) > 1 else stages[0], chunks, F.mse_loss), x, y, **more)
    return next(filter(None, (compare(each.submod, expected[each.stage_index]) for each in stages)), None)


def train_cut(rank, model, x, y, *before, loss=F.mse_loss):
    """As train, with a model that `pipeline` cuts before some modules."""
    (whole,) = plain([model], x, y, loss=loss)
    stage = pipeline(model, (x[:2],), split_spec=dict.fromkeys(before, SplitPoint.BEGINNING)).build_stage(rank, CPU)
    step(rank, Schedule1F1B(stage, 4, loss), x, y, last=len(before))
    return compare(stage.submod, whole)


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle = layers(2)
        self.last = nn.Bilinear(8, 8, 8).double()

    def forward(self, x):
        first = self.first(x)
        return self.last(self.middle(first), first)


@case(3)
def skips_cross_stages_in_1f1b(rank):
    return train_cut(rank, Skip(), *batch(), "middle", "last")


@case(1)
def split_backward_of_a_weight_used_twice(rank):
    w = nn.Parameter(torch.tensor([[0.4, -0.2], [0.7, 0.3]]))
    x = torch.tensor([[1.1, -0.7]], requires_grad=True)
    (wanted,) = torch.autograd.grad((x @ w @ w).sum(), [w])
    _, groups = _backward.stage_backward_input([(x @ w @ w).sum()], None, [x], iter([w]))
    _backward.stage_backward_weight(iter([w]), groups)
    return None if w.grad is not None and torch.allclose(w.grad, wanted) else f"wrong gradient {w.grad}, not {wanted}"


@case(4)
def zero_bubble_under_ddp_averages_the_gradients(rank):
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, own = divmod(rank, 2)
    parts, (x, y) = layers(4), batch(16)
    expected, half = plain(parts, x, y), slice(8 * replica, 8 * replica + 8)
    wrapped = [DistributedDataParallel(part, process_group=copies[own]) for part in parts]
    stages = placed(own, wrapped, group=pipelines[replica])
    step(own, ScheduleInterleavedZeroBubble(stages, 4, F.mse_loss), x[half], y[half])
    return compare(parts[own], expected[own]) or compare(parts[own + 2], expected[own + 2])


@case(2)
def hooks_on_received_tensors_do_not_accumulate(rank):
    parts, (x, y), calls, counts = layers(2), batch(), [], []
    expected = plain(parts, x, y)
    parts[1].register_forward_pre_hook(lambda _, inputs: inputs[0].register_hook(lambda _: calls.append(1)) and None)
    schedule = Schedule1F1B(placed(rank, parts)[0], 4, F.mse_loss)
    for _ in range(3):  # the first step also infers shapes
        calls.clear()
        parts[rank].zero_grad()
        step(rank, schedule, x, y)
        counts.append(len(calls))
    return compare(parts[rank], expected[rank]) if counts[1] == counts[2] else f"hooks run {counts} times in three steps"


@case(2)
def the_lengths_of_sequences_change_between_steps_and_micro_batches(rank):
    parts = layers(2)
    schedule = Schedule1F1B(placed(rank, parts)[0], 4, F.mse_loss)
    for length in (5, 6):
        x, y = (each[:, None].repeat(1, length, 1) for each in batch())
        parts[rank].zero_grad()
        expected = plain(parts, x, y)
        step(rank, schedule, x, y)
    return compare(parts[rank], expected[rank])


@case(2)
def a_published_language_model(rank):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {"vocab_size": 50, "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "use_cache": False}
    model = LlamaForCausalLM(LlamaConfig(**config, num_key_value_heads=1, intermediate_size=48)).double()
    tokens = torch.randint(0, 50, (8, 7))

    def loss(output, of):
        return F.cross_entropy(output["logits"].flatten(0, 1), of.flatten())

    return train_cut(rank, model, tokens, tokens, "model.layers.1", loss=loss)


@case(2)
def large_messages_do_not_block_each_other(rank):
    if wrong := train(rank, ScheduleInterleaved1F1B, layers(4), batch(1 << 17)):  # 2 MiB per message
        return wrong
    actions = [str(each) for each in get_schedule_ops(ScheduleInterleaved1F1B, 8, 8, 2, with_comms=True)[0]]
    late = actions.index("8RECV_F0") < actions.index("0SEND_F1")
    return "right on CPUs; still, of eight ranks, the first receives before it sends what is ready" if late else None


@case(2)
def tied_weights_across_stages(rank):
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)).double()
    model[2].weight = model[0].weight
    tokens = torch.randint(11, (8,))
    return train_cut(rank, model, tokens, tokens, "1", loss=F.cross_entropy)


class Flagged(nn.Linear):
    def forward(self, x, double=True):
        return super().forward(x * 2 if double else x)


def compiled(rank):
    return train(rank, ScheduleInterleavedZeroBubble, [torch.compile(part, backend="aot_eager") for part in layers(4)])


def flagged(rank):
    return train(rank, ScheduleInterleavedZeroBubble, [Flagged(8, 8).double() for _ in range(4)], double=True)


CASES |= {
    "compiled_stages_run_with_split_backwards": (2, compiled),
    "a_bool_among_the_arguments": (2, flagged),
    "fewer_micro_batches_than_stages": (2, lambda rank: train(rank, Schedule1F1B, layers(2), chunks=1)),
    "ranks_on_cpus_equal_one_process": (2, lambda rank: train(rank, ScheduleGPipe, layers(2))),
    "numbers_are_those_without_the_pipeline": (2, lambda rank: train(rank, Schedule1F1B, layers(2))),
}


def _run(name, rank, folder, sender):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    processes, function = CASES[name]
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    try:
        sender.send(function(rank))
    except Exception as error:
        cause = error
        while cause and (cause := cause.__cause__) and str(cause):  # the stage wraps it
            error = cause
        sender.send(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")


def outcome(name):
    """Returns "right", or what the installed torch does wrong."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in range(CASES[name][0])]
        ranks = [context.Process(target=_run, args=(name, rank, folder, end[1])) for rank, end in enumerate(ends)]
        for process, (_, sender) in zip(ranks, ends):
            process.start()
            sender.close()
        wrong = []
        for process, (receiver, _) in zip(ranks, ends):
            try:
                wrong.append(receiver.recv() if receiver.poll(SECONDS) else "hangs")
            except EOFError:
                process.join()
                ended = process.exitcode and signal.Signals(-process.exitcode).name
                wrong.append(f"the process ends by {ended}")
        for process in ranks:
            process.kill()
            process.join()
    # Other ranks wait for the one that fails, or lose it.
    return min(filter(None, wrong), key=lambda text: ("onnection" in text, text == "hangs"), default="right")


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    for each in sys.argv[1:] or CASES:
        print(f"{each}: {outcome(each)}", flush=True)
