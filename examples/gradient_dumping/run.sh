#!/usr/bin/env bash
# Two ranks, a full dump every two steps, then one of the first 100 rows of each gradient; GPUs are used if there are any.
set -euo pipefail
cd "$(dirname "$0")"
RUN_DIR="${1:-/tmp/gradient_dumping_example}"
export OMP_NUM_THREADS=1
torchrun --standalone --nproc-per-node 2 train.py --run_dir "$RUN_DIR"
torchrun --standalone --nproc-per-node 2 train.py --run_dir "$RUN_DIR" --save_first_n 100 --steps 3
gradsight dump list "$RUN_DIR"
