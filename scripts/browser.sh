#!/usr/bin/env bash
# Looks for the browser that the tests of the page need, and installs it where we may.
# Where we may not, those tests fail with the line that does.
set -euo pipefail
[ "${BROWSER:-}" = 0 ] && exit 0
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
install="apt-get install -y --no-install-recommends chromium"
if [ "$(uname -s)" != Linux ] || ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "chromium is missing, and the tests of the page will fail without it: $install"
    echo "(BROWSER=0 leaves them out)"
    exit 0
fi
echo "chromium is missing, and the tests of the page need it: $install (BROWSER=0 does without)"
export DEBIAN_FRONTEND=noninteractive
stage=$(dirname "$0")/stage.sh
"$stage" "looking for packages" apt-get update
"$stage" "installing chromium" $install
