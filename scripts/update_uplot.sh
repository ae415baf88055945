#!/bin/sh
# Brings uPlot's newest release, or the version given, into the page: its script, its style, its
# licence and their checksums. Look at the difference before you commit it.
set -eu
vendor="$(dirname "$0")/../src/gradsight/show/page/vendor"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm pack --silent "uplot@${1:-latest}" >/dev/null && tar -xzf uplot-*.tgz)
cp "$work/package/dist/uPlot.iife.min.js" "$work/package/dist/uPlot.min.css" "$vendor/"
cp "$work/package/LICENSE" "$vendor/uPlot.LICENSE"
(cd "$vendor" && sha256sum uPlot.iife.min.js uPlot.min.css uPlot.LICENSE >uPlot.sha256)
head -1 "$vendor/uPlot.iife.min.js"
