# Sourced by the other scripts: a virtual environment in .venv with the package and what its tests need. PYTHON names
# the interpreter, if it is not python3.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
if [ ! -e "$root/.venv/ready" ] || [ "$root/setup.py" -nt "$root/.venv/ready" ] || [ "$root/constraints.txt" -nt "$root/.venv/ready" ]; then
    if ! "${PYTHON:-python3}" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: ${PYTHON:-python3} is not Python 3.11 or later with its venv module: install that, or name one that is: PYTHON=python3.12 bash $0" >&2
        exit 2
    fi
    echo "setting up .venv (once; a few minutes)" >&2
    "${PYTHON:-python3}" -m venv "$root/.venv"
    "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" -e "$root[test]" >&2
    touch "$root/.venv/ready"
fi
