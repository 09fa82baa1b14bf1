"""The Python code in the documentation runs, and its pages are up to date."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils._pytree import tree_map

import gpipe
from gpipe import snapshot
from conftest import long
from helpers import content_of_snapshot, run_on_two_ranks

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

import tables  # noqa: E402


def model():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))


PAGES = ["README.md", "docs/guide.md", "docs/trainers.md", long("docs/start.md")]
# The names that other pages use without defining them.
GIVEN = {
    "docs/processes.md": {
        "make_model": lambda: lambda: nn.Sequential(*model(), nn.ReLU(), nn.ReLU()),
        "ranks": lambda: None,
        "batch": (8, 8),
    },
}
# Packages without which a page is skipped.
NEEDED = {
    "README.md": ["torchvision"],
    "docs/start.md": ["torchvision", "transformers", "tensorboard", "tqdm"],
    "docs/trainers.md": ["accelerate", "lightning_fabric", "transformers"],
}
SMALLER = {"README.md": ("64, 64", "32, 32")}  # images
# A block that is a program for torchrun.
PROGRAM = re.compile(r"# (\w+\.py): run with torchrun ")


def blocks_of(page):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    return blocks


@pytest.fixture
def fresh_accelerate():
    """Accelerate keeps the first Accelerator's choices for the process."""
    yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("page", [*PAGES, *GIVEN])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, fresh_accelerate):
    for package in NEEDED.get(page, []):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    given = {name: torch.rand(of) if isinstance(of, tuple) else of() for name, of in GIVEN.get(page, {}).items()}
    names = {"torch": torch, "nn": nn, "gpipe": gpipe, **given} if given else {}
    for number, block in enumerate(blocks_of(page)):
        if not PROGRAM.match(block):
            exec(compile(block.replace(*SMALLER.get(page, ("", ""))), f"{page}, block {number}", "exec"), names)


def plan_resnet18(monkeypatch, first_stage):
    """Makes from_module() choose this plan."""
    plan = {"balance": [first_stage, 14 - first_stage], "placement": [0, 1], "chunks": 4, "checkpoint": "never", "schedule": "1f1b"}
    monkeypatch.setattr("gpipe.pipeline.choose_plan", lambda *arguments, **options: plan)


def test_the_training_loop_continues_exactly_with_its_plan_and_any_cut(tmp_path, monkeypatch):
    resnet18 = pytest.importorskip("torchvision").models.resnet18
    pytest.importorskip("tensorboard")
    pytest.importorskip("tqdm")
    program, *_ = blocks_of("docs/start.md")
    assert program == (ROOT / "examples/python/train_vision.py").read_text()
    program = program.replace("EPOCHS, BATCH = 3, 32", "EPOCHS, BATCH = 2, 16").replace("[256, 64])", "[32, 16, 272])[:2]")
    assert "BATCH = 2, 16" in program and "[:2]" in program
    save = snapshot.save

    def save_and_stop(*arguments, **options):
        save(*arguments, **options)
        raise KeyboardInterrupt

    def run(folder, first_stage, save=save):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(snapshot, "save", save)
        plan_resnet18(monkeypatch, first_stage)
        exec(compile(program, "train_vision.py", "exec"), {})
        return folder / "run/latest"

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", 4, save_and_stop)
    continued = run(tmp_path / "stopped", 9)
    assert snapshot.load(continued).plan["balance"] == [4, 10]
    whole = run(tmp_path / "whole", 7)
    assert content_of_snapshot(continued) == content_of_snapshot(whole)
    (weights,) = whole.glob("model-*")
    resnet18(num_classes=10).load_state_dict(safetensors.torch.load_file(weights))


def test_the_trainer_of_transformers_trains_as_without_a_pipeline(tmp_path, monkeypatch, fresh_accelerate):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in blocks_of("docs/trainers.md") if "import GPT2Config" in block)
    no_dropout = block.replace("n_head=2,", "n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,")
    quick = no_dropout.replace("stages=2,", "stages=2, seconds=0.1,")
    ignored = quick.replace('"labels": each', '"labels": torch.where(each < 60, -100, each)')
    accumulating = ignored.replace("num_train_epochs=1", "num_train_epochs=1, gradient_accumulation_steps=2")
    plain = accumulating.replace("model.forward = forward", "")
    assert len({block, no_dropout, quick, ignored, accumulating, plain}) == 6
    results = []
    for program in accumulating, plain:
        torch.manual_seed(0)
        names = {"torch": torch, "gpipe": gpipe}
        exec(compile(program, "docs/trainers.md", "exec"), names)
        evaluated, trained = names["trainer"].state.log_history
        weights = [weight.detach() for weight in names["model"].parameters()]
        results.append((trained["train_loss"], evaluated["eval_loss"], weights))
    torch.testing.assert_close(*results)


def test_the_program_for_two_processes_keeps_them_equal(tmp_path):
    (program,) = (block for block in blocks_of("docs/trainers.md") if PROGRAM.match(block))
    weights = dict(re.findall(r"rank (\d): weights (-?\d+\.\d{6})", run_on_two_ranks(program, tmp_path)))
    assert set(weights) == {"0", "1"}
    assert weights["0"] == weights["1"]
    assert set(torch.load(tmp_path / "model.pt")) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_the_programs_over_ranks_train(tmp_path):
    one_pipeline, replicas = (block for block in blocks_of("docs/processes.md") if PROGRAM.match(block))
    assert re.fullmatch(r"loss \d\.\d{4}", run_on_two_ranks(one_pipeline, tmp_path).strip().splitlines()[-1])
    losses = re.findall(r"rank \d: loss (\d\.\d{4})", run_on_two_ranks(replicas, tmp_path))
    assert len(losses) == 2 and losses[0] == losses[1]


def test_the_table_of_schedules_is_up_to_date(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    tables.main()


LINKED = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "bench/README.md", ROOT / "examples/README.md"]


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in LINKED))
def test_the_links_of_a_page_lead_to_files(page):
    text = re.sub(r"^ *```.*?^ *```$|^    .*?$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for path, _, anchor in links:
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{path}#{anchor}"


# The three programs of docs/compare train alike and continue from their checkpoints.
COMPARE = ROOT / "docs/compare"
PROGRAMS = ["plain.py", "with_gpipe.py", "with_distributed.py"]
FLAGS = ["--samples", "32", "--size", "64", "--batch-size", "16"]


def output_of(name, folder, epochs, monkeypatch, capsys):
    flags = ["--epochs", str(epochs), *FLAGS]
    if name == "with_distributed.py":
        return run_on_two_ranks((COMPARE / name).read_text(), folder, *flags)
    monkeypatch.chdir(folder)
    plan_resnet18(monkeypatch, 7)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    runpy.run_path(str(COMPARE / name), run_name="__main__")
    return capsys.readouterr().out


def shapes(state):
    return tree_map(lambda value: getattr(value, "shape", value), dict(state))


def test_the_three_programs_train_alike(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torchvision")
    losses = {}
    for name in PROGRAMS:
        folder = tmp_path / name
        folder.mkdir()
        # The second run continues from the checkpoint of the first.
        printed = [output_of(name, folder, epochs, monkeypatch, capsys) for epochs in (1, 2)]
        found = [re.findall(r"^epoch (\d): loss (\d\.\d+), accuracy \d\.\d+$", text, re.MULTILINE) for text in printed]
        assert [[epoch for epoch, _ in epochs] for epochs in found] == [["1"], ["2"]]
        losses[name] = [float(loss) for epochs in found for _, loss in epochs]
    assert losses["with_gpipe.py"] == pytest.approx(losses["with_distributed.py"], rel=0.005)
    plain, ours, *parts = (torch.load(path) for name in PROGRAMS for path in sorted((tmp_path / name).glob("*.pt")))
    assert shapes(ours["model"]) == shapes(plain["model"]) == shapes(parts[0]["model"] | parts[1]["model"])
    assert shapes(ours["optimizer"]["state"]) == shapes(plain["optimizer"]["state"])
    # The plain program normalizes whole mini-batches.
    assert losses["with_gpipe.py"] == pytest.approx(losses["plain.py"], rel=0.2)
    assert losses["with_gpipe.py"][1] < losses["with_gpipe.py"][0]


def test_the_page_counts_the_lines():
    page = (ROOT / "docs/compared.md").read_text()
    texts = [(COMPARE / name).read_text() for name in PROGRAMS]
    ours, theirs = (
        subprocess.run(["diff", "plain.py", name], cwd=COMPARE, capture_output=True, text=True).stdout
        for name in PROGRAMS[1:]
    )
    rows = {"lines": [text.count("\n") for text in texts]}
    rows["lines of plain.py removed"] = ["", *(len(re.findall("^<", diff, re.MULTILINE)) for diff in (ours, theirs))]
    rows["lines added"] = ["", *(len(re.findall("^>", diff, re.MULTILINE)) for diff in (ours, theirs))]
    for name, values in rows.items():
        assert re.sub(" +", " ", f"| {name} | {' | '.join(map(str, values))} |") in page
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    changed = re.findall("^([<>]) (.+)", ours, re.MULTILINE)
    assert diff.splitlines() == ["-+"[side == ">"] + line for side, line in changed if not line.startswith('"""')]
    assert max(rows["lines"]) <= 100
