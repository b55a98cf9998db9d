#!/usr/bin/env bash
# Set up if need be, then run the tests. Options go to pytest.
. "$(dirname "$0")/setup.sh"
cd "$root"
exec .venv/bin/python -m pytest "$@"
