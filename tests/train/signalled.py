"""Run by test_ending.py: `gradsight train` that gets a signal in a set step, whatever the load.

python signalled.py STEP SIGNAL TOKENS...
"""

import os
import sys
from typing import Any

from gradsight.cli import main
from gradsight.train import run
from gradsight.train.batches import Batch

if __name__ == "__main__":
    step, number = int(sys.argv[1]), int(sys.argv[2])
    run_training = run.run_training

    def signalled(now: int, batch: Batch) -> Batch:
        if now == step:
            os.kill(os.getpid(), number)
        return batch

    def run_signalled(settings: Any, **options: Any) -> int:
        return run_training(settings, on_batch=signalled, **options)

    run.run_training = run_signalled
    sys.exit(main(["train", *sys.argv[3:]]))
