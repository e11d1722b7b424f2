#!/usr/bin/env bash
# Prints assignments of CC, CXX, CFLAGS and CXXFLAGS with which llama.cpp uses everything that this CPU has.
# Usage: eval "$(tools/peer_compiler.sh PYTHON VENV)".  CXX and CC in the environment stay as they are.
#
# Only AMX needs a choice.  GCC before 13 compiles llama.cpp's AMX kernels to code that crashes (the tile
# configuration), and some versions of clang do not define the macro __AMX_INT8__ that llama.cpp asks for.  Where no
# other compiler is installed, clang is fetched (peer_clang.sh).
set -euo pipefail
python=$1 venv=$2
cpuinfo=${CPUINFO:-/proc/cpuinfo}

is_gcc() { "$1" --version 2>/dev/null | grep -q 'Free Software Foundation'; }
is_clang() { "$1" --version 2>/dev/null | grep -q 'clang'; }
is_sound() { command -v "$1" >/dev/null && { is_clang "$1" || { is_gcc "$1" && [ "$("$1" -dumpversion | cut -d. -f1)" -ge 13 ]; }; }; }

cxx=${CXX:-c++} flags=''
if grep -qw amx_int8 "$cpuinfo"; then
    if [ -z "${CXX:-}" ] && ! is_sound "$cxx"; then
        for name in g++-{16,15,14,13} clang++ clang++-{21,20,19,18,17,16,15,14}; do
            if is_sound "$name"; then
                cxx=$name
                break
            fi
        done
        is_sound "$cxx" || ! fetched=$("$(dirname "$0")/peer_clang.sh" "$python" "$venv") || cxx=$fetched
    fi
    if is_clang "$cxx"; then
        flags='-mamx-tile -mamx-int8 -D__AMX_INT8__'
    elif is_gcc "$cxx" && ! is_sound "$cxx"; then
        # -march=native names the instructions, so the macro that llama.cpp asks for is taken away.
        flags='-U__AMX_INT8__'
        remedy="clang could not be fetched. On Debian and Ubuntu: apt install clang"
        [ -z "${CXX:-}" ] || remedy='it is what CXX names; without CXX a compiler with AMX is taken or fetched'
        printf 'starling: llama.cpp is compiled without AMX: %s is older than GCC 13; %s\n' "$cxx" "$remedy" >&2
    fi
fi
cc=${CC:-}
if [ -z "$cc" ]; then
    case $cxx in
        *clang++*) cc=${cxx/clang++/clang} ;;
        *g++*) cc=${cxx/g++/gcc} ;;
        *) cc=cc ;;
    esac
fi
printf 'export CC=%q CXX=%q CFLAGS=%q CXXFLAGS=%q\n' \
    "$cc" "$cxx" "${CFLAGS:-}${CFLAGS:+ }$flags" "${CXXFLAGS:-}${CXXFLAGS:+ }$flags"
