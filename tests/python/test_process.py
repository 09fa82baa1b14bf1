"""Threads and processes: cycles, signals, exit, forks, imports, and tests that need a process of their own."""

import gc
import importlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import gpipe
from helpers import Double, run


def count_threads():
    return len(os.listdir("/proc/self/task"))


def test_a_cycle_through_a_pipeline_is_collected():
    """A layer may refer to its pipeline. The cycle and its threads stay only while a graph needs them."""
    gpipe.GPipe(nn.Sequential(nn.Linear(2, 2)), [1])(torch.rand(2, 2)).sum().backward()  # PyTorch starts threads that stay
    gc.collect()
    gc.freeze()  # what was made before is not searched
    before = count_threads()
    for _ in range(3):
        pipe = gpipe.GPipe(nn.Sequential(nn.Linear(2, 2), Double()), [1, 1], chunks=2, checkpoint="always")
        pipe[0].register_forward_hook(lambda module, arguments, output, pipe=pipe: output * pipe.chunks)
        y = pipe(torch.rand(4, 2))
        layer = weakref.ref(pipe[0])
        del pipe
        gc.collect()
        assert layer() is not None and count_threads() > before
        y.sum().backward()  # with a recompute
        assert layer().weight.grad is not None
        del y
        gc.collect()
        assert layer() is None
    gc.unfreeze()
    for _ in range(200):
        time.sleep(0.05 * (count_threads() > before))
    assert count_threads() == before


def test_ctrl_c_ends_a_call_and_a_forked_process_refuses_calls():
    code, text = run("""
        class Slow(nn.Module):
            def forward(self, x):
                if slow and gpipe.is_recomputing() == backward:
                    calls.append(1)
                    time.sleep(0.1)
                return x * 1

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores Ctrl-C
        x = torch.zeros(50, 1)
        for what in "forward", "backward", "step":
            calls, slow, backward = [], True, what == "backward"
            pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1), Slow()), [1, 1], chunks=50, checkpoint="always")
            call = pipe(x).sum().backward if backward else lambda: pipe(x)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                pipe.step(x, x, nn.functional.mse_loss) if what == "step" else call()
                print("not interrupted")
            except KeyboardInterrupt:
                print(what, len(calls) < 50, pipe[0].weight.grad)
            slow = False
            pipe(x).sum().backward()

        sys.stdout.flush()
        if (child := os.fork()) == 0:
            try:
                pipe(x)
            except RuntimeError as error:
                print("forked" in str(error), flush=True)
            del pipe
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """)
    assert (code, text) == (0, "forward True None\nbackward True None\nstep True None\nTrue\n0\n")


def test_the_process_exits_while_pipelines_live():
    programs = [
        "pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1)), [1]); sys.modules['kept'] = pipe; y = pipe(torch.zeros(1, 1))",
        """
        class Late:  # the layer wakes while the interpreter destroys this
            def __del__(self, sleep=time.sleep):
                sleep(3)

        sys.modules["late"] = Late()
        pipe = gpipe.GPipe(nn.Sequential(nn.Linear(1, 1)), [1])
        pipe[0].forward = lambda x: time.sleep(2.5) or x
        threading.Thread(target=pipe, args=(torch.zeros(1, 1),), daemon=True).start()
        time.sleep(0.3)
        """,
    ]
    code, text = run(
        """
        for program in sys.argv[1:]:
            if (child := os.fork()) == 0:
                exec(program)
                sys.exit()
            print("exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        """,
        *map(textwrap.dedent, programs),
    )
    assert code == 0 and text.count("exit code 0\n") == len(programs), text
    assert "terminate" not in text and "Fatal" not in text


def test_data_loaders_can_fork_workers():
    pipe = gpipe.GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    for batch in torch.utils.data.DataLoader(torch.rand(8, 2), batch_size=4, num_workers=2):
        pipe(batch).sum().backward()


@pytest.mark.parametrize("versions, message", [  # for which the package is built, and the start of the error
    ([], "gpipe is not built: run pip install . in {folder}, "),
    (["1.0", "1.1"], "gpipe was built for torch 1.0, 1.1, but torch {torch} is installed; run pip"),
    ([torch.__version__], "gpipe cannot be loaded with torch {torch}: undefined symbol: at; run pip"),
])  # fmt: skip
def test_a_package_that_cannot_be_imported(versions, message, tmp_path, monkeypatch):
    package = tmp_path / "python" / "gpipe"  # as in a clone
    package.mkdir(parents=True)
    shutil.copy(gpipe.__file__, package)
    for version in versions:
        core = package / "cores" / ".".join(version.split(".")[:2])
        core.mkdir(parents=True)
        (core / "_C.py").write_text("raise ImportError('undefined symbol: at')")
    monkeypatch.syspath_prepend(tmp_path / "python")
    for name in [name for name in sys.modules if name.partition(".")[0] == "gpipe"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as raised:
        importlib.import_module("gpipe")
    assert str(raised.value).startswith(message.format(folder=tmp_path, torch=torch.__version__))


def test_pipelines_on_devices_that_check_the_order_of_streams():
    program = Path(__file__).with_name("on_devices.py")
    device = Path(os.environ["GPIPE_BUILD_DIR"]) / "tests/accelerator/libchecked_device.so"
    done = subprocess.run([sys.executable, program, device], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_processes_train_a_model_in_their_share_of_its_memory(tmp_path):
    options = {"cwd": Path(__file__).parent, "env": os.environ | {"TMPDIR": str(tmp_path)}}
    done = subprocess.run([sys.executable, "large.py", "60"], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
