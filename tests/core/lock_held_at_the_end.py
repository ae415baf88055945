"""Two forked ranks: an exchange is under way when rank 0 ends, and arrives while it ends.

Rank 0 ends with the interpreter's lock held, as it happens now and then on a busy machine: a
thread of gloo that then has to free a Python tensor waits for the lock until the interpreter is
gone. Arguments: "waited for" or "given up", "destroy" or "keep" for training's group, a folder.
"""

import atexit
import ctypes
import os
import sys
import time
from pathlib import Path

HOLD = 2.0
LATE = 0.7


def run(rank: int, waits: bool, destroy: bool, folder: Path) -> None:
    import numpy as np
    import torch.distributed as dist

    from gradsight.core import group as groups

    groups._EXIT_PATIENCE = 60.0 if waits else 0.0
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    group = groups.ProcessGroup()
    dist.barrier()
    if rank == 1:
        come_late(waits, folder)
        group.start_gather(np.ones(3)).wait()
        time.sleep(HOLD)
        os._exit(0)
    group.start_gather(np.ones(3))
    if destroy:
        dist.destroy_process_group()


def come_late(waits: bool, folder: Path) -> None:
    """Come while rank 0 waits at its end, or only when it no longer does."""
    time.sleep(LATE)
    until = time.monotonic() + 120
    while not waits and not (folder / "holding").exists():
        if time.monotonic() > until:
            (folder / "rank 0 waited").touch()
            os._exit(1)
        time.sleep(0.01)


if __name__ == "__main__":
    _, patience, training, name = sys.argv
    # The hook that is registered first runs last, after ours and torch's; C keeps the lock.
    atexit.register(ctypes.PyDLL(None).usleep, int(1e6 * HOLD))
    atexit.register((Path(name) / "holding").touch)
    rank = 1 if os.fork() == 0 else 0
    run(rank, patience == "waited for", training == "destroy", Path(name))
