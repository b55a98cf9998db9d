#!/usr/bin/env bash
# Set up if need be, with the systems to compare with, then run bench/run.py. Options go to it.
. "$(dirname "$0")/setup.sh"
if [ ! -e "$root/.venv/bench" ] || [ "$root/.venv/ready" -nt "$root/.venv/bench" ]; then
    echo "installing Accelerate and DeepSpeed into .venv (once; a few minutes)" >&2
    install() { "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "$@" >&2; }
    install "setuptools>=77" wheel ninja
    DS_BUILD_OPS=0 install --no-build-isolation -e "$root[bench]"  # its kernels are built when they are first used
    touch "$root/.venv/bench"
fi
cd "$root"
exec .venv/bin/python -m bench.run "$@"
