"""Signals, exit and forked processes."""

import pytest
import torch
from torch import nn

import gpipe
from processes import run

def test_ctrl_c_ends_a_call():
    code, text = run(
        """
        class Slow(nn.Module):
            def forward(self, x):
                if slow and gpipe.is_recomputing() == backward:
                    calls.append(1)
                    time.sleep(0.1)
                return x * 1

        x = torch.zeros(50, 1)
        for what in "forward", "backward", "step":
            calls, slow, backward = [], True, what == "backward"
            pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1), Slow()), [1, 1], chunks=50, checkpoint="always")
            loss = pipe(x).sum() if backward else None
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                if what == "step":
                    pipe.step(x, x, nn.functional.mse_loss)
                else:
                    loss.backward() if backward else pipe(x)
                print("not interrupted")
            except KeyboardInterrupt:
                print(what, len(calls) < 50, pipe[0].weight.grad)
            slow = False
            pipe(x).sum().backward()
        """
    )
    assert (code, text) == (0, "forward True None\nbackward True None\nstep True None\n")


@pytest.mark.parametrize(
    "program",
    [
        "pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1)), [1]); y = pipe(torch.zeros(1, 1))",
        "pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1)), [1]); sys.modules['kept'] = pipe; pipe(torch.zeros(1, 1))",
        """
        class Slow(nn.Module):
            def forward(self, x):
                time.sleep(0.2)
                return x * 1
        pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1), Slow()), [1, 1], chunks=100)
        x = torch.zeros(100, 1)
        threading.Thread(target=pipe, args=(x,), daemon=True).start()
        time.sleep(0.5)
        """,
        """
        class Stuck(nn.Module):
            def forward(self, x):
                time.sleep(3)
                return x
        pipe = gpipe.GPipe(nn.Sequential(Stuck()), [1])
        threading.Thread(target=pipe, args=(torch.zeros(1),), daemon=True).start()
        time.sleep(0.3)
        """,
    ],
)
def test_the_process_exits_while_pipelines_live(program):
    code, text = run(program, seconds=30)
    assert code == 0, text
    assert "terminate" not in text and "Fatal" not in text


def test_a_forked_process_refuses_calls():
    code, text = run(
        """
        pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1)), [1])
        pipe(torch.zeros(1, 1))
        child = os.fork()
        if child == 0:
            code = 2
            try:
                pipe(torch.zeros(1, 1))
            except RuntimeError as error:
                code = 0 if "forked" in str(error) else 1
            del pipe
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        del pipe
        """
    )
    assert (code, text) == (0, "0\n")


def test_data_loaders_can_fork_workers():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.full((2,), float(index))

    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    for batch in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2):
        pipe(batch).sum().backward()
