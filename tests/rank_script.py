"""Runs a script as one of several ranks, to its end but not through the interpreter's.

    rank_script.py SCRIPT [ARGS...]

Under torch 2.13 a group lives on after `destroy_process_group` while something refers to it, as
FSDP2's meshes do. Its threads may then still hold tensors of the last exchange when the interpreter
ends: "terminate called without an active exception", in 4 of 80 runs of a plain script on a busy
machine. How watched jobs end is tested elsewhere, by tests/core/test_endings.py.
"""

import atexit
import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = sys.argv[0].rpartition("/")[0]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
