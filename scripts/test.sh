#!/usr/bin/env bash
# Set up if need be, then run the tests, a process for each core up to four, each with a part of the files: tests of one
# file share models and references. Options go to pytest.
. "$(dirname "$0")/setup.sh"
cd "$root"
exec .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
