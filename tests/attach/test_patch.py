"""The patch of a check: scripts in every layout, mended, train as their mended twins do."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from attach.test_check import check
from gradsight.attach.step_calls import step_call
from gradsight.cli.patch import Patch, proposed_patch
from gradsight.core.source import users_frames
from gradsight.values.findings import Finding

HEAD = """import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.5)
other = torch.optim.SGD(model.parameters(), lr=0.25)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
class Bag: pass
bag = Bag(); bag.opts = [opt]; bag.opt = opt
xs = [3 * torch.randn(8, 4) for _ in range(6)]
n = 0
def loss_of(x): return model(x).square().mean()
"""
TAIL = """
print(float(sum(p.detach().double().sum() for p in model.parameters())), n)
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)"
FULL = f"""
for x in xs:
    loss_of(x).backward()
    {CLIP}
    opt.step()
    opt.zero_grad()
    n += 1
"""
LAYOUTS = {
    "lines": "for x in xs:\n    loss_of(x).backward()\n    opt.step()\n    n += 1\n",
    "semicolons": "for x in xs:\n    loss_of(x).backward(); opt.step(); n += 1\n",
    "one line": "for x in xs: loss_of(x).backward(); opt.step(); n += 1\n",
    "last of a line": "for x in xs: n += 1; loss_of(x).backward(); opt.step()\n",
    "trailing semicolon": "for x in xs:\n    n += 1\n    loss_of(x).backward()\n    opt.step();\n",
    "if": "for x in xs:\n    n += 1; loss_of(x).backward()\n    if n: opt.step()\n",
    "else": "for x in xs:\n    n += 1; loss_of(x).backward()\n    if not n: pass\n    else: opt.step()\n",
    "with": "for x in xs:\n  n += 1\n  with torch.enable_grad(): loss_of(x).backward(); opt.step()\n",
    "try": "for x in xs:\n  n += 1\n  try: loss_of(x).backward()\n  finally: opt.step()\n",
    "tabs": "for x in xs:\n\tloss_of(x).backward()\n\topt.step()\n\tn += 1\n",
    "form feed": "\f\nfor x in xs:\n    loss_of(x).backward()\n\f    opt.step()\n    n += 1\n",
    "comment": "for x in xs:\n    loss_of(x).backward()\n    opt.step()  # é ; step()\n    n += 1\n",
    "continued": "for x in xs:\n    loss_of(x).backward()\n    opt \\\n      .step()\n    n += 1\n",
    "after a backslash": "for x in xs:\n    loss_of(x).backward(); \\\n    opt.step()\n    n += 1\n",
    "parentheses": "for x in xs:\n    loss_of(x).backward()\n    (opt\n     .step())\n    n += 1\n",
    "two lines": "for x in xs:\n    loss_of(x).backward()\n    opt.step(\n    ); n += 1\n",
    "wide letters": "for x in xs:\n    é = 'ßé日'; loss_of(x).backward(); opt.step(); n += 1\n",
    "a string before": "for x in xs:\n    '''a\n    b'''; loss_of(x).backward(); opt.step(); n += 1\n",
    "attribute": "for x in xs:\n    loss_of(x).backward()\n    bag.opt.step()\n    n += 1\n",
    "index": "for x in xs:\n    loss_of(x).backward()\n    bag.opts[0].step()\n    n += 1\n",
    "loop variable": (
        "for x in xs:\n    loss_of(x).backward()\n    for each in bag.opts: each.step()\n    n += 1\n"
    ),
    "result": "for x in xs:\n    loss_of(x).backward()\n    _ = opt.step()\n    n += 1\n",
    "another name": (
        "import torch as th\ndel torch\nfor x in xs:\n    loss_of(x).backward()\n    opt.step()\n"
        "    n += 1\n"
    ),
    "two places": (
        "for x in xs:\n    loss_of(x).backward()\n    if n % 2: opt.step()\n    else:\n"
        "        opt.step()\n    n += 1\n"
    ),
    "a function": (
        "def train(x, mine):\n    loss_of(x).backward()\n    mine.step()\n"
        "for x in xs:\n    train(x, opt)\n    n += 1\n"
    ),
    "decorated": (
        "@torch.enable_grad()\ndef train(x): loss_of(x).backward(); opt.step()\n"
        "for x in xs: train(x); n += 1\n"
    ),
    "match": (
        "for x in xs:\n    loss_of(x).backward()\n    match n:\n        case int(): opt.step()\n"
        "    n += 1\n"
    ),
    "another step on the line": (
        "plan = torch.optim.lr_scheduler.ConstantLR(opt, factor=1.0)\n"
        "for x in xs:\n    loss_of(x).backward(); opt.step(); plan.step(); n += 1\n"
    ),
    "scaler": (
        "for x in xs:\n    scaler.scale(loss_of(x)).backward()\n    scaler.step(opt)\n"
        "    scaler.update(8.0); n += 1\n"
    ),
}


def finding(code: str) -> Finding:
    return Finding(code, "name", "warning", (), 0, {}, "", "", "")


def patched(script: Path, codes: list[str]) -> Patch:
    """Run a script in this process and propose its patch, as a check does over processes."""
    calls = {}

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        frame = next(each for each in users_frames() if each.f_code.co_filename == str(script))
        place = (frame.f_code, frame.f_lasti)
        if place not in calls:
            calls[place] = asdict(step_call(frame, optimizer))

    before = script.read_bytes()
    handle = register_optimizer_step_post_hook(stepped)
    try:
        exec(compile(before, str(script), "exec"), {"__name__": "__main__"})
    finally:
        handle.remove()
    optimizers = [{"optimizer": "SGD", "step_calls": list(calls.values())}]
    return proposed_patch(script, before, [finding(code) for code in codes], optimizers)


def applied(script: Path, patch: Patch) -> None:
    subprocess.run(
        ["patch", "--binary", str(script)], input=patch.diff, check=True, capture_output=True
    )


def printed(content: bytes, capsys: Any) -> str:
    capsys.readouterr()
    exec(compile(content, "script", "exec"), {"__name__": "__main__"})
    return str(capsys.readouterr().out)


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mended_script_trains_as_its_twin(
    layout: str, ending: str, tmp_path: Path, capsys: Any
) -> None:
    if ending == "\r" and layout in {"form feed", "continued"}:
        ending = "\n"
    script = tmp_path / "train.py"
    body = (HEAD + LAYOUTS[layout]).replace("\n", ending)
    tail = TAIL.replace("\n", ending)
    script.write_bytes((body + tail).encode())
    patch = patched(script, ["GS305", "GS102"])
    assert patch.notes == ()
    applied(script, patch)
    after = script.read_bytes()
    assert after.count(b"\n") == after.count(ending.encode()) * ending.count("\n")
    assert printed(after, capsys) == printed((HEAD + FULL + TAIL).encode(), capsys)
    (line,) = [line for line in after.decode().split(ending) if line.startswith("print(float")]
    assert line == TAIL.strip()


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8-sig", "cp1252"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_the_encoding_and_a_missing_last_newline_stay(
    encoding: str, end: str, tmp_path: Path, capsys: Any
) -> None:
    script = tmp_path / "train.py"
    cookie = "" if encoding == "utf-8-sig" else f"# coding: {encoding}\n"
    text = f"{cookie}name = 'é'; {HEAD.strip()}\nx = xs[0]\nloss_of(x).backward()\nopt.step(){end}"
    script.write_bytes(text.encode(encoding))
    patch = patched(script, ["GS305"])
    applied(script, patch)
    after = script.read_bytes().decode(encoding)
    assert after == text.removesuffix("\n") + f"\nopt.zero_grad(){end}"


REFUSED = {
    "[each.step() for each in bag.opts]": "is part of a larger expression",
    "n or opt.step()": "`opt.step()` is part of a larger expression",
    "(lambda: opt.step())()": "is part of a larger expression",
    "opt.step(lambda: loss_of(x))": "computes its gradient itself; mend the closure by hand",
    "go = opt.step; go()": "no name for the optimizer that steps in `go()` is known there",
    "(lambda: opt)().step()": "no name for the optimizer that steps in `(lambda: opt)().step()`",
}


@pytest.mark.parametrize("statement", REFUSED)
def test_what_cannot_be_mended_surely_is_left(statement: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{HEAD}for x in xs:\n    loss_of(x).backward()\n    {statement}\n")
    patch = patched(script, ["GS305", "GS102"])
    assert patch.diff == b""
    (note,) = patch.notes
    assert note.startswith("train.py:14 is left as it is: ")
    assert REFUSED[statement] in note


CLIPPING_REFUSED = {
    "the script clips gradients already": f"{HEAD}loss_of(xs[0]).backward()\n{CLIP}\nopt.step()\n",
    "torch has no name there": f"{HEAD}del torch\nloss_of(xs[0]).backward()\nopt.step()\n",
    "the script unscales gradients itself": (
        f"{HEAD}scaler.scale(loss_of(xs[0])).backward()\nscaler.unscale_(opt)\nscaler.step(opt)\n"
    ),
}


@pytest.mark.parametrize("reason", CLIPPING_REFUSED)
def test_clipping_that_would_be_wrong_is_left(reason: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CLIPPING_REFUSED[reason])
    patch = patched(script, ["GS102"])
    assert patch.diff == b""
    assert reason in patch.notes[0]


def test_a_wrapper_that_accumulates_is_not_clipped_but_cleared(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"{HEAD}from accelerate import Accelerator\n"
        "wrapped = Accelerator(cpu=True).prepare(opt)\n"
        "loss_of(xs[0]).backward()\nwrapped.step()\n"
    )
    assert "its AcceleratedOptimizer decides when" in patched(script, ["GS102"]).notes[0]
    assert b"+wrapped.zero_grad()\n" in patched(script, ["GS305"]).diff


def test_steps_in_another_file_and_a_changed_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"{HEAD}for x in xs:\n    loss_of(x).backward()\n    opt.step()\n"
    )
    script = tmp_path / "main.py"
    script.write_text("import train\n")
    told = [
        {"step_calls": [{"file": str(tmp_path / "train.py"), "line": 14, "span": None, "text": ""}]}
    ]
    patch = proposed_patch(script, script.read_bytes(), [finding("GS305")], told)
    assert patch.notes == ("train.py:14 is left as it is: it is not a line of main.py",)
    assert proposed_patch(script, b"", [finding("GS305")], told).notes == (
        "main.py was changed while it ran",
    )
    assert proposed_patch(script, b"", [finding("GS103")], told).notes == (
        "nothing was found that a machine can mend",
    )


def test_check_offers_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{HEAD}for x in 4 * xs:\n    loss_of(x).backward(); opt.step(); n += 1\n")
    done = check("--patch", "fix.diff", script, cwd=tmp_path)
    assert "patch: fix.diff" in done.stdout
    assert "opt.step(); opt.zero_grad(); n += 1" in (tmp_path / "fix.diff").read_text()
    launched = check("--patch", "fix.diff", sys.executable, script, cwd=tmp_path)
    assert "patch: fix.diff" in launched.stdout, launched.stderr
    script.write_text(script.read_text().replace("opt.step();", "n < 0 or opt.step();", 1))
    refused = check("--patch", "fix.diff", script, cwd=tmp_path)
    assert "no patch: fix.diff is empty." in refused.stdout
    assert "train.py:13 is left as it is: `opt.step()` is part of a larger" in refused.stdout
    assert (tmp_path / "fix.diff").read_text() == ""
