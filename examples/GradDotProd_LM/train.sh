#!/usr/bin/env bash
# Trains as config_file.py says; takes every flag of `gradsight train`, from any directory.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python=python3
# In a checkout that was only set up, the package is in the checkout's own environment.
if ! "$python" -c "import gradsight" 2>/dev/null; then
    python="$here/../../.venv/bin/python"
fi
exec "$python" "$here/train.py" "$@"
