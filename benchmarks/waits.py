"""What a watch makes the host wait for, and how many kernels it orders: on the simulated device of
the tests, setting by setting.

A wait reads a number that the device has not come to. A drain is a wait with nothing ordered behind
it: the device has nothing to do when the host goes on. Counted from step 5 on, closer looks among
the steps; "kernels" are operations that are no views, in a step without a closer look.

    python benchmarks/waits.py [--lag slow --lag fast --lag 100]
"""

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from device.clock import Speed
from device.simulated import register, simulated
from device.table import SETTINGS
from device.training import Trained, train

STEPS = 9
STEADY = 5


def line(name: str, lag: Speed, trained: Trained) -> str:
    """One row of the table."""
    steady = trained.steps[STEADY:]
    waits = sum(len(waits) for waits, _ in steady) / len(steady)
    drains = len(trained.drains(STEADY))
    ours = min(kernels[True] for _, kernels in steady)
    theirs = min(kernels[False] for _, kernels in steady)
    return f"| {name} | {lag} | {drains} | {waits:.1f} | {ours} | {theirs} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lag", action="append", default=None)
    lags = parser.parse_args().lag or ["slow"]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    register()
    print("| setting | the device lags | drains | waits per step | kernels | training's |")
    print("| --- | --- | --- | --- | --- | --- |")
    worst = 0
    for name, settings in SETTINGS.items():
        for text in lags:
            lag: Speed = int(text) if text.isdigit() else text
            with simulated(lag) as there, tempfile.TemporaryDirectory() as folder:
                trained = train(settings, there.device, Path(folder), STEPS)
                worst += len(trained.drains(STEADY))
            print(line(name, lag, trained), flush=True)
    print(f"\n{worst} drains in all.")


if __name__ == "__main__":
    main()
