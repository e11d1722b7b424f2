#!/usr/bin/env bash
# Create or update a virtual environment: locked packages with checked hashes, then the project itself.
# Usage: setup_venv.sh VENV LOCKFILE [alone].  "alone" leaves the project out.
# Needs Python 3.11 or newer and a package index; PYTHON names the interpreter.
# Ends with one clear message when something is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 lock=$2 mode=${3:-}
log=$venv/install.log

fail() {
    printf '\nstarling: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '          %s\n' "$@" >&2
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" -V 2>&1); Python 3.11 or newer is needed."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; python3 here is $(python3 -V 2>&1 || echo absent)." \
        "Install one, or name one: make PYTHON=/path/to/python3.12 ..."
}

if ! new_enough "$venv/bin/python"; then
    python=$(find_python)
    echo "Creating $venv with $("$python" -V)"
    rm -rf "$venv"
    "$python" -m venv "$venv" >/dev/null 2>&1 || {
        rm -rf "$venv"
        fail "$python cannot create a virtual environment." \
            "On Debian and Ubuntu: apt install python3-venv. Or name another Python: make PYTHON=..."
    }
fi

total=$(grep -cE '^[A-Za-z0-9]' "$lock")
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input)
# --no-deps: the lock file is complete, and leaves out what no import needs ([tool.uv] in pyproject.toml).
locked=(--no-deps --require-hashes --only-binary :all: -r)

# uv needs a tenth of pip's time. It does not read pip's configuration: where that names another index, or none, pip is used.
find_uv() {
    if "${pip[@]}" config list 2>/dev/null | grep -qE '\.(index-url|no-index)='; then
        return 1
    elif command -v uv; then
        return
    fi
    "${pip[@]}" install --retries 0 "${locked[@]}" locks/setup.lock >>"$log" 2>&1 && echo "$venv/bin/uv"
}

# uv draws its own progress on a terminal. Otherwise its output goes into the log.
install_with_uv() {
    local output=/dev/stderr settings=()
    [ "$mode" != alone ] || settings=(--no-config) # [tool.uv] leaves out what only the project does without
    [ -t 2 ] || output=$log
    "$1" pip install "${settings[@]}" --compile-bytecode --python "$venv/bin/python" "${locked[@]}" "$lock" 2>>"$output" &&
        { [ "$mode" = alone ] || "$1" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation \
            --editable . >>"$log" 2>&1; }
}

# On a terminal one line that is overwritten, elsewhere a line for each package; all output goes into the log.
show() {
    local live=0
    [ -t 1 ] && live=1
    awk -v total="$total" -v live="$live" '
        /^(Collecting|Processing|Requirement already satisfied:)/ {
            name = /^Requirement/ ? $4 : $2
            sub(/.*\//, "", name)
            sub(/[=<>;-].*/, "", name)
            if (live) printf "\r\033[KFetching packages  %d/%d  %s", ++n, total, name
            else if (!/^Requirement/) print "  fetching " name
        }
        /^Installing collected/ { printf "%s%s\n", live ? "\r\033[K" : "", "Installing packages" }
        { fflush() }
        END { if (live) printf "\r\033[K" }'
}

install_with_pip() {
    if ! "${pip[@]}" install "${locked[@]}" "$lock" 2>&1 | tee -a "$log" | show; then
        tail -n 8 "$log" >&2
        if grep -q 'DO NOT MATCH THE HASHES' "$log"; then
            fail "The package index has other files than $lock names (full log: $log)." \
                "Use another index (PIP_INDEX_URL), or resolve again with make lock."
        fi
        fail "Packages could not be fetched (full log: $log)." \
            "Is there a network and a package index? PIP_INDEX_URL names an index, HTTPS_PROXY a proxy."
    fi
    [ "$mode" = alone ] || "${pip[@]}" install --no-deps --no-build-isolation --editable . >>"$log" 2>&1 || {
        tail -n 8 "$log" >&2
        fail "The project itself could not be installed (full log: $log)."
    }
}

echo "Setting up $venv from $lock ($total packages)"
: >"$log"
if ! { uv=$(find_uv) && install_with_uv "$uv"; }; then
    install_with_pip
fi
echo "$venv is ready"
