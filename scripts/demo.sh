#!/usr/bin/env bash
# Set up if need be, then run the demo.
. "$(dirname "$0")/setup.sh"
exec "$root/.venv/bin/python" "$root/scripts/demo.py"
