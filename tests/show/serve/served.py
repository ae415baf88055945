"""Starts `gradsight serve` as users do, and asks it as nobody's browser would."""

import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

import numpy as np

from gradsight.store import tail_format as frames
from gradsight.store.store import open_store
from gradsight.values.findings import Finding
from gradsight.values.steps import Step

NAMES = ["a.0.weight", "a.0.bias", "a.1.weight", "head"]


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    headers: Message
    text: str


@dataclass(frozen=True)
class Server:
    """A server that is running."""

    process: subprocess.Popen[str]
    port: int
    token: str
    lines: tuple[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def ask(
        self, path: str, method: str = "GET", headers: Mapping[str, str | None] | None = None
    ) -> Answer:
        """One request, word for word; a header of None is left out."""
        given = {"Host": f"127.0.0.1:{self.port}", **(headers or {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in given.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders()
        with closing(connection):
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read().decode())

    def get(self, path: str) -> Answer:
        """A request that carries the cookie."""
        return self.ask(path, headers={"Cookie": f"gradsight-{self.port}={self.token}"})

    def memory(self) -> int:
        """Its bytes of memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1000


@contextmanager
def serving(folder: Path, cache: Path, port: int = 0) -> Iterator[Server]:
    """A server for the time of the block; it must end when it is asked to."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gradsight", "serve", str(folder), "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    assert process.stdout is not None
    lines = (process.stdout.readline(), process.stdout.readline())
    found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]+)\n", lines[0])
    assert found is not None, (lines, process.stderr and process.stderr.read())
    try:
        yield Server(process, int(found[1]), found[2], lines)
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=90)
        assert process.returncode == 0, said
        assert not said, said


def norm(step: int, row: int) -> float:
    """The norm of a parameter at a step, of every recorded run here."""
    return float(np.float32(2.0 ** (row - 2) * (1 + 0.5 * np.sin(step * (row + 1)))))


def record(folder: Path, steps: range, finding: str | None = None, close: bool = True) -> None:
    """Record a run, or go on with it; a finding of this severity at its last step."""
    store = open_store(folder)
    for number in steps:
        norms = np.array([norm(number, row) for row in range(len(NAMES))])
        packed = frames.pack_statistics(None, {"l2": norms, "max_abs": norms / 2})
        total = float(np.sqrt(norms @ norms))
        store.add_step(
            Step(number, 1e9 + number, loss=1 / (1 + number), total_norm=total), NAMES, packed
        )
    if finding is not None:
        found = Finding("GS201", "spike", finding, (NAMES[0],), steps[-1], "seen", "m", "r", "fix")
        store.add_finding(found)
    store.flush()
    if close:
        store.close()
