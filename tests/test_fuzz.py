"""The fuzz targets, for a moment each, and the runner: it sees what it is for."""

import contextlib
import copy
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from gradsight.errors import GradsightError

pytestmark = [pytest.mark.slow, pytest.mark.internal]

FUZZ = Path(__file__).parents[1] / "fuzz"
sys.path.append(str(FUZZ.parent))

from fuzz.mutate import ODD, mutated  # noqa: E402
from fuzz.run import load, target_names  # noqa: E402


@pytest.mark.parametrize("name", target_names())
def test_readers_raise_nothing_but_our_errors(name: str) -> None:
    module = load(name)
    known = module.corpus()
    for data in known:
        module.target(data)
    rng = random.Random(name)
    for _ in range(60):
        data = mutated(rng.choice(known), known, rng)
        try:
            module.target(data)
        except GradsightError:
            pass
        except Exception as error:
            raise AssertionError(f"{name} failed on {data!r}") from error


JSON_FORMATS = ["manifest", "incident", "replay", "check"]
VALUES = some.sampled_from(ODD) | some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
    max_leaves=6,
)


@pytest.mark.parametrize("name", JSON_FORMATS)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=some.data())
def test_structured_garbage(name: str, data: some.DataObject) -> None:
    """A real file of this format with some of its values replaced by anything at all."""
    module = load(name)
    texts = [text for text in module.corpus() if text[:1] in (b"{", b"[")]
    value = json.loads(data.draw(some.sampled_from(texts)))
    for _ in range(data.draw(some.integers(1, 3))):
        replace_somewhere(value, data)
    with contextlib.suppress(GradsightError):
        module.target(json.dumps(value).encode())


def replace_somewhere(value: object, data: some.DataObject) -> None:
    """Walk into a value, and put something else in the place where the walk ends."""
    while isinstance(value, dict | list) and value:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        place = data.draw(some.sampled_from(places))
        inner = value[place]
        if not isinstance(inner, dict | list) or not inner or data.draw(some.integers(0, 4)) == 0:
            value[place] = copy.deepcopy(data.draw(VALUES))
            return
        value = inner


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError(data)", "KeyError"),
        ("while True: pass", "TooSlow"),
        ("bytearray(3 << 30)", "MemoryError"),
        ("__import__('os').abort()", "ended with -6"),
    ],
)
def test_the_runner_sees_what_it_is_for(body: str, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "fuzz"
    folder.mkdir()
    changes = {"while time.monotonic() < end:": "while tries < 3:"}
    if words == "TooSlow":
        changes |= {"SLOWEST = 30": "SLOWEST = 0.2", "seconds + 4 * SLOWEST": "None"}
    runner = (FUZZ / "run.py").read_text()
    for text, other in changes.items():
        assert text in runner
        runner = runner.replace(text, other)
    (folder / "run.py").write_text(runner)
    (folder / "mutate.py").write_text((FUZZ / "mutate.py").read_text())
    (folder / "bad.py").write_text(
        f"def target(data):\n    if data != b'fine':\n        {body}\n\n"
        "def corpus():\n    return [b'fine']\n"
    )
    command = [sys.executable, str(folder / "run.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert words in done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["promise"]
    assert last["failures"] > 0
