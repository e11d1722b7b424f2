#!/usr/bin/env bash
# Let llama-cpp-python use the libraries that build_llama_cpp.sh has compiled, and print the CPU features they use.
# Usage: use_llama_cpp.sh PYTHON LOCKFILE VENV.  The package gets copies: `make peers` replaces them by those of a wheel, and
# leaves llama-server as it is.
set -euo pipefail
python=$1 lock=$2 venv=$3

# If the package is not here: without a build of its own.
CMAKE_ARGS='-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF' "$python" -m pip --disable-pip-version-check --no-input install --quiet \
    --require-hashes --no-binary llama-cpp-python -r "$lock"
package=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/llama_cpp/lib
rm -rf "$package"
cp -RP "$venv/lib/llama.cpp" "$package"
"$python" -c 'import llama_cpp; print("llama.cpp uses", llama_cpp.llama_print_system_info().decode())'
