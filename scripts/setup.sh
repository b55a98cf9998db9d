# Sourced by the other scripts: a virtual environment in .venv with the package and what its tests need.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
if [ ! -e "$root/.venv/ready" ] || [ "$root/setup.py" -nt "$root/.venv/ready" ] || [ "$root/constraints.txt" -nt "$root/.venv/ready" ]; then
    echo "setting up .venv (once; a few minutes)" >&2
    "${PYTHON:-python3}" -m venv "$root/.venv"
    "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" -e "$root[test]" >&2
    touch "$root/.venv/ready"
fi
