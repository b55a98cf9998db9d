# Sourced by the other scripts: a virtual environment in .venv with the package and what its tests need.
set -eu
cd "$(dirname "$0")/.."
if [ ! -e .venv/ready ] || [ setup.py -nt .venv/ready ] || [ constraints.txt -nt .venv/ready ]; then
    echo "setting up .venv (once; a few minutes)" >&2
    "${PYTHON:-python3}" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]' >&2
    touch .venv/ready
fi
