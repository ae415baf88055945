"""Full disks: a tmpfs of a few kilobytes to megabytes under a watch, under dumps, under train.

    python benchmarks/soak/full_disk.py

Needs the right to mount; where that is missing nothing is tried, and the last line says so.
"""

import argparse
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from forks import holds, import_everything, tell
from kills import train_command
from torch import nn

import gradsight

SIZES = ("64k", "100k", "300k", "1m", "3m", "5m")
STEPS = 200


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="disk"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
        place.rmdir()


def weights(run_dir: Path | None, stuffed: Path | None = None, dumps: bool = False) -> list[bytes]:
    """The weights after training; `stuffed`: a file that takes all room, and gives it back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watched = None
    if run_dir is not None:
        dumper = gradsight.GradientDumper(run_dir) if dumps else None
        watched = gradsight.watch(model, optimizer, run_dir=run_dir, dump=dumper, quiet=True)
    for step in range(STEPS):
        if stuffed is not None and step == STEPS // 3:
            fill(stuffed)
        if stuffed is not None and step == 2 * STEPS // 3:
            stuffed.unlink()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if watched is not None:
        watched.close()
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def fill(file: Path) -> None:
    """Take all the room there is, to the last byte."""
    with file.open("wb", buffering=0) as opened:
        for size in (4096, 1):
            try:
                while opened.write(b"x" * size) == size:
                    pass
            except OSError:
                continue


def same_weights(place: Path, dumps: bool, back: bool = False) -> Callable[[], None]:
    def check() -> None:
        warnings.simplefilter("ignore")
        stuffed = place / "stuffed" if back else None
        assert weights(place / "run", stuffed, dumps) == weights(None), "other weights"
        if back:
            steps = [step.step for step in gradsight.open_run(place / "run").steps()]
            assert steps[-1:] == [STEPS - 1], f"what came back into room is lost: {steps[-3:]}"

    return check


def trains(place: Path, text: Path) -> Callable[[], None]:
    return train_command(text, place)


def can_mount() -> bool:
    try:
        with small_disk("64k"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def main() -> None:
    promise = "full disks: training goes on, with the same weights"
    if not can_mount():
        tell(promise, 0, 0, not_run="mounting a tmpfs takes root")
        return
    text = Path(tempfile.mkdtemp(prefix="disk"))
    (text / "text.txt").write_text("".join(f"{number} crows\n" for number in range(800)))
    said = text / "said"
    tries = failures = 0
    for size in SIZES:
        for dumps in (False, True):
            with small_disk(size) as place:
                tries += 1
                print(f"watch on {size}, dumps: {dumps}", flush=True)
                failures += not holds(same_weights(place, dumps), said)
    with small_disk("2m") as place:
        tries += 1
        print("full under way, room comes back", flush=True)
        failures += not holds(same_weights(place, dumps=False, back=True), said)
    tell(promise, tries, failures)
    tries = failures = 0
    for size in SIZES:
        with small_disk(size) as place:
            tries += 1
            print(f"train on {size}", flush=True)
            failures += not holds(trains(place, text), said)
    tell("full disks: train ends well and says what it could not write", tries, failures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.parse_args()
    import_everything()
    main()
