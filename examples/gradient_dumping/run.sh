#!/usr/bin/env bash
# Two ranks, a full dump every two steps, then one of the first 100 rows of each gradient; GPUs are used if there are any.
set -euo pipefail
cd "$(cd "$(dirname "$0")" && pwd -P)"
# The environment that the README's set-up makes, where no other is active.
command -v gradsight >/dev/null || PATH="$PWD/../../.venv/bin:$PATH"
RUN_DIR="${1:-${TMPDIR:-/tmp}/gradient_dumping_example}"
export OMP_NUM_THREADS=1
torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 train.py --run_dir "$RUN_DIR"
torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 train.py --run_dir "$RUN_DIR" --save_first_n 100 --steps 3
gradsight dump list "$RUN_DIR"
