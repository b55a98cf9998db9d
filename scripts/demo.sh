#!/usr/bin/env bash
# Set up if need be, then complete Python code with the demo model, H2O on. Options go to flex_opt.
. "$(dirname "$0")/setup.sh"
if [ $# -eq 0 ]; then set -- --hh-ratio 0.2 --gen-len 64 --num-prompts 32 --gpu-batch-size 16 --temperature 0.8 --top-p 0.95; fi
exec "$root/.venv/bin/python" -m h2o_flexgen.flex_opt "$@"
