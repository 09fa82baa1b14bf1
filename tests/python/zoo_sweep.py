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
import statistics
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path

import torch
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.utils._pytree import tree_leaves, tree_map

import gpipe
import zoo
from gpipe.exported.exporter import whole_modules
from gpipe.verification import run_layers
from gpipe.wrapper import layers_in

sys.path.append(str(Path(__file__).parents[2] / "docs"))
import tables  # noqa: E402

WAYS = "blocks", "native"
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


def middle_of(model, args, kwargs):
    """Returns the path of the module in the middle of the calls of a model."""
    called = []
    leaves = {path: each for path, each in model.named_modules() if not list(each.children())}
    hooks = [each.register_forward_pre_hook(lambda *_, path=path: called.append(path)) for path, each in leaves.items()]
    with torch.no_grad():  # some models change themselves in the first call
        model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return called[len(called) // 2]


def convert(model, args, kwargs, opaque, native):
    """Yields what is found about a conversion, one fact after the other."""
    start = time.perf_counter()
    sequence = gpipe.to_sequential(model, *args, opaque=opaque, native=native, **kwargs)
    yield {"layers": len(sequence), "seconds": time.perf_counter() - start}
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
    """Adds a line about a model to a file."""
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    found = {"name": name}
    for way in WAYS:
        model, args, kwargs = zoo.models()[name]()
        signal.alarm(SECONDS)
        middle = middle_of(model.train(), args, kwargs)
        found[way] = converted(name, model, args, kwargs, native=way == "native")
    found["torch"] = stages_of(model.train(), args, kwargs, middle)
    write(found, results)


def converted(name, model, args, kwargs, native):
    """Returns what is found about a conversion. If the model is refused, tries the advice to keep modules whole."""
    found, opaque = {"error": ""}, {}
    while True:
        try:
            for each in convert(model.train(), args, kwargs, opaque.values(), native):
                found |= each
            break
        except Exception as error:
            found["error"] += f"{type(error).__name__}: {error}\n"
            advice = re.search(r"opaque=\[(\w+)\]", str(error))
            whole = advice[1] if advice else OPAQUE.get(name)
            if not whole or whole in opaque:
                break
            opaque[whole] = next(type(each) for each in model.modules() if type(each).__name__ == whole)
    outermost = whole_modules(model, opaque.values()).values()
    return found | {"opaque": sorted({type(each).__name__ for each in outermost})}


def write(found, results):
    with open(results, "a") as file:
        file.write(json.dumps(found) + "\n")


def run(name, results):
    """Runs a model in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=record, args=(name, results))
    process.start()
    process.join()
    if process.exitcode:
        failed = {"error": f": the process ended with {process.exitcode}", "opaque": []}
        write({"name": name, "blocks": failed, "native": failed, "torch": ""}, results)


def why(name, found):
    """Returns the reason why a model is refused, or why its bits differ, with what to do."""
    if not found["error"]:
        return ROUNDED.get(name, ROUNDED.get(name.split()[0], "not known"))
    reason = found["error"].splitlines()[0].partition(": ")[2].removeprefix("cannot convert the model")
    reason = re.sub(r"^: '[^']+' \((\w+)\) cannot be exported: (.*); to keep each .*", r"`\1`: \2", reason)
    reason = re.sub(r"^ \(\w+\): |^: ", "", reason)
    advice = f"; `opaque=[{', '.join(found['opaque'])}]` works" if "pipeline" in found else ""
    return re.sub(r"\bs\d+\b", "s", reason) + advice


def is_equal(found):
    return max(found.get("difference", 1), found.get("pipeline", 1)) < ROUNDING


def counts(results):
    """Returns a table of numbers of models, by library."""
    rows = defaultdict(list)
    for each in results:
        for library in (each["name"].split()[0], "**all**"):
            rows[library].append(each)

    def row(library, models):
        cells = [library, len(models)]
        for way in WAYS:
            found = [each[way] for each in models]
            seconds = [each["seconds"] for each in found if "seconds" in each]
            cells += [sum(map(is_equal, found)), sum(is_equal(each) and each["difference"] == 0 for each in found)]
            cells += [f"{statistics.median(seconds):.1f} s"]
        return [*map(str, cells), str(sum(isinstance(each["torch"], int) for each in models))]

    order = sorted(rows, key=lambda library: (library == "**all**", -len(rows[library])))
    columns = [f"{what}{'' if way == 'blocks' else ', native'}" for way in WAYS for what in ("equal", "bit-equal", "conversion")]
    columns = ["library", "models", *columns, "torch's `pipeline()` traces"]
    return tables.table(columns, [row(library, rows[library]) for library in order])


def exceptions(results):
    """Returns a table of the models that are refused, or whose bits differ, by reason."""
    rows = defaultdict(list)
    for each in results:
        for way in WAYS:
            if each[way]["error"] or each[way].get("difference") or not is_equal(each[way]):
                rows[way, why(each["name"], each[way])].append((each["name"], each[way]))

    def row(way, reason, models):
        differences = [max(found["difference"], found["pipeline"]) for _, found in models if "pipeline" in found]
        names = ", ".join(sorted(name.partition(" ")[2] for name, _ in models))
        return [way, names, reason, f"{max(differences):.0e}" if len(differences) == len(models) else ""]

    columns = ["layers", "models", "what happens, and what to do", "largest difference"]
    return tables.table(columns, [row(*key, models) for key, models in sorted(rows.items())])


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
