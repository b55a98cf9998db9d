#!/usr/bin/env bash
# Make an environment in FOLDER with the peers' packages, on top of those of the interpreter PYTHON. ZeRO-Inference
# compiles its operators on first use, which needs a C++ compiler, Python's headers and libaio-dev. kvpress needs an older
# transformers than ours: it gets an environment of its own, FOLDER/kvpress.
#
# bash bench/peers.sh FOLDER
set -eu
folder=$1
python=${PYTHON:-python3}
environment() {
    "$python" -m venv --clear "$1"
    theirs=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$theirs/ours.pth"
}
environment "$folder"
install() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c "$(dirname "$0")/../constraints.txt" "$@"; }
install "setuptools>=77" wheel ninja accelerate
DS_BUILD_OPS=0 install --no-build-isolation deepspeed  # its operators are built on first use
if command -v nvidia-smi > /dev/null; then
    install --no-deps flexgen
fi
environment "$folder/kvpress"
"$folder/kvpress/bin/python" -m pip install --quiet --disable-pip-version-check kvpress==0.5.5
touch "$folder/kvpress/ready" "$folder/ready"
