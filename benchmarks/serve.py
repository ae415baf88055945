"""The live page of a long run: its first answer, the server's memory, what training feels of it.

Beside each time stands that of a plain answer, or of plain training, in the same minute: on a busy
machine the ratio tells more than the time. Training is measured in rounds, with and without the
server in turn, by what its own thread spends per step and by the clock.

    python benchmarks/serve.py [--parameters 150] [--steps 100000] [--rounds 7]
"""

import argparse
import http.client
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from long_run import write_run
from playwright.sync_api import sync_playwright

TRAINING = """
import sys, time
import torch
import gradsight
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(20)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
batch = torch.randn(64, 256)
with gradsight.watch(model, optimizer, run_dir=sys.argv[1], quiet=True):
    for step in range(int(sys.argv[2]) + 50):
        if step == 50:
            began, used = time.perf_counter(), time.thread_time()
            print("begin", flush=True)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(time.perf_counter() - began, time.thread_time() - used, flush=True)
"""
STEPS = 400
QUIET = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")


@contextmanager
def serving(folder: Path, cache: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "gradsight", "serve", str(folder), "--port", "0"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def answer(url: str, path: str = "/") -> float:
    """Seconds until an answer is there, whole."""
    port, token = re.findall(r":(\d+)/\?token=(.*)", url)[0]
    began = time.perf_counter()
    with closing(http.client.HTTPConnection("127.0.0.1", int(port))) as connection:
        connection.request("GET", f"{path}?token={token}")
        connection.getresponse().read()
    return time.perf_counter() - began


def memory(process: subprocess.Popen[str]) -> float:
    """The most memory that a process has had, in MB."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", text)[0]) / 1e3


def wait_until_read(url: str, last: int) -> float:
    """Seconds until the server has read the whole run."""
    began = time.perf_counter()
    port, token = re.findall(r":(\d+)/\?token=(.*)", url)[0]
    while True:
        with closing(http.client.HTTPConnection("127.0.0.1", int(port))) as connection:
            connection.request("GET", f"/api/data?token={token}")
            if f'"last": {last}' in connection.getresponse().read().decode():
                return time.perf_counter() - began


def show_answers(folder: Path, parameters: int, steps: int) -> None:
    run = folder / "run"
    write_run(run, parameters, steps)
    print(f"{parameters:,} parameters x {steps:,} steps")
    for label in ("nothing kept", "picture kept"):
        with serving(run, folder / "cache") as (process, url):
            answer(url, "/nowhere")  # the server has been loaded
            plain = answer(url, "/nowhere")
            first = answer(url)
            reading = wait_until_read(url, steps - 1)
            again = answer(url)
            print(f"  {label}: first answer {first:.2f} s (at most 1; a plain one {plain:.3f} s)")
            print(f"    read whole after {reading:.2f} s more; then an answer takes {again:.2f} s")
            print(f"    memory {memory(process):.0f} MB (at most 300)", flush=True)


def training(run: Path) -> tuple[float, float]:
    """Seconds of a training, by the clock and of its thread."""
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, "-c", TRAINING, str(run), str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    clock, thread = done.stdout.splitlines()[-1].split()
    return float(clock), float(thread)


def show_training(folder: Path, rounds: int) -> None:
    """A training that a page in a browser follows, and one that nobody does."""
    run = folder / "runs" / "training"
    run.parent.mkdir()
    path = shutil.which("chromium") or shutil.which("google-chrome")
    alone = ["--no-sandbox"] * (os.geteuid() == 0)
    plain = []
    followed = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*QUIET, *alone])
        for _ in range(rounds):
            plain.append(training(run))
            with serving(run.parent, folder / "cache") as (_, url):
                token = url.split("?")[1]
                shutil.rmtree(run)
                write_run(run, 2, 2)  # something to open before the training begins
                page = browser.new_page()
                page.goto(f"{url.split('?')[0]}run/training/?{token}")
                followed.append(training(run))
                page.close()
        browser.close()
    for place, name in enumerate(("by the clock", "of its thread")):
        ratios = sorted(b[place] / a[place] for a, b in zip(plain, followed, strict=True))
        middle = statistics.median(ratios)
        best = min(each[place] for each in followed) / min(each[place] for each in plain)
        print(f"  training beside it, {name}: {middle:.3f} (best to best {best:.3f}; at most 1.01)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=150)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        show_answers(Path(folder), given.parameters, given.steps)
        if given.rounds:
            show_training(Path(folder), given.rounds)


if __name__ == "__main__":
    main()
