"""The fix of every finding, pasted into a script with that fault: the fault is gone."""

import ast
import builtins
import importlib
import json
import pkgutil
import re
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradsight
from gradsight.core import open_watches
from gradsight.health import checks, judge
from gradsight.health.fixes import GIVEN
from gradsight.health.judge import checks_at_work
from gradsight.health.registry import CHECKS, Advice
from gradsight.health.tailoring import fitted
from gradsight.health.trainers import Trainer
from gradsight.health.window import OnlyOptimizer, Subject, Window
from gradsight.session import first_look
from gradsight.values.findings import Finding
from gradsight.values.steps import Step
from health.faults import FAULTS, SETUP, Fault
from launch import run_ranks

assert checks_at_work(True)  # importing it files the checks

HEADING = re.compile(
    r"^# (before the loop|instead of the loop|in the model|in a loss of your own"
    r"|in the loop, ((?:before|after|instead of) [^:\n]+))[^\n]*\n",
    re.MULTILINE,
)
"""The comment that says where a section of a fix goes."""


def every_fix() -> dict[str, str]:
    """All fixes that a finding can have, each with the code of a check that has it."""
    advice = [(code, check.advice) for code, check in CHECKS.items()]
    for module in pkgutil.iter_modules(checks.__path__):
        code = module.name.partition("_")[0].upper()
        for value in vars(importlib.import_module(f"{checks.__name__}.{module.name}")).values():
            each = value.values() if isinstance(value, dict) else [value]
            advice += [(code, found.tidy()) for found in each if isinstance(found, Advice)]
    advice += [(code, each.if_clipped) for code, each in advice if each.if_clipped is not None]
    return {each.fix: code for code, each in advice}


FIXES = every_fix()
TEMPLATES: dict[str, str] = {}
"""By the fix of a finding: the same as the check has it, without the optimizer and the rate."""


def sections(fix: str) -> dict[str, str]:
    """The code of a fix by the place where its comments say that it goes."""
    found = list(HEADING.finditer(fix))
    assert found, f"the fix does not say where it goes:\n{fix}"
    assert found[0].start() == 0, f"the fix begins without a place:\n{fix}"
    ends = [*(each.start() for each in found[1:]), len(fix)]
    result: dict[str, str] = {}
    for heading, end in zip(found, ends, strict=True):
        place = heading[2] or heading[1]
        if place in ("in the model", "in a loss of your own"):
            place = "before the loop"
        result[place] = result.get(place, "") + fix[heading.end() : end]
    return result


def pasted(fault: Fault, fix: str, keep_fault: bool) -> tuple[str, str]:
    """The setup and the loop of a script with a fix in it."""
    places = sections(fix)
    setup = SETUP.format(steps=fault.steps) + fault.setup + "\n"
    if not keep_fault:
        setup = "".join(line for line in setup.splitlines(True) if not line.endswith("# fault\n"))
    setup += places.pop("before the loop", "")
    loop = places.pop("instead of the loop", fault.loop)
    lines = []
    missing = set(places)
    for line in loop.splitlines():
        code, _, comment = line.rpartition("# ")
        place = f"instead of {comment}" if code.strip() else comment
        if place in missing:
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(textwrap.indent(places[place], indent))
            missing.remove(place)
        elif place not in places and (keep_fault or comment != "fault"):
            lines.append(line)
    assert not missing, f"the script has no place for what goes {missing}"
    return setup, "\n".join(lines)


def findings_of(fault: Fault, fix: str = "", keep_fault: bool = False) -> dict[str, Finding]:
    """What Gradsight finds in a script, as it is or with a fix, by code."""
    setup, loop = SETUP.format(steps=fault.steps) + fault.setup, fault.loop
    if fix:
        setup, loop = pasted(fault, fix, keep_fault)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional}
    exec(compile(setup, "setup", "exec"), names)

    def noted(advice: Advice, window: Window) -> Advice:
        result = fitted(advice, window)
        TEMPLATES[result.fix] = advice.tidy().fix
        return result

    with (
        mock.patch.object(judge, "fitted", noted),
        # On a busy machine, the extra pass may take longer than its usual limit.
        mock.patch.object(first_look, "_LEAST_SECONDS", 60.0),
        # GS305 gives other advice if a second watch is open: one that another test left may be.
        mock.patch.dict(open_watches._open, clear=True),
        gradsight.watch(names["model"], names["optimizer"], quiet=True) as watched,
    ):
        exec(compile(loop, "loop", "exec"), names)
        return {each.code: each for each in watched.report().findings}


@cache
def found_in(fault: Fault) -> dict[str, Finding]:
    """What Gradsight finds in a script as it is."""
    return findings_of(fault)


@pytest.mark.parametrize("fault", [each for each in FAULTS if each.code != "GS201"], ids=str)
def test_the_fix_removes_the_fault(fault: Fault, capsys: pytest.CaptureFixture[str]) -> None:
    found = found_in(fault)
    assert fault.code in found
    fix = found[fault.code].fix
    fixed = findings_of(fault, fix)
    assert set(fixed) <= set(found) - {fault.code}, "the fault is there still, or a new one is"
    if fault.printed:
        capsys.readouterr()
        findings_of(fault, fix, keep_fault=True)
        assert fault.printed in capsys.readouterr().out


@pytest.mark.parametrize("fault", [each for each in FAULTS if each.code == "GS201"], ids=str)
def test_the_fix_of_a_spike_finds_the_batch(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spike is in the data. Without the batch that the fix has saved, it is gone."""
    monkeypatch.chdir(tmp_path)
    findings_of(fault, found_in(fault)["GS201"].fix)
    (saved,) = tmp_path.iterdir()
    assert saved.name == "suspicious-50.pt"
    inputs, _ = torch.load(saved)
    assert inputs.abs().max() > 100
    cleaned = f"bad = torch.load({saved.name!r})[0]\n"
    cleaned += "loader = [each for each in loader if not torch.equal(each[0], bad)]\n"
    assert findings_of(replace(fault, setup=fault.setup + cleaned)) == {}


def test_the_fix_of_a_rank_that_stands_apart() -> None:
    printed = run_ranks(Path(__file__).with_name("fix_ranks.py"))
    told = json.loads(printed.split("RESULT ")[1].splitlines()[0])
    assert told == {"found": ["GS503"], "fixed": [], "fix": CHECKS["GS503"].advice.fix}


def test_every_fix_is_pasted_into_a_script_with_its_fault() -> None:
    tried = {TEMPLATES[found_in(fault)[fault.code].fix] for fault in FAULTS}
    # Those need several processes: test_the_fix_of_a_rank_that_stands_apart has one of them, and
    # tests/session/test_record_ranks.py trains with and without what GS504 and GS505 add.
    tried |= {fix for fix, code in FIXES.items() if code in ("GS503", "GS504", "GS505")}
    # It needs `gradsight check`: tests/attach/situations/networks.py has a script with its fix.
    tried |= {fix for fix, code in FIXES.items() if code == "GS306"}
    # Its fix for several networks: tests/attach/situations/clearing.py has a script with it.
    of_one_network = CHECKS["GS305"].advice.fix
    tried |= {fix for fix, code in FIXES.items() if code == "GS305" and fix != of_one_network}
    assert {code for fix, code in FIXES.items() if fix not in tried} == set()


def test_every_fix_fits_the_terminal() -> None:
    """The terminal shows it behind six spaces."""
    wide = [line for fix in FIXES for line in fix.splitlines() if len(line) > 74]
    assert wide == []


@pytest.mark.parametrize("fix", FIXES, ids=FIXES.values())
def test_a_fix_uses_only_names_that_are_given(fix: str) -> None:
    """Running it does not reach every branch; every name that it reads is looked up here."""
    tree = ast.parse(fix)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    made |= {
        each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names
    }
    made |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    made |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    known = made | set(GIVEN) | set(dir(builtins))
    assert {node.id for node in names} <= known


@pytest.mark.parametrize(
    ("code", "function", "at"), [("GS103", "safe_log", 0.0), ("GS104", "safe_exp", 1000.0)]
)
def test_functions_that_a_fix_offers_are_finite(code: str, function: str, at: float) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(CHECKS[code].advice.fix[CHECKS[code].advice.fix.index("def ") :], names)
    value = torch.tensor(at, requires_grad=True)
    result = names[function](value)
    result.backward()
    assert torch.isfinite(result)
    assert torch.isfinite(value.grad)


def test_models_of_transformers_have_a_switch_for_balanced_routing() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=20, num_local_experts=4, **sizes, **heads))
    tokens = torch.randint(20, (2, 8))
    plain = model(input_ids=tokens, labels=tokens).loss
    exec(sections(CHECKS["GS207"].advice.fix)["before the loop"], {"model": model, "torch": torch})
    balanced = model(input_ids=tokens, labels=tokens)
    assert balanced.loss.item() == pytest.approx((plain + 0.01 * balanced.aux_loss).item())
    assert balanced.aux_loss > 0


def spike(clipped: bool) -> Finding:
    """The finding of a spike, in a run that clips or does not."""
    (fault,) = (
        each for each in FAULTS if each.code == "GS201" and ("clipped" in each.what) == clipped
    )
    return found_in(fault)["GS201"]


def test_a_run_that_clips_is_not_told_to_clip() -> None:
    loose, clipped = spike(clipped=False), spike(clipped=True)
    assert "and clip" in loose.recommendation
    assert "max_norm=1.0" in loose.fix
    assert clipped.recommendation.startswith("Clipping limited this update")
    assert "max_norm" not in clipped.fix
    assert "suspicious-" in clipped.fix


@pytest.mark.parametrize("library", ["transformers", "lightning"])
@pytest.mark.parametrize("fix", FIXES, ids=FIXES.values())
def test_every_fix_can_be_fitted_to_a_trainer(fix: str, library: Any) -> None:
    """It still is code that says where it goes."""
    optimizer = OnlyOptimizer("Adam", False, 1e-3, "optimizer = torch.optim.Adam({given}, lr={lr})")
    trainer = Trainer(library, "Trainer", sets_rate=True)
    subject = Subject(
        ["weight"],
        [(2, 2)],
        [True],
        ["Linear"],
        [False],
        optimizer=optimizer,
        trainer=trainer,
    )
    window = Window(subject)
    window.step = Step(1, 0.0, lr=0.5)
    code = fitted(Advice("Do this.", fix), window).fix
    assert code.startswith("# ")
    ast.parse(code)
