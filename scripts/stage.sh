#!/usr/bin/env bash
# One line per stage of a set-up, with its time; what the stage prints is shown only if it fails.
# Usage: stage.sh "what is done" command [arguments...]
set -euo pipefail
what=$1
shift
output=$(mktemp)
trap 'rm -f "$output"' EXIT
start=$SECONDS
printf '%s ... ' "$what"
if "$@" >"$output" 2>&1; then
    echo "$((SECONDS - start)) s"
else
    code=$?
    echo "failed:"
    cat "$output"
    exit "$code"
fi
