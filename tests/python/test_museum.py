"""Failures that users reported for other pipeline libraries: the reported situation, and the right result.

A docstring cites the threads and says what fails there. docs/museum/page.py makes docs/museum/README.md of them.
"""

import copy
import functools
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe
import zoo
from gpipe.skip import pop, skippable, stash
from helpers import Add, Join, Split, Stash, gradients, make_tied_model, named_gradients, results_of, tied_batch

sys.path.append(str(Path(__file__).parents[2] / "docs/museum"))
import page  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
sum_of_cross_entropies = functools.partial(F.cross_entropy, reduction="sum")
# What other tests check: a test's file and name, the threads and the failure.
ELSEWHERE = {
    ("test_ranks.py", "test_the_lengths_of_sequences_change_between_steps_and_micro_batches"): """pytorch/pytorch#159942,
        pytorch/torchtitan#431, deepspeedai/DeepSpeed#5481: lengths that vary between steps, or micro-batches""",
    ("test_depth_skips.py", "test_attention_residuals_equal_the_sequence"): """pytorch/torchtitan#3029,
        pytorch/torchtitan#4312, NVIDIA/Megatron-LM#6840, NVIDIA/Megatron-LM#4016: many later stages read a value""",
    ("test_any_model.py", "test_a_model_equals_its_pipeline"): """pytorch/PiPPy#940, hpcaitech/ColossalAI#3630: U-Nets and
        diffusion models are not supported""",
    ("test_model_file.py", "test_cpp_trains_what_python_trains"): """pytorch/pytorch#144663: forward, backward and optimizer
        of an exported program, from C++""",
}


def test_the_page_has_the_rows_of_the_tests():
    for file, name in ELSEWHERE:
        assert f"\ndef {name}(" in Path(__file__).with_name(file).read_text()
    assert page.PAGE.read_text() == page.text(*page.written())


@pytest.mark.long
def test_the_page_tells_what_the_installed_torch_does():
    if page.written()[0] != page.VERSION:
        pytest.skip("the page is about another version of torch")
    assert page.PAGE.read_text() == page.text(page.VERSION, page.outcome)


def squares(output, target):
    return (output - target).square().sum()


def make_layers(count=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count))).double()


def batch(samples=8, seed=1):
    torch.manual_seed(seed)
    return torch.randn(2, samples, 6).double().unbind()


def plain(model, x, y, chunks=4, schedule="1f1b", loss=squares):
    """Returns the loss and the gradients of the model, called micro-batch by micro-batch."""
    model.zero_grad()
    losses = [loss(model(part), target) for part, target in zip(x.chunk(chunks), y.chunk(chunks), strict=True)]
    for each in losses[::-1] if schedule in ("gpipe", "looped_bfs") else losses:
        each.backward()
    return [sum(losses).detach(), *gradients(model)]


def piped(model, stages, x, y, chunks=4, schedule="1f1b", loss=squares, **options):
    """Returns the loss and the gradients of a copy of the model, cut into equal stages."""
    cuts = [len(model) * stage // stages for stage in range(stages + 1)]
    balance = [end - begin for begin, end in zip(cuts, cuts[1:])]
    pipe = gpipe.GPipe(copy.deepcopy(model), balance, chunks=chunks, schedule=schedule, **options)
    return [pipe.step(x, y, gpipe.Loss(loss, reduction="sum")), *gradients(pipe)]


def assert_same_bits(ours, theirs):
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def two_workers(schedule):
    """Options for four stages: two workers if the schedule takes them."""
    return {} if schedule in ("gpipe", "1f1b", "zb_h1", "zb_h2", "greedy") else {"devices": ["cpu"] * 2}


def step_over(ranks, model, balance, data, loss=squares, chunks=4, schedule="1f1b", **options):
    """Returns the loss of a step, and the gradients by name."""
    pipe = gpipe.GPipe(model, balance, group=ranks, chunks=chunks, schedule=schedule, **options)
    return pipe.step(*data, gpipe.Loss(loss, reduction="sum")), named_gradients(pipe)


def hook_a_received_tensor(ranks):
    """Returns how many hooks have run after each of three steps."""
    model, calls = make_layers(2), []
    model[1].register_forward_pre_hook(lambda _, inputs: inputs[0].register_hook(lambda _: calls.append(1)) and None)
    pipe = gpipe.GPipe(model, [1, 1], chunks=4, schedule="1f1b", checkpoint="never", group=ranks)
    return [pipe.step(*batch(), F.mse_loss) is None or len(calls) for _ in range(3)]


def train_in_ddp(ranks):
    """Returns the gradients of a whole pipeline in each process, inside DDP."""
    pipe = gpipe.GPipe(make_layers(), [2, 2], chunks=2, schedule="zb_h1")
    module = nn.ModuleList([pipe])
    module.forward = lambda x, y: pipe.compute_loss(x, y, F.mse_loss)
    parallel = nn.parallel.DistributedDataParallel(module)
    parallel(*(each.chunk(2)[ranks.rank] for each in batch())).backward()
    return gradients(pipe)


def run_all(ranks):
    interleaved = {"schedule": "interleaved_1f1b", "placement": [0, 1, 0, 1]}
    return {
        "small": step_over(ranks, make_layers(2), [1, 1], batch()),
        "few": step_over(ranks, make_layers(), [1] * 4, batch(), chunks=1, schedule="zb_v", placement="v"),
        "large": step_over(ranks, make_layers(), [1] * 4, batch(1 << 17), **interleaved),
        "tied": step_over(ranks, make_tied_model(), [2, 5], tied_batch(), sum_of_cross_entropies),
        "hooks": hook_a_received_tensor(ranks),
        "ddp": train_in_ddp(ranks),
    }


@pytest.fixture(scope="module")
def job():
    """The results of both ranks by case, of one job for all tests that need ranks."""
    first, second = results_of(2, run_all)
    return {name: (first[name], second[name]) for name in first}


def joined(results, model):
    """Returns the loss, which both ranks must have, and the gradients of both, in the order of the model."""
    (first, mine), (second, others) = results
    assert torch.equal(first, second)
    return [first, *((mine | others)[name] for name, _ in model.named_parameters())]


def test_skips_cross_stages_in_1f1b():
    """pytorch/pytorch#127964: skip connections in 1F1B; stages receive from their neighbours only"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Stash(), nn.Linear(6, 6), nn.Tanh(), Add(), nn.Linear(6, 6)).double()
    for schedule in ("1f1b", "interleaved_1f1b"):
        assert_same_bits(piped(model, 4, *batch(), schedule=schedule, **two_workers(schedule)), plain(model, *batch()))


@pytest.mark.parametrize("schedule", ["interleaved_zb", "zb_v", "dualpipe_v"])
def test_compiled_stages_run_with_split_backwards(schedule):
    """pytorch/pytorch#161904, pytorch/pytorch#143599, pytorch/torchtitan#3584: split backwards of compiled stages"""
    compiled = nn.Sequential(*(torch.compile(layer, backend="aot_eager") for layer in make_layers()))
    results = piped(compiled, 4, *batch(), schedule=schedule, devices=["cpu"] * 2)
    torch.testing.assert_close(results, plain(make_layers(), *batch()))


class Twice(nn.Linear):
    def forward(self, x):
        return x @ self.weight @ self.weight


def test_split_backward_of_a_weight_used_twice():
    """pytorch/pytorch#180952: a split backward counts the gradient of the w of `x @ w @ w` twice"""
    torch.manual_seed(0)
    model = nn.Sequential(*(Twice(6, 6, bias=False) for _ in range(4))).double()
    for schedule in ("zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v", "greedy"):
        assert_same_bits(piped(model, 4, *batch(), schedule=schedule, **two_workers(schedule)), plain(model, *batch()))


def test_zero_bubble_under_ddp_averages_the_gradients(job):
    """pytorch/pytorch#144530: zero-bubble schedules skip the hooks that DDP needs"""
    model, (x, y) = make_layers(), batch()
    F.mse_loss(model(x), y).backward()
    for of_rank in job["ddp"]:
        torch.testing.assert_close(of_rank, gradients(model))


def test_hooks_on_received_tensors_do_not_accumulate(job):
    """pytorch/pytorch#185331: hooks on received tensors persist between steps, because buffers are reused"""
    assert job["hooks"] == ([0, 0, 0], [4, 8, 12])  # four micro-batches per step


def test_fewer_micro_batches_than_stages(job):
    """pytorch/pytorch#171312, pytorch/torchtitan#775: in 1F1B, fewer micro-batches than stages are an error, or hang"""
    model = make_layers()
    for schedule in gpipe.SCHEDULES:
        for chunks in (1, 2):
            results = piped(model, 4, *batch(), chunks=chunks, schedule=schedule, **two_workers(schedule))
            assert_same_bits(results, plain(model, *batch(), chunks, schedule))
    assert_same_bits(joined(job["few"], model), plain(model, *batch(), 1))


def test_a_published_language_model():
    """pytorch/pytorch#162898, pytorch/PiPPy#1132, pytorch/PiPPy#1145: a published language model, SmolLM2-135M"""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = {"num_key_value_heads": 1, "tie_word_embeddings": True, "use_cache": False}
    model, _, inputs = zoo.transformers("llama", "CausalLM", zoo.INPUTS["input_ids"], **options)
    model, ids = model.double(), inputs["input_ids"]

    def loss(output, of):
        return sum_of_cross_entropies(output.logits.flatten(0, 1), of.flatten())

    results = piped(gpipe.to_sequential(model, ids), 2, ids, ids, schedule="zb_h1", loss=loss)
    torch.testing.assert_close(results, plain(model, ids, ids, loss=loss))


def test_ranks_on_cpus_equal_one_process(job):
    """pytorch/pytorch#132644: on CPUs with Gloo, it hangs"""
    assert_same_bits(joined(job["small"], make_layers(2)), plain(make_layers(2), *batch()))


def test_large_messages_do_not_block_each_other(job):
    """pytorch/pytorch#172668, pytorch/pytorch#175225, pytorch/pytorch#188833: the order of messages blocks stages"""
    model = make_layers()
    assert_same_bits(joined(job["large"], model), plain(model, *batch(1 << 17)))  # 1.5 MiB per message


def test_numbers_are_those_without_the_pipeline():
    """pytorch/pytorch#55036, pytorch/torchtitan#771, pytorch/torchtitan#4312: other numbers than without the pipeline"""
    model, (x, y) = make_layers(), batch(7)
    assert_same_bits(piped(model, 3, x, y), plain(model, x, y))
    model.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    pipe = gpipe.GPipe(make_layers(), [1, 3], chunks=4)  # micro-batches of 2, 2, 2 and 1
    torch.testing.assert_close([pipe.step(x, y, F.mse_loss), *gradients(pipe)], [loss.detach(), *gradients(model)])
    draws, results = nn.Sequential(*(nn.Sequential(layer, nn.Dropout()) for layer in model)), []
    for stages, schedule, checkpoint in ((1, "1f1b", "never"), (3, "1f1b", "always"), (4, "zb_h1", "never")):
        torch.manual_seed(2)
        results.append(piped(draws, stages, x, y, schedule=schedule, checkpoint=checkpoint))
        assert_same_bits(results[-1], results[0])


def test_tied_weights_across_stages(job):
    """pytorch/pytorch#51931, pytorch/torchtitan#1524, NVIDIA-NeMo/Automodel#612: tied weights in different stages"""
    model = make_tied_model()
    torch.testing.assert_close(joined(job["tied"], model), plain(model, *tied_batch(), loss=sum_of_cross_entropies))


class Flagged(nn.Sequential):
    """Passes None, a bool, a number and a text from part to part."""

    def forward(self, x, double=True):
        state = (x, None, double, {"number": 3, "text": "add"})
        for part in self:
            x, none, double, more = state
            x = part(x * 2 if double else x) * more["number"] + (x if more["text"] == "add" and none is None else 0)
            state = (x, none, not double, more)
        return state[0]


def test_a_bool_among_the_arguments():
    """pytorch/torchtitan#3112: a bool among the arguments: "'bool' object has no attribute 'requires_grad'\" """
    model, (x, y) = Flagged(*make_layers()), batch()
    assert_same_bits(piped(gpipe.to_sequential(model, x, double=True), 4, x, y, schedule="zb_h1"), plain(model, x, y))


def test_the_loss_is_on_all_ranks(job):
    """pytorch/torchtitan#547: the loss reads -1.0 on ranks without the last stage"""
    assert [loss for loss, _ in job["small"]] == plain(make_layers(2), *batch())[:1] * 2


@pytest.fixture(scope="module")
def resnet():
    """A ResNet-18, also as a sequence, and a mini-batch."""
    models = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    model, x, y = models.resnet18(num_classes=5).double(), torch.randn(4, 3, 32, 32).double(), torch.randn(4, 5).double()
    return copy.deepcopy(model), gpipe.to_sequential(model, x), x, y


def test_the_skips_of_a_resnet(resnet):
    """deepspeedai/DeepSpeed#2435, deepspeedai/DeepSpeedExamples#932: "doesn't support … skip connections in ResNet\" """
    model, sequence, x, y = resnet
    torch.testing.assert_close(piped(sequence, 3, x, y, chunks=2), plain(model, x, y, 2))


def test_a_schedule_of_the_users_own_for_a_resnet(resnet, tmp_path):
    """hpcaitech/ColossalAI#1411: a custom schedule with a ResNet-18"""
    model, sequence, x, y = resnet
    file = tmp_path / "mine"
    file.write_text("0F0 1F0 0F1 1F1 1I0 1W0 0I0 1I1 0W0 0I1 1W1 0W1\n")
    torch.testing.assert_close(piped(sequence, 2, x, y, chunks=2, schedule=f"@{file}"), plain(model, x, y, 2))


def test_none_and_other_objects_between_stages():
    """deepspeedai/DeepSpeed#1432: None and other objects between stages"""
    model, (x, y) = nn.Sequential(*make_layers(1), Split(), Join(), *make_layers(1)), batch()
    assert_same_bits(piped(model, 4, x, y, schedule="zb_h1"), plain(model, x, y))  # dicts, lists, named tuples, None
    # A converted model may pass any objects, see test_a_bool_among_the_arguments. Other layers may within a stage.
    model[1].forward = lambda x: (x, True)
    with pytest.raises(TypeError, match="got <class 'bool'>.* which may hold None"):
        gpipe.GPipe(model, [2, 2])(x)


def test_memory_is_balanced_over_workers():
    """deepspeedai/DeepSpeed#4477, sail-sg/zero-bubble-pipeline-parallelism#8: memory is unbalanced over stages"""
    peaks = {}
    for schedule, stages in (("1f1b", 4), ("zb_v", 8)):
        options = {"devices": ["cpu"] * 4, "chunks": 8, "schedule": schedule, "checkpoint": "never"}
        pipe, timeline = gpipe.GPipe(make_layers(64), [64 // stages] * stages, **options), gpipe.Timeline()
        pipe.trace(timeline)
        pipe.step(*batch(1024), F.mse_loss)
        peaks[schedule] = timeline.peak_bytes()
    assert max(peaks["1f1b"]) > 2 * min(peaks["1f1b"]) and max(peaks["zb_v"]) < 1.2 * min(peaks["zb_v"]), peaks


def test_a_checkpoint_loads_with_another_number_of_stages(tmp_path):
    """deepspeedai/DeepSpeed#1379, deepspeedai/Megatron-DeepSpeed#405: with other stages, a checkpoint does not load, or the
    loss jumps"""

    def train(balance, seeds, source=None):
        pipe, losses = gpipe.GPipe(make_layers(), balance, chunks=4, schedule="1f1b"), []
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        if source:
            for each, state in zip((pipe, optimizer), torch.load(source)):
                each.load_state_dict(state)
        for seed in seeds:
            optimizer.zero_grad()
            losses.append(pipe.step(*batch(seed=seed), F.mse_loss))
            optimizer.step()
        torch.save((pipe.state_dict(), optimizer.state_dict()), tmp_path / "saved")
        return losses

    whole = train([4], range(6))
    assert_same_bits(train([2, 2], range(3)) + train([1, 1, 2], range(3, 6), tmp_path / "saved"), whole)


def test_every_micro_batch_trains_the_model():
    """NVIDIA-NeMo/Automodel#3530: another length drops earlier gradients; only the last micro-batch trains the model"""
    model, pipe = make_layers(), gpipe.GPipe(make_layers(), [2, 2], chunks=2, schedule="1f1b")
    for length in (3, 5):
        x, y = (each[:, None].repeat(1, length, 1) for each in batch())
        pipe.step(x, y, gpipe.Loss(squares, reduction="sum"))
        squares(model(x), y).backward()
    torch.testing.assert_close(gradients(pipe), gradients(model))


def test_a_worker_that_waits_is_idle_in_a_trace():
    """NVIDIA/Megatron-LM#691, NVIDIA/Megatron-LM#828, sail-sg/zero-bubble-pipeline-parallelism#18,
    sail-sg/zero-bubble-pipeline-parallelism#25: profiles show communication and idle time as one kernel"""
    pipe, timeline = gpipe.GPipe(make_layers(), [2, 2], chunks=3, schedule="1f1b", checkpoint="never"), gpipe.Timeline()
    pipe.trace(timeline)
    pipe.step(*batch(), F.mse_loss)
    events = json.loads(timeline.to_chrome_json())["traceEvents"]
    spans = {each["name"]: (each["ts"], each["ts"] + each["dur"]) for each in events if each.get("cat") == "action"}
    assert spans.keys() == {f"{stage}{kind}{number}" for stage in (0, 1) for kind in "FB" for number in range(3)}
    for number in range(3):
        assert spans[f"0F{number}"][1] <= spans[f"1F{number}"][0] + 0.01
        assert spans[f"1B{number}"][1] <= spans[f"0B{number}"][0] + 0.01
    busy = sum(end - begin for begin, end in spans.values()) / 1e6
    assert timeline.bubble() == pytest.approx(1 - busy / (2 * timeline.makespan()), abs=1e-3)


@skippable(stash=["integers", "unused"])
class StashIntegers(nn.Module):
    def forward(self, x):
        stash("integers", (x[:, :1] * 10).long())
        stash("unused", x)
        return x


@skippable(pop=["integers", "unused"])
class PopIntegers(nn.Module):
    def forward(self, x):
        pop("unused")
        return x + pop("integers")


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_integer_and_unused_skips_and_autocast(checkpoint):
    """facebookresearch/fairscale#983, facebookresearch/fairscale#209, kakaobrain/torchgpipe: processes do not exit (see
    test_process.py); AMP, integer skips and unused skips crash"""
    model = nn.Sequential(StashIntegers(), *make_layers(2), PopIntegers())
    assert_same_bits(piped(model, 3, *batch(), checkpoint=checkpoint), plain(model, *batch()))
    model, data = model.float(), [each.float() for each in batch()]
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(piped(model, 3, *data, checkpoint=checkpoint), plain(model, *data))
