#!/usr/bin/env bash
# Set up if need be, then run the tests, a process for each core up to four. Options go to pytest.
. "$(dirname "$0")/setup.sh"
cd "$root"
exec .venv/bin/python -m pytest -n auto --maxprocesses 4 "$@"
