"""What a page is told: harmless words, no secrets, strict JSON, and no more text than allowed."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Visits
from gradsight.show.page.assemble import page as page_of
from gradsight.show.page.payload import embedded, run_payload
from gradsight.show.page.privacy import shareable_config
from gradsight.show.summary import summarize
from gradsight.store.reader import open_run
from gradsight.values.diagnoses import Diagnosis, GuiltyOperation, GuiltySample
from show.page.runs import finding, plain_norms, record
from show.scored import row, write

HOSTILE = "</script><script>window.taken = 1</script><img src=x onerror=window.taken=1> \x1b[31mred\x07 \u202egnp.exe\u2066 \u200b\ud800"
"""Markup, a terminal's codes, turned directions, what cannot be seen, and half a character."""


def hostile(path: Path) -> Path:
    """A run with tricks in every string that a run can hold, its folder's name among them."""
    names = [f"{HOSTILE}.{place}.weight" for place in range(5)]
    operation = GuiltyOperation(HOSTILE, "forward", HOSTILE, HOSTILE, HOSTILE, (), 0, HOSTILE)
    cause = Diagnosis(operation, (GuiltySample(0, HOSTILE, 0, 0, math.inf, None),), 0.1, (HOSTILE,))
    texts = dict.fromkeys(
        ("name", "evidence", "message", "recommendation", "fix", "incident"), HOSTILE
    )
    found = finding("GS103", 3, "critical", parameters=tuple(names), diagnosis=cause, **texts)
    strange = finding("<b>GS9", 4, parameters=(HOSTILE,))
    config = {
        "settings": {"watch": {}, HOSTILE: HOSTILE},
        "gradient": HOSTILE,
        "versions": {"x": HOSTILE},
    }
    place = path / "<img src=x onerror=alert(1)>\u202e"
    record(
        place,
        plain_norms(30, 5),
        names=names,
        findings=[found, strange],
        config=config,
        histograms=10,
    )
    scores = [
        row(step, HOSTILE.replace("\ud800", ""), 1.0, "<b>domain", "<i>target") for step in range(9)
    ]
    write(place, 10, scores + [row(step, "b", -1.0, "<b>domain", "<i>target") for step in range(9)])
    return place


def payload_of(path: Path, **more: Any) -> dict[str, Any]:
    run = open_run(path)
    return run_payload(run, summarize(run), **more)


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in strings(each)]
    return [text for each in value for text in strings(each)] if isinstance(value, list) else []


def test_tricks_are_escapes_and_never_themselves(tmp_path: Path) -> None:
    payload = payload_of(hostile(tmp_path), text_of=lambda _: HOSTILE, notes=[HOSTILE])
    texts = strings(payload)
    hidden = [
        sign for text in texts for sign in text if not sign.isprintable() and sign not in "\n\t"
    ]
    assert hidden == []
    assert any(r"\u202egnp" in text for text in texts)
    assert any(r"\x1b[31m" in text for text in texts)
    assert not {"<", ">", "&"} & set(embedded(payload))
    json.loads(embedded(payload), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.slow
def test_nothing_of_a_strangers_run_is_obeyed(visit: Visits, tmp_path: Path) -> None:
    place = hostile(tmp_path)
    file = place / "report.html"
    file.write_text(page_of(payload_of(place, text_of=lambda _: HOSTILE, notes=[HOSTILE])))
    page = visit(file.as_uri())
    assert page.evaluate("window.taken") is None
    assert page.locator("[data-finding]").count() == 2
    assert page.locator("img").count() == 0
    assert page.locator("main b img, main script").count() == 0
    page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    text = page.evaluate("document.documentElement.textContent + document.title")
    assert not set("\u202e\u2066\x1b\x07\u200b") & set(text)
    assert "<img src=x onerror=alert(1)>\\u202e" in page.title()
    for mode in ("deviation", "update", "zeros"):
        page.select_option("#mode", mode)
    page.fill("#filter", "<script>")
    assert page.locator("#heat").is_visible()
    assert page.evaluate("document.body.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_an_injected_script_cannot_run(visit: Visits, tmp_path: Path) -> None:
    """The policy is what holds if a text should ever become markup: here one is made markup."""
    run = record(tmp_path / "run", plain_norms(5, 14))
    text = run.html().read_text(encoding="utf-8")
    bad = "<script>window.taken = 1</script><p onclick='window.taken = 1' id='trap'>x</p>"
    run.html().write_text(text.replace("<main>", f"<main>{bad}"), encoding="utf-8")
    visits = Visits(visit.browser)
    page = visits((run.path / "report.html").as_uri())
    page.click("#trap")
    assert page.evaluate("window.taken") is None
    assert any("Content Security Policy" in error for error in visits.errors)
    visits.close()


SECRETS = {
    "hf_token": "hf_abcdefghijklmnop1234",
    "WANDB_API_KEY": "0123456789abcdef",
    "apiKey": "k-1",
    "nested": {"client-secret": ["s-1", "s-2"], "password": 12345},
    "command": ["train.py", "--api-key", "c-1", "--token=c-2", "password: c-3"],
    "note": "logged in at https://ada:p-1@example.org with sk-abcdefghijklmnopqrst",
}


def test_secrets_hosts_and_homes_stay_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/srv/people/ada")
    config = {
        "settings": {
            "watch": {},
            "data": "/srv/people/ada/x.bin",
            "other": "/home/bob/y",
            **SECRETS,
        },
        "machine": {
            "hostname": "ada-laptop",
            "user": "ada",
            "env": {"A": "secret-of-env"},
            "cpus": 2,
        },
    }
    run = record(tmp_path / "run", plain_norms(5, 14), config=config)
    text = embedded(payload_of(run.path))
    for secret in ("hf_abc", "0123456789abcdef", "k-1", "s-1", "s-2", "12345", "c-1", "c-2", "c-3"):
        assert secret not in text, secret
    for private in (
        "p-1@",
        "sk-abc",
        "ada-laptop",
        "secret-of-env",
        "/srv/people",
        "/home/bob",
        '"ada"',
    ):
        assert private not in text, private
    for shown in ("~/x.bin", "~/y", "cpus", "train.py"):
        assert shown in text, shown


def test_what_only_sounds_like_a_secret_is_shown() -> None:
    plain = {
        "tokenizer": "gpt2",
        "num_key_value_heads": 4,
        "max_tokens": 128,
        "key_size": 64,
        "monkey": "x",
    }
    assert shareable_config(plain) == plain


def test_texts_of_samples_only_where_they_may_be_shown(tmp_path: Path) -> None:
    place = hostile(tmp_path)
    private = "a private text"
    assert private not in embedded(payload_of(place))
    with_texts = payload_of(place, text_of=lambda _: private)
    assert with_texts["samples"]["best"][0]["text"] == private
    assert with_texts["findings"][0]["cause"]["samples"][0]["text"] == private


@pytest.mark.parametrize(
    ("parameters", "steps", "limit"), [(150, 1000, 600_000), (40, 8_000, 1_500_000)]
)
def test_pages_stay_small(tmp_path: Path, parameters: int, steps: int, limit: int) -> None:
    names = [f"h.{place // 12}.part{place % 12}.weight" for place in range(parameters)]
    norms = plain_norms(steps, parameters)
    norms *= np.exp2(np.sin(np.arange(steps) / steps * 40))[:, None]
    found = [finding("GS201", steps // 2, parameters=tuple(names))]
    run = record(tmp_path / "run", norms, names=names, findings=found, histograms=50)
    assert run.html().stat().st_size < limit
