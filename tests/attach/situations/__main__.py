"""Run situations as a user does, and print what the command prints and what is wrong with it.

python -m attach.situations [NAME...]    # in tests/
"""

import json
import os
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from attach.situations import all_situations, run

known = all_situations()
names = sys.argv[1:]
for name in names or known:
    print(f"===== {name}", flush=True)
    outcome = run(known[name])
    if names:
        print(outcome.errors, outcome.output, json.dumps(outcome.skipped, indent=1), sep="\n")
    print(*(f"WRONG {each}" for each in outcome.mistakes(known[name])), sep="\n", flush=True)
