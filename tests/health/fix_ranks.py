"""Trains on two ranks with a planted fault, then with the fix of the finding; rank 0 prints both.

Called by torchrun without arguments.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from health.faults import ON_RANKS
from health.test_fixes import findings_of

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = findings_of(ON_RANKS)
    fixes = [found[ON_RANKS.code].fix if ON_RANKS.code in found else ""]
    dist.broadcast_object_list(fixes)
    fixed = findings_of(ON_RANKS, fixes[0])
    if dist.get_rank() == 0:
        result = {"found": sorted(found), "fixed": sorted(fixed), "fix": fixes[0]}
        print("RESULT", json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
