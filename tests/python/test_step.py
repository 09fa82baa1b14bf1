"""Training steps: losses, schedules and placements."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe
from layers import Add, Fail, Stash, make_dropouts
from processes import run, run_on_two_ranks
from test_errors import notes

ONE_PER_WORKER = ["gpipe", "1f1b", "zb_h1", "zb_h2", "greedy"]
TWO_PER_WORKER = ["gpipe", "looped_bfs", "interleaved_1f1b", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v"]
SCHEDULES = [(name, 1) for name in ONE_PER_WORKER] + [(name, 2) for name in TWO_PER_WORKER]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Stash(), nn.Linear(6, 6), nn.Tanh(), Add(), nn.Linear(6, 3)).double()


def make_pipe(model=None, schedule="1f1b", stages_per_worker=1, **options):
    balance = [2, 4] if stages_per_worker == 1 else [1, 2, 1, 2]
    options = {"chunks": 3, "checkpoint": "always"} | options
    return gpipe.GPipe(
        make_model() if model is None else model,
        balance,
        schedule=schedule,
        stages_per_worker=stages_per_worker,
        **options,
    )


def batch(samples=7):
    torch.manual_seed(1)
    return torch.randn(samples, 4, dtype=torch.double), torch.randint(3, (samples,))


def gradients(module):
    return [parameter.grad for parameter in module.parameters()]


def whole(pipe, x, y, loss=F.cross_entropy):
    """Returns the loss and the gradients of a bare model, run whole."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)).double()
    weights = list(pipe.state_dict().values())
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    skip = model[0](x)
    value = loss(model[2](torch.tanh(model[1](skip)) + skip), y)
    return value, torch.autograd.grad(value, list(model.parameters()), retain_graph=True)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize(("schedule", "stages_per_worker"), SCHEDULES)
def test_a_step_has_the_loss_and_gradients_of_the_whole_batch(schedule, stages_per_worker, checkpoint):
    pipe = make_pipe(None, schedule, stages_per_worker, checkpoint=checkpoint)
    x, y = batch()
    expected, expected_gradients = whole(pipe, x, y)
    loss = pipe.step(x, y, F.cross_entropy)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(pipe), list(expected_gradients))
    pipe.step(x, y, F.cross_entropy)
    torch.testing.assert_close(gradients(pipe), [2 * gradient for gradient in expected_gradients])


def test_inputs_that_require_grad_get_gradients_and_the_output_is_returned():
    pipe = make_pipe()
    x, y = batch()
    x.requires_grad_()
    loss, output = pipe.step(x, y, F.cross_entropy, return_output=True)
    assert output.shape == (7, 3) and not output.requires_grad
    torch.testing.assert_close(F.cross_entropy(output, y), loss)
    torch.testing.assert_close(x.grad, torch.autograd.grad(whole(pipe, x, y)[0], x)[0])


def test_count_makes_ignored_targets_exact():
    pipe = make_pipe()
    x, y = batch()
    y[:3] = -100
    y[5] = -100
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=torch.double)

    def loss(output, target):
        return F.cross_entropy(output, target, weight=weights)

    def count(target):
        return weights[target[target >= 0]].sum()

    expected, expected_gradients = whole(pipe, x, y, loss)
    torch.testing.assert_close(pipe.step(x, y, loss, count=count), expected)
    torch.testing.assert_close(gradients(pipe), list(expected_gradients))
    output = pipe(x)
    joined = gpipe.check_loss(loss, output, y, 3, count=count)
    assert joined == pytest.approx((expected.item(), expected.item()))
    wrong = gpipe.check_loss(loss, output, y, 3)
    assert wrong[0] == pytest.approx(expected.item()) and wrong[1] != wrong[1]  # NaN: a micro-batch of ignored targets


def test_a_sum_adds_the_micro_batches():
    pipe = make_pipe()
    x, y = batch()

    def loss(output, target):
        return F.cross_entropy(output, target, reduction="sum")

    expected, expected_gradients = whole(pipe, x, y, loss)
    torch.testing.assert_close(pipe.step(x, y, loss, reduction="sum"), expected)
    torch.testing.assert_close(gradients(pipe), list(expected_gradients))


def test_check_loss_finds_a_loss_that_does_not_decompose():
    def dice(output, target):
        return 1 - 2 * (output * target).sum() / (output.sum() + target.sum())

    torch.manual_seed(0)
    output, target = torch.rand(7, 5), torch.rand(7, 5)
    whole, joined = gpipe.check_loss(dice, output, target, chunks=3)
    assert whole == pytest.approx(dice(output, target).item()) and abs(whole - joined) > 1e-4
    for loss in (F.mse_loss, lambda output, target: F.mse_loss(output.mul_(2), target)):
        before = output.clone()
        whole, joined = gpipe.check_loss(loss, output, target, chunks=3)
        assert whole == pytest.approx(joined) and torch.equal(output, before)


def test_targets_and_outputs_of_any_structure():
    class Two(nn.Module):
        def forward(self, x):
            return {"a": x, "b": (x.sum(1), None)}

    def loss(output, target):
        a, rest = target
        return F.mse_loss(output["a"], a) + F.l1_loss(output["b"][0], rest["c"])

    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(4, 4), Two()), [1, 1], chunks=2, schedule="1f1b")
    x, target = torch.randn(6, 4), (torch.randn(6, 4), {"c": torch.randn(6), "unused": None})
    value, output = pipe.step(x, target, loss, return_output=True)
    torch.testing.assert_close(loss(output, target), value)


@pytest.mark.parametrize("growth", [2.0, 1.5])
def test_a_grad_scaler_scales_gradients_and_skips_steps_that_overflow(growth):
    pipe = make_pipe(checkpoint="never")
    plain = copy.deepcopy(pipe)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_factor=growth, growth_interval=1)
    x, y = batch()
    for _ in range(3):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        loss = pipe.step(x, y, F.cross_entropy, scale=scaler)
        torch.testing.assert_close(loss, plain.step(x, y, F.cross_entropy))
        scaler.step(optimizer)
        scaler.update()
        plain_optimizer.step()
        torch.testing.assert_close(list(pipe.parameters()), list(plain.parameters()))
        if growth == 2.0:  # scaling by powers of two is exact
            assert all(map(torch.equal, pipe.parameters(), plain.parameters()))
    before = copy.deepcopy(pipe.state_dict())
    scale = scaler.get_scale()
    optimizer.zero_grad()
    pipe.step(x * float("inf"), y, F.cross_entropy, scale=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
    assert scaler.get_scale() == scale / 2


def test_loss_keeps_its_graph():
    pipe = make_pipe()
    x, y = batch()
    calls = []
    for name, parameter in pipe.named_parameters():
        parameter.register_hook(lambda gradient, name=name: calls.append(name))
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: calls.append(f"post {name}"))
    expected, expected_gradients = whole(pipe, x, y)
    loss = pipe.loss(x, y, F.cross_entropy)
    torch.testing.assert_close(loss.detach(), expected)
    assert gradients(pipe) == [None] * 6 and not calls
    got = torch.autograd.grad(loss, list(pipe.parameters()), retain_graph=True)
    torch.testing.assert_close(got, expected_gradients)
    calls.clear()
    (3 * loss).backward()
    torch.testing.assert_close(gradients(pipe), [3 * gradient for gradient in expected_gradients])
    names = [name for name, _ in pipe.named_parameters()]
    assert sorted(calls) == sorted([*names, *(f"post {name}" for name in names)])


def test_autocast_covers_forwards_and_losses_but_not_backwards():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(("forward", torch.is_autocast_enabled("cpu")))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(("backward", torch.is_autocast_enabled("cpu")))
            return gradient

    class Layer(nn.Module):
        def forward(self, x):
            return Watch.apply(x)

    def loss(output, target):
        seen.append(("loss", torch.is_autocast_enabled("cpu"), output.dtype))
        return F.mse_loss(output.float(), target)

    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(4, 4), Layer()), [1, 1], chunks=2, schedule="1f1b", checkpoint="always")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4), loss)
    assert set(seen) == {("forward", True), ("backward", False), ("loss", True, torch.bfloat16)}


@pytest.mark.parametrize(("schedule", "stages_per_worker"), SCHEDULES)
def test_random_numbers_are_those_of_a_forward(schedule, stages_per_worker):
    def step(checkpoint):
        model = make_dropouts().append(nn.Dropout(0.5))
        balance = [1, 3] if stages_per_worker == 1 else [1, 1, 1, 1]
        pipe = gpipe.GPipe(
            model, balance, chunks=3, checkpoint=checkpoint, schedule=schedule, stages_per_worker=stages_per_worker
        )
        torch.manual_seed(3)
        x, y = torch.randn(6, 4), torch.randn(6, 4)
        torch.manual_seed(4)
        loss, output = pipe.step(
            x, y, lambda output, target: F.mse_loss(F.dropout(output, 0.3), target), return_output=True
        )
        torch.manual_seed(4)
        assert torch.equal(output, gpipe.reference(model, x, chunks=3))
        return [loss, *gradients(pipe)]

    stored = step("never")
    assert all(map(torch.equal, stored, step("always")))
    assert all(map(torch.equal, stored, step("except_last")))


def test_deferred_batch_norm_sees_the_mini_batch_once():
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for convert in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        expected = copy.deepcopy(model[:2])
        expected(x)
        if convert:
            gpipe.batchnorm.convert_deferred_batch_norm(model)
        pipe = gpipe.GPipe(
            model, [2, 1], chunks=4, schedule="1f1b", checkpoint="always", deferred_batch_norm=not convert
        )
        with pytest.raises(ValueError, match="from the loss"):
            pipe.step(x, y, lambda output, target: Fail(ValueError("from the loss"))(output))
        assert pipe[1].num_batches_tracked == 0 and pipe[1].running_mean.eq(0).all()
        pipe.step(x, y, F.mse_loss)
        torch.testing.assert_close(pipe[1].running_mean, expected[1].running_mean)
        torch.testing.assert_close(pipe[1].running_var, expected[1].running_var)
        assert pipe[1].num_batches_tracked == 1


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_error_of_the_loss_is_raised_unchanged_and_leaves_no_gradients(checkpoint):
    pipe = make_pipe(checkpoint=checkpoint)
    x, y = batch()
    error = KeyError("from the loss")
    calls = []

    def loss(output, target):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return F.cross_entropy(output, target)

    random = torch.get_rng_state()
    with pytest.raises(KeyError) as raised:
        pipe.step(x, y, loss)
    assert raised.value is error
    what = "recompute" if checkpoint == "always" else "forward"
    assert notes(error)[-1].startswith(f"[gpipe] in the {what} of micro-batch ")
    assert notes(error)[-1].endswith("on stage 1, layer 'loss'")
    assert gradients(pipe) == [None] * 6
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(pipe.step(x, y, F.cross_entropy), whole(pipe, x, y)[0])


def test_a_hook_that_fails_raises_its_own_error():
    pipe = make_pipe()
    x, y = batch()
    error = ZeroDivisionError("from the hook")

    def fail(gradient):
        raise error

    handle = pipe[5].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError, match="from the hook"):
        pipe.step(x, y, F.cross_entropy)
    handle.remove()
    pipe.zero_grad()
    pipe.step(x, y, F.cross_entropy)
    torch.testing.assert_close(gradients(pipe), list(whole(pipe, x, y)[1]))


def returning(value):
    return lambda output, target: value


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss": None}, TypeError, "loss must be a function of output and target, but is None"),
        ({"loss": returning(1.0)}, TypeError, "the loss function returned 1.0; return a tensor"),
        ({"loss": returning((torch.zeros(()),))}, TypeError, "the loss function returned .*; return a tensor"),
        ({"loss": lambda output, target: output}, ValueError, r"a tensor of shape \[3, 3\] and type double"),
        ({"loss": returning(torch.zeros(()))}, ValueError, "does not depend on the model's output"),
        ({"reduction": "none"}, ValueError, "reduction must be 'mean' or 'sum', but is 'none'"),
        ({"scale": 0}, ValueError, "scale must be finite and positive, but is 0"),
        ({"scale": float("nan")}, ValueError, "scale must be finite and positive"),
        ({"scale": "1"}, TypeError, "scale must be a number, but is '1'"),
        ({"count": 3}, TypeError, "count must be a function of a target, but is 3"),
        ({"count": lambda target: -1}, ValueError, "count returned -1"),
        ({"count": lambda target: 0}, ValueError, "count is 0 for every micro-batch"),
        ({"count": lambda target: "many"}, TypeError, "the result of count must be a number"),
        ({"count": lambda target: 1, "reduction": "sum"}, ValueError, "count weights a mean"),
        ({"target": torch.zeros(6)}, ValueError, "the target has 6 samples, but the input has 7"),
        ({"target": torch.tensor(1.0)}, ValueError, "a tensor of the target has no dimensions"),
        ({"target": ()}, ValueError, "the target has no tensors"),
        ({"target": None}, TypeError, "expected Tensor, but got <class 'NoneType'>"),
        ({"target": torch.zeros(7, requires_grad=True)}, ValueError, "a target requires grad"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(arguments, error, message):
    pipe = make_pipe()
    x, y = batch()
    arguments = {"input": x, "target": y, "loss": F.cross_entropy} | arguments
    with pytest.raises(error, match=message):
        pipe.step(**arguments)
    assert gradients(pipe) == [None] * 6
    pipe.step(x, y, F.cross_entropy)


def test_steps_need_training_and_grad_mode():
    pipe = make_pipe()
    x, y = batch()
    with torch.no_grad(), pytest.raises(RuntimeError, match="needs training mode and grad mode"):
        pipe.step(x, y, F.cross_entropy)
    pipe.eval()
    for call in (pipe.step, pipe.loss):
        with pytest.raises(RuntimeError, match="use forward.. to evaluate"):
            call(x, y, F.cross_entropy)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"schedule": "2f2b"}, ValueError, "unknown schedule '2f2b'; choose one of gpipe, 1f1b, looped_bfs"),
        ({"schedule": 1}, TypeError, "schedule must be a name or '@' and the path of a file, but is 1"),
        ({"schedule": "@/nowhere"}, ValueError, "cannot read the schedule '/nowhere'"),
        ({"schedule": "1f1b", "stages_per_worker": 2}, ValueError, "needs stage s on worker s, one stage per worker"),
        ({"stages_per_worker": 3}, ValueError, "balance has 4 stages, which stages_per_worker = 3 does not divide"),
        ({"stages_per_worker": 0}, ValueError, "stages_per_worker must be positive, but is 0"),
        ({"stages_per_worker": 2.5}, TypeError, "stages_per_worker must be an integer, but is 2.5"),
        ({"stages_per_worker": 2, "devices": ["cpu"] * 3}, ValueError, "4 stages, which are on 2 workers, .* devices is 3"),
        ({"placement": "w"}, ValueError, "placement must be 'looped', 'v' or a list of workers, but is 'w'"),
        ({"placement": {0: 1}}, TypeError, "placement must be 'looped', 'v' or a list of workers, but is {0: 1}"),
        ({"placement": []}, ValueError, "placement must be 'looped', 'v' or a list of workers, but is "),
        ({"placement": [0, 1, 2, 2**40]}, ValueError, "each worker of a placement must be below 2\\*\\*31"),
        ({"stages_per_worker": 2**40}, ValueError, "stages_per_worker must be below 2\\*\\*31"),
        ({"placement": 5}, TypeError, "placement must be 'looped', 'v' or a list of workers, but is 5"),
        ({"placement": [0, 1]}, ValueError, "the placement has 2 entries, but the layout has 4 stages"),
        ({"placement": [0, 2, 2, 0]}, ValueError, "worker 1 has no stage"),
        ({"placement": "v", "stages_per_worker": 2}, ValueError, "exclude each other"),
        ({"placement": "v", "schedule": "looped_bfs"}, ValueError, "'looped_bfs' needs stage s on worker s mod"),
    ],
)
def test_schedules_and_placements_that_do_not_fit_are_refused(options, error, message):
    model = make_model()
    with pytest.raises(error, match=message):
        gpipe.GPipe(model, [1, 2, 1, 2], **options)


def test_placements():
    x, y = batch()
    expected = None
    for placement, workers in (("v", [0, 1, 1, 0]), ([1, 0, 0, 1], [1, 0, 0, 1]), ("looped", [0, 1, 2, 3])):
        pipe = gpipe.GPipe(make_model(), [1, 2, 1, 2], chunks=3, placement=placement)
        assert pipe.placement == workers and len(pipe.devices) == max(workers) + 1
        results = [pipe.step(x, y, F.cross_entropy), pipe(x).detach(), *gradients(pipe)]
        expected = expected or results
        assert all(map(torch.equal, results, expected))
    assert "schedule='gpipe'" in repr(pipe)
    for name in ("schedule", "placement"):
        with pytest.raises(AttributeError):
            setattr(pipe, name, "1f1b")
    with pytest.raises(ValueError, match="unknown schedule"):
        gpipe.GPipe(nn.Sequential(), [], schedule="2f2b")


def test_a_schedule_from_a_file(tmp_path):
    path = tmp_path / "schedule.txt"
    path.write_text("0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n")
    x, y = batch()
    pipe, named = make_pipe(schedule=f"@{path}"), make_pipe(schedule="1f1b")
    assert torch.equal(pipe.step(x, y, F.cross_entropy), named.step(x, y, F.cross_entropy))
    assert all(map(torch.equal, gradients(pipe), gradients(named)))
    with pytest.raises(ValueError, match="has 3 micro-batches, but the mini-batch is cut into 2"):
        pipe.step(x[:2], y[:2], F.cross_entropy)
    with pytest.raises(ValueError, match="places its stages itself, but stages_per_worker is 2"):
        gpipe.GPipe(make_model(), [1, 2, 1, 2], schedule=f"@{path}", stages_per_worker=2)
    path.write_text("0F0 0B0\n1F0 1X0\n")
    with pytest.raises(ValueError, match=r"schedule.txt: .*line 2, column 5"):
        make_pipe(schedule=f"@{path}")


def test_copies_and_pickles_keep_the_schedule():
    x, y = batch()
    pipe = make_pipe(None, "interleaved_1f1b", 2)
    expected = pipe.step(x, y, F.cross_entropy)
    for twin in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        twin.zero_grad()
        assert (twin.schedule, twin.placement) == ("interleaved_1f1b", [0, 1, 0, 1])
        assert torch.equal(twin.step(x, y, F.cross_entropy), expected)
        assert all(map(torch.equal, gradients(twin), gradients(pipe)))


def test_a_trace_shows_the_schedule():
    x, y = batch()
    pipe = make_pipe(checkpoint="never")
    timeline = gpipe.Timeline()
    pipe.trace(timeline)
    pipe.step(x, y, F.cross_entropy)
    pipe.trace(None)
    assert timeline.workers == 2 and all(timeline.peak_bytes()) and timeline.makespan() > 0


def test_ctrl_c_ends_a_step():
    code, text = run(
        """
        class Slow(nn.Module):
            def forward(self, x):
                calls.append(1)
                time.sleep(0.1)
                return x * 1

        calls = []
        pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1), Slow()), [1, 1], chunks=50, schedule="1f1b")
        x = torch.zeros(50, 1)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            pipe.step(x, x, nn.functional.mse_loss)
            print("not interrupted")
        except KeyboardInterrupt:
            print("interrupted", len(calls) < 50, pipe[0].weight.grad)
        Slow.forward = lambda self, x: x * 1
        pipe.step(x, x, nn.functional.mse_loss)
        print("usable")
        """
    )
    assert (code, text) == (0, "interrupted True None\nusable\n")


PARALLEL = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gpipe


class Loss(nn.Module):
    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe

    def forward(self, x, y):
        return self.pipe.loss(x, y, F.mse_loss)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
whole = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
whole.load_state_dict(model.state_dict())
pipe = gpipe.GPipe(model, [1, 2], devices=["cpu", "cpu"], chunks=3, schedule="1f1b", checkpoint="always")
parallel = DistributedDataParallel(Loss(pipe))
x, y = torch.randn(12, 4, dtype=torch.double), torch.randn(12, 2, dtype=torch.double)
for _ in range(2):
    parallel.zero_grad()
    whole.zero_grad()
    parallel(*(tensor.chunk(2)[dist.get_rank()] for tensor in (x, y))).backward()
    F.mse_loss(whole(x), y).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
dist.destroy_process_group()
"""


def test_distributed_data_parallel_averages_the_gradients_of_a_loss(tmp_path):
    run_on_two_ranks(PARALLEL, tmp_path)
