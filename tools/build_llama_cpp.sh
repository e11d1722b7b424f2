#!/usr/bin/env bash
# Compile llama.cpp for this CPU, as the baseline of `make bench`: its server, and libraries that llama-cpp-python can
# use (use_llama_cpp.sh). The source is the sdist of llama-cpp-python, which contains llama.cpp; its hash is checked.
# Usage: build_llama_cpp.sh PYTHON LOCKFILE VENV.  Needs cmake and a C++ compiler (CC and CXX name one); CMAKE_ARGS
# are added to cmake's arguments.  Runs at low priority, because it takes minutes of every core.
# VENV/bin/llama-server uses the libraries in VENV/lib/llama.cpp.
set -euo pipefail
python=$1 lock=$2 venv=$3

fail() {
    printf '\nstarling: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '          %s\n' "$@" >&2
    exit 1
}

assignments=$("$(dirname "$0")/peer_compiler.sh" "$python" "$venv")
eval "$assignments"
for tool in cmake "$CXX"; do
    command -v "$tool" >/dev/null || fail "$tool is needed to compile llama.cpp, and is not installed." \
        "On Debian and Ubuntu: apt install cmake g++. A wheel for AVX2 needs neither: make peers."
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export ZIG_GLOBAL_CACHE_DIR=$work/zig # of the clang that peer_clang.sh fetches
# The lock's one entry: from its name to the last line that goes on.
awk '/^llama-cpp-python==/ { on = 1 } on { print } on && !/\\$/ { exit }' "$lock" >"$work/lock"
[ -s "$work/lock" ] || fail "$lock names no llama-cpp-python."
"$python" -m pip --disable-pip-version-check --no-input download --quiet --no-deps --no-binary :all: \
    --require-hashes -r "$work/lock" -d "$work" >"$work/log" 2>&1 || {
    tail -n 8 "$work/log" >&2
    fail "The source of llama-cpp-python could not be fetched." \
        "Is there a network and a package index? PIP_INDEX_URL names an index, HTTPS_PROXY a proxy."
}
tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
source=$(echo "$work"/llama_cpp_python-*/vendor/llama.cpp)
release=$(sed -n 's/^llama-cpp-python==\([^ ]*\).*/\1/p' "$work/lock")

options=(
    -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON -DLLAMA_OPENSSL=OFF
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    "-DLLAMA_BUILD_COMMIT=llama-cpp-python-$release"
    -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON "-DCMAKE_INSTALL_RPATH=\$ORIGIN;\$ORIGIN/../lib/llama.cpp"
)
read -ra more <<<"${CMAKE_ARGS:-}"

echo "Compiling llama.cpp of llama-cpp-python $release for this CPU with $CXX $CXXFLAGS; this takes minutes"
nice -n 10 cmake -S "$source" -B "$work/build" "${options[@]}" "${more[@]}" >"$work/log" 2>&1 &&
    nice -n 10 cmake --build "$work/build" --target llama-server llama mtmd -j "$(nproc)" >>"$work/log" 2>&1 || {
    tail -n 30 "$work/log" >&2
    fail "llama.cpp could not be compiled." "CXX and CMAKE_ARGS choose another compiler or other options."
}

rm -rf "$venv/lib/llama.cpp"
mkdir -p "$venv/lib/llama.cpp"
cp -P "$work"/build/bin/*.so* "$venv/lib/llama.cpp"
install -m 755 "$work/build/bin/llama-server" "$venv/bin/llama-server.new"
"$venv/bin/llama-server.new" --version 2>&1 | head -n 2
if grep -qw amx_int8 "${CPUINFO:-/proc/cpuinfo}"; then
    "$python" "$(dirname "$0")/tile_instructions.py" "$venv/lib/llama.cpp/libggml-cpu.so" || true # as has been said
fi
mv "$venv/bin/llama-server.new" "$venv/bin/llama-server"
