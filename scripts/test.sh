#!/usr/bin/env bash
# Set up if needed, then run the tests with one process per core, at most four. Options are passed to pytest.
. "$(dirname "$0")/setup.sh"
cd "$root"
exec .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
