#!/usr/bin/env bash
# Set up if needed, then run the demo.
. "$(dirname "$0")/setup.sh"
exec "$root/.venv/bin/python" "$root/scripts/demo.py"
