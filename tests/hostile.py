"""A run whose every text is of a stranger's choosing, in every record, file and name."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from dump.test_manifest import rewrite
from gradsight import GradientDumper
from gradsight.store.incident_format import encode_document
from gradsight.store.store import open_store
from gradsight.store.tail_format import pack_statistics
from gradsight.values.diagnoses import Diagnosis
from gradsight.values.findings import Finding, Problem
from gradsight.values.health_report import Abstention
from gradsight.values.histograms import Histogram
from gradsight.values.plain import plain
from gradsight.values.steps import Step
from show.scored import row, write

T = TypeVar("T")


def filled(kind: type[T], text: str, **given: Any) -> T:
    """A record with this text in every field that can hold one, also in those added tomorrow."""
    made: T = _filled(kind, text)
    return dataclasses.replace(made, **given)  # type: ignore[type-var]


def _filled(kind: Any, text: str) -> Any:
    plain_values: dict[Any, Any] = {str: text, int: 1, float: 0.5, bool: False, type(None): None}
    if kind in plain_values:
        return plain_values[kind]
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(**{name: _filled(hints[name], text) for name in names})
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        wanted = [each for each in inner if each is str] or list(inner)
        return _filled(wanted[0], text)
    if origin is tuple:
        return (_filled(inner[0], text),) * 2
    if origin is not None and issubclass(origin, Mapping):
        return {text: _filled(inner[1], text)}
    raise AssertionError(f"no value for a field of type {kind}: add one here")


def hostile_run(run: Path, text: str) -> Path:
    """A whole run: record, config, scores, dumps, an incident, and what a check leaves."""
    _record(run, text)
    scores = [
        row(step, f"{text}{k}", k - 3.0, f"{text}{k % 2}", text)
        for step in range(4)
        for k in range(6)
    ]
    scores += [row(0, text, 1.0, text, f"{text} 2")]
    # Numbers, as the trainer's are: of these the text is looked up.
    scores += [row(step, str(k), 90.0 - 180 * k, text, text) for step in range(4) for k in (0, 1)]
    write(run, 4, scores)
    dump(run, text)
    incident(run, text)
    place = [f"{text}.py", 3]
    optimizer = {"optimizer": text, "model": text, "made": place, "steps": place}
    (run / "script.json").write_text(json.dumps([optimizer]))
    kept = {"script": {"command": [text], "exit_code": 1}}
    (run / "check.json").write_text(json.dumps(kept))
    return run


def _record(run: Path, text: str) -> None:
    store = open_store(run)
    diagnosis = filled(Diagnosis, text)
    findings = [
        filled(Finding, text, severity="critical", diagnosis=diagnosis),
        filled(Finding, text, severity="warning", code=f"GS2{text}", first_step=2),
    ]
    names = [f"{text}.weight", f"{text}.bias"]
    columns = {name: np.array([1.0, np.nan]) for name in ("l2", "max_abs")}
    columns |= {name: np.array([0.0, 1.0]) for name in ("nan", "inf")}
    for step in range(4):
        made = filled(Step, text[:60_000], step=step, scalars={})
        store.add_step(made, names, pack_statistics(None, columns))
        store.add_scalars(step, {text: 1.0, f"memory/{text}": 2.0, "memory/rss_gb": 1.0})
    for parameter in (None, text):
        store.add_histograms(3, [filled(Histogram, text, step=3, parameter=parameter, low=0)])
    for finding in findings:
        store.add_finding(finding)
    store.add_problem(filled(Problem, text))
    abstention = filled(Abstention, text)
    store.add_record("abstention", "key", 1, plain(abstention))
    parameter = {"name": text, "shape": [1], "dtype": text, "trainable": False}
    settings = {"watch": {"run_dir": text}, text: text, "train": {"data": text, "tokenizer": text}}
    versions = {"torch": text, text: text}
    store.write_config(
        {"gradient": text, "parameters": [parameter], "settings": settings, "versions": versions}
    )
    store.close()


def dump(run: Path, text: str) -> Path:
    """A dump of a full and of a sampled kind."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for first_n in (None, 2):
        with GradientDumper(run, save_first_n=first_n) as dumper:
            folder = dumper.dump(model, 3)
        assert folder is not None
        rewrite(folder, lambda body: _reword(body, text))
    return folder


def _reword(body: dict[str, Any], text: str) -> None:
    """Every text of a manifest that has no meaning for reading it."""
    body["tensors"] = {f"{text}{name}": entry for name, entry in body["tensors"].items()}
    for entry in body["tensors"].values():
        entry |= {"layout": text, "source": text, "mesh": text, "placements": [text]}
    body["parameters"] = [text]
    body["aliases"] = {text: text}
    body["left_out"] = {text: text}
    body["gradient"] = text
    body["reason"] = f"GS1 {text}; {text}"


def incident(run: Path, text: str) -> Path:
    """An incident with a hostile name too, as far as a file system takes it."""
    name = text.replace("/", "").replace(".", "").replace("\0", "")[:60]
    folder = run / "incidents" / f"step2-{name or 'x'}"
    folder.mkdir(parents=True)
    diagnosis = plain(filled(Diagnosis, text))
    body = {"step": 2, "code": text, "reason": text, "replay": text, "diagnosis": diagnosis}
    body |= {"parameters": text, "kind": text, "versions": {text: text}}
    (folder / "incident.json").write_text(encode_document(body))
    return folder
