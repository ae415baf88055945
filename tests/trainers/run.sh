#!/usr/bin/env bash
# Trains with the real torchtitan and OLMo-core. Usage: run.sh PYTHON
set -euo pipefail
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1
for kind in replicate tensor; do
    "$1" -W ignore -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc_per_node=2 \
        "$here/train_torchtitan.py" "$work/$kind" "$kind" 2>"$work/log" || { cat "$work/log"; exit 1; }
done
"$1" -W ignore "$here/train_olmo_core.py" "$work/olmo" 2>"$work/log" || { cat "$work/log"; exit 1; }
