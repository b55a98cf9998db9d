#!/usr/bin/env bash
# Set up if need be, then run bench/run.py, which makes what it needs. Options go to it; without any it repeats the
# README's headline row: Accelerate and ours, one run each.
. "$(dirname "$0")/setup.sh"
cd "$root"
exec .venv/bin/python -m bench.run "$@"
