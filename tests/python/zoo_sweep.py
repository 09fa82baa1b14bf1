"""Converts the models of zoo.py and compares each with the original: ``python zoo_sweep.py RESULTS.jsonl [WORD]``.

Each model with the word in its name runs in a process of its own, and adds a line to the file; a model that the file has is
left out. Then the tables of docs/zoo.md are written, if all models have run.
"""

import json
import math
import multiprocessing
import re
import resource
import signal
import sys
import warnings
from collections import defaultdict
from pathlib import Path

import torch
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.utils._pytree import tree_leaves, tree_map

import gpipe
from gpipe.verification import run_layers
from gpipe.wrapper import layers_in
import zoo
from gpipe.exported.exporter import whole_modules

sys.path.append(str(Path(__file__).parents[2] / "docs"))
import tables  # noqa: E402

SECONDS, BYTES = 600, 10 << 30  # for one model
ROUNDING = 1e-6  # the largest difference, relative to the largest number, that the order of sums explains
OPAQUE = {"MONAI VoxelMorph": "Warp"}  # modules to keep whole where the error names none
# Why bits differ, by library or name.
ROUNDED = {
    "transformers": "without a mask for padding, transformers makes a causal mask when it is exported, and lets the attention "
    "make it otherwise; with an `attention_mask` that has padding, all bits are equal",
    "timm convit_tiny": "a view of a buffer goes to the next layer as a copy, with other strides",
}


def parts_of(tree, chunks):
    """Returns the micro-batches of an object."""
    size = -(-samples_of(tree) // chunks)
    starts = range(0, samples_of(tree), size)
    return [tree_map(lambda leaf: leaf[i : i + size] if torch.is_tensor(leaf) else leaf, tree) for i in starts]


def samples_of(tree):
    return len(next(leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)))


def weighted_sum(output, _=None):
    """A loss that treats samples alike and elements differently."""
    total = 0.0
    for leaf in tree_leaves(output):
        if torch.is_tensor(leaf) and leaf.is_floating_point():
            rows = leaf.double().flatten(1)
            total = total + (rows * torch.linspace(-1, 1, rows.shape[1], dtype=torch.float64)).sin().sum()
    return total


def state_after(model, step, seed=1):
    """Returns the outputs, the gradients and the buffers after a training step. Then the buffers are as before."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(seed)
    model.zero_grad()
    outputs = [leaf.detach() for leaf in step() if torch.is_tensor(leaf)]
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return dict(enumerate(outputs)), gradients, buffers


def difference(ours, theirs):
    """Returns the largest difference of two states, relative to the largest output, gradient or buffer; 0 if all bits are
    equal; infinity if one is finite where the other is not."""
    largest = 0.0
    for mine, others in zip(ours, theirs, strict=True):
        assert {name: each.shape for name, each in mine.items()} == {name: each.shape for name, each in others.items()}
        pairs = [(mine[name].double(), others[name].double()) for name in mine if not torch.equal(mine[name], others[name])]
        if any(not torch.equal(one.isfinite(), other.isfinite()) for one, other in pairs):
            return math.inf
        if pairs:
            scale = max(float(each.double().nan_to_num(0, 0, 0).abs().max()) for each in others.values() if each.numel())
            differences = [(one - other).nan_to_num(0, 0, 0).abs().max() / scale for one, other in pairs]
            largest = max(largest, *map(float, differences))
    return largest


def backward(losses, output):
    """Returns the sum of losses, after its backward, and the tensors of the output."""
    loss = sum(losses)
    if not loss.isfinite():
        raise ValueError("the loss is not finite")
    loss.backward()
    return [loss, *tree_leaves(output)]


def input_of(args, kwargs):
    """Returns the input of a sequence that is converted for these arguments."""
    return kwargs or (args[0] if len(args) == 1 else args)


def convert(model, args, kwargs, opaque):
    """Yields what is found about a model, one fact after the other."""
    called = []
    leaves = {path: each for path, each in model.named_modules() if not list(each.children())}
    hooks = [each.register_forward_pre_hook(lambda *_, path=path: called.append(path)) for path, each in leaves.items()]
    with torch.no_grad():  # some models change themselves in the first call
        model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    yield {"middle": called[len(called) // 2]}

    sequence = gpipe.to_sequential(model, *args, opaque=opaque, **kwargs)
    native, *others = sequence.report().splitlines()
    yield {"layers": len(sequence), "native": int(native.split()[0]), "others": others}
    half = len(sequence) // 2
    yield from compare(model, args, kwargs, sequence, balance=[half, len(sequence) - half], chunks=2)


def compare(model, args, kwargs, sequence, chunks, **options):
    """Yields how a model differs from its sequence, and without dropout from a pipeline with these options."""
    input = input_of(args, kwargs)

    def on(module, *args, **kwargs):
        output = module(*args, **kwargs)
        return backward([weighted_sum(output)], output)

    theirs = state_after(model, lambda: on(model, *args, **kwargs))
    yield {"difference": difference(state_after(model, lambda: on(sequence, input)), theirs)}

    norms = {path for path, module in model.named_modules() if "BatchNorm" in type(module).__name__}
    for path, module in model.named_modules():
        module.training = path in norms or not path  # a pipeline trains if the model does
    pipe = gpipe.GPipe(sequence, chunks=chunks, **options)

    def by_micro_batch():
        outputs = [model(*part[0], **part[1]) for part in parts_of((args, kwargs), chunks)]
        leaves = [each for each in zip(*map(tree_leaves, outputs), strict=True) if torch.is_tensor(each[0])]
        return backward(map(weighted_sum, outputs), [torch.cat(each) for each in leaves])

    def by_pipeline():
        total = gpipe.Loss(weighted_sum, reduction="sum")
        return tree_leaves(pipe.step(input, torch.zeros(samples_of(input)), total, return_output=True))

    ours, theirs = (state_after(model, step) for step in (by_pipeline, by_micro_batch))
    if difference(ours, theirs) > ROUNDING and difference(state_after(model, by_micro_batch, seed=2), theirs):
        # Draws random numbers in evaluation mode, too. Those of a pipeline are others.
        theirs = state_after(model, lambda: on(run_layers, layers_in(sequence).values(), input, chunks))
    yield {"pipeline": difference(ours, theirs)}


def stages_of(model, args, kwargs, middle):
    """Returns the number of stages into which torch's own ``pipeline()`` splits a model before a module, or its error."""
    try:
        return pipeline(model, args, kwargs, split_spec={middle: SplitPoint.BEGINNING}).num_stages
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def record(name, results):
    """Adds a line about a model to a file. If the model is refused, tries the advice to keep modules whole."""
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    signal.alarm(SECONDS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model, args, kwargs = zoo.models()[name]()
    found, opaque = {"name": name, "error": ""}, {}
    while True:
        try:
            for each in convert(model.train(), args, kwargs, opaque.values()):
                found |= each
        except Exception as error:
            found["error"] += f"{type(error).__name__}: {error}\n"
            advice = re.search(r"opaque=\[(\w+)\]", str(error))
            whole = advice[1] if advice else OPAQUE.get(name)
            if whole and whole not in opaque:
                opaque[whole] = next(type(each) for each in model.modules() if type(each).__name__ == whole)
                continue
        break
    outermost = whole_modules(model, opaque.values()).values()
    found["opaque"] = sorted({type(each).__name__ for each in outermost})
    if "middle" in found:
        found["torch"] = stages_of(model.train(), args, kwargs, found["middle"])
    write(found, results)


def write(found, results):
    with open(results, "a") as file:
        file.write(json.dumps(found) + "\n")


def run(name, results):
    """Runs a model in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=record, args=(name, results))
    process.start()
    process.join()
    if process.exitcode:
        write({"name": name, "error": f"the process ended with {process.exitcode}"}, results)


def why(found):
    """Returns the reason why a model is refused, or why its bits differ, with what to do."""
    if not found["error"]:
        return ROUNDED.get(found["name"], ROUNDED.get(found["name"].split()[0], "not known"))
    reason = found["error"].splitlines()[0].partition(": ")[2].removeprefix("cannot convert the model")
    reason = re.sub(r"^: '[^']+' \((\w+)\) cannot be exported: (.*); to keep each .*", r"`\1`: \2", reason)
    reason = re.sub(r"^ \(\w+\): |^: ", "", reason)
    advice = f"; `opaque=[{', '.join(found['opaque'])}]` works" if "pipeline" in found else ""
    return re.sub(r"\bs\d+\b", "s", reason) + advice


def counts(results):
    """Returns a table of numbers of models and layers, by library."""
    rows = defaultdict(list)
    for each in results:
        for library in (each["name"].split()[0], "**all**"):
            rows[library].append(each)
    columns = ["library", "models", "converted as they are", "bit-equal", "equal", "pipeline equal", "layers without Python"]

    def row(library, found):
        ran = [each for each in found if "difference" in each]
        tests = [
            lambda each: True,
            lambda each: "difference" in each and not each["opaque"],
            lambda each: each.get("difference") == 0,
            lambda each: each.get("difference", 1) < ROUNDING,
            lambda each: each.get("pipeline", 1) < ROUNDING,
        ]
        layers = f"{sum(each['native'] for each in ran)} of {sum(each['layers'] for each in ran)}"
        traced = sum(isinstance(each.get("torch"), int) for each in found)
        return [library, *(str(sum(map(test, found))) for test in tests), layers, str(traced)]

    order = sorted(rows, key=lambda library: (library == "**all**", -len(rows[library])))
    return tables.table([*columns, "torch's `pipeline()` traces"], [row(library, rows[library]) for library in order])


def exceptions(results):
    """Returns a table of the models that are refused, or whose bits differ, by reason."""
    rows = defaultdict(list)
    for each in results:
        worst = max(each.get("difference", 1), each.get("pipeline", 1))
        if each["error"] or each["difference"] or worst > ROUNDING:
            rows[why(each)].append(each)

    def row(why, found):
        differences = [max(each["difference"], each["pipeline"]) for each in found if "pipeline" in each]
        names = ", ".join(sorted(each["name"].partition(" ")[2] for each in found))
        return [names, why, f"{max(differences):.0e}" if len(differences) == len(found) else ""]

    columns = ["models", "what happens, and what to do", "largest difference"]
    return tables.table(columns, [row(*each) for each in rows.items()])


def main(file, word=""):
    def results():
        lines = Path(file).read_text().splitlines() if Path(file).exists() else []
        return {each["name"]: each for each in map(json.loads, lines)}

    for name in zoo.models():
        if word in name and name not in results():
            run(name, file)
    found = [each for name, each in results().items() if name in zoo.models()]
    if len(found) == len(zoo.models()):
        tables.fill("zoo.md", {"counts": lambda: counts(found), "exceptions": lambda: exceptions(found)})


if __name__ == "__main__":
    main(*sys.argv[1:])
