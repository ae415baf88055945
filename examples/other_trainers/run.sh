#!/usr/bin/env bash
# Trains with the real torchtitan and OLMo-core, and compares the records with their own logs.
# Needs network access the first time: it installs both into .venv/trainers of this repository.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$root/.venv/trainers/bin/python
if [ ! -x "$python" ]; then
    "${PYTHON:-python3.11}" -m venv "$root/.venv/trainers"
    "$python" -m pip install --constraint "$root/constraints.txt" torch
fi
"$python" -m pip install --quiet --requirement "$here/requirements.txt" "$root"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 PYTHONPATH=$here
# Some virtual machines announce matrix tiles and forbid them: products in bfloat16 end the process.
export ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_FP16}
for kind in replicate tensor; do
    "$python" -W ignore -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc_per_node=2 \
        "$here/train_torchtitan.py" "$work/$kind" "$kind" 2>"$work/log" || { cat "$work/log"; exit 1; }
done
"$python" -W ignore "$here/train_olmo_core.py" "$work/olmo" 2>"$work/log" || { cat "$work/log"; exit 1; }
