#!/usr/bin/env bash
# Make clang, of the wheel `ziglang`, the compiler VENV/bin/peer-clang and peer-clang++, and print the latter's path.
# Usage: peer_clang.sh PYTHON VENV.  Fetches the wheel, with its hash checked, if it is not there in the locked version.
#
# It takes the headers and the library of g++, which must be installed: Zig links its own C++ library into each shared
# library, and an exception that one of them throws is then caught in no other one.
set -euo pipefail
python=$1 venv=$2
root=$(cd "$(dirname "$0")/.." && pwd)
lock=$root/locks/requirements-peers-compiler.lock

folders=$(g++ -E -x c++ -v /dev/null 2>&1 >/dev/null | sed -n '/^#include </,/^End of search/ s,^ \(/.*/c++/.*\),-I\1,p' || true)
if [ -z "$folders" ]; then
    echo "g++ is needed for the headers of C++: apt install g++" >&2
    exit 1
fi
installed=$("$python" -c 'import importlib.metadata as m; print(m.version("ziglang"))' 2>/dev/null || true)
if ! grep -q "^ziglang==$installed " "$lock"; then
    echo "Fetching clang (the wheel ziglang, 100 MB): no compiler here has AMX" >&2
    "$python" -m pip --disable-pip-version-check --no-input install --quiet --no-deps --require-hashes \
        --only-binary :all: -r "$lock" >&2
fi
zig=$("$python" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')

mkdir -p "$venv/bin"
venv=$(cd "$venv" && pwd)
cat >"$venv/bin/peer-clang" <<EOF
#!/bin/sh
exec '$zig' cc "\$@"
EOF
cat >"$venv/bin/peer-clang++" <<EOF
#!/bin/sh
# Written by tools/peer_clang.sh. -c, -E and -S link nothing.
libraries='$(g++ -print-file-name=libstdc++.so) $(g++ -print-file-name=libgcc_s.so.1)'
for argument; do
    case \$argument in -c | -E | -S | --version) libraries= ;; esac
done
exec '$zig' c++ -nostdinc++ -nostdlib++ "\$@" $(echo $folders) \$libraries
EOF
chmod +x "$venv/bin/peer-clang" "$venv/bin/peer-clang++"
echo "$venv/bin/peer-clang++"
