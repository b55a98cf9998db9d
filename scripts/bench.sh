#!/usr/bin/env bash
# Set up if needed, then run bench/run.py with the given options. Without any it repeats the README's headline row:
# Accelerate and ours, one run each.
. "$(dirname "$0")/setup.sh"
cd "$root"
exec .venv/bin/python -m bench.run "$@"
