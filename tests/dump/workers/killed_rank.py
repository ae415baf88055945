"""Two gloo ranks, of which the second is killed while it writes; the first trains on and tells what
it knows.
"""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gradsight import GradientDumper
from gradsight.core import files


def main(run: Path, kill: bool) -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 60)))
    model(torch.ones(2, 40)).sum().backward()
    dumper = GradientDumper(run)
    dumper.dump(model, 0)
    dumper.wait()
    if kill and dist.get_rank() == 1:
        write = os.write
        files.os.write = lambda handle, data: (
            write(handle, data[: len(data) // 2]),
            os.kill(os.getpid(), signal.SIGKILL),
        )
    dumper.dump(model, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dumper.wait()
        dumper.dump(model, 2)
        dumper.close()
    words = [
        f"{dumper.written} written, {dumper.failed} failed",
        *(str(one.message) for one in caught),
    ]
    (run / f"rank{dist.get_rank()}.txt").write_text("\n".join(words))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), sys.argv[2] == "kill")
    if sys.argv[2] != "kill":
        dist.destroy_process_group()
    os._exit(0)
