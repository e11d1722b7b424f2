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

# Removes what this run has made. An environment that was there before stays.
cannot_create() {
    [ ! -s "$log" ] || tail -n 8 "$log" >&2
    [ -z "$created" ] || {
        rm -rf "$venv"
        fail "$python cannot create a virtual environment." \
            "On Debian and Ubuntu: apt install python3-venv. Or name another Python: make PYTHON=..."
    }
    fail "$venv has no pip, and none could be installed (full log: $log)." \
        "Is there a network and a package index? Or remove $venv: the next make creates another one."
}

# Two set-ups of one environment at once would remove each other's files.
wait_for_turn() {
    mkdir -p "$(dirname "$venv")"
    command -v flock >/dev/null || return 0
    exec 9<"$(dirname "$venv")"
    flock --nonblock 9 || {
        echo "Waiting until another set-up in $(dirname "$venv") has ended"
        flock 9
    }
}

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

# Else bash goes on with the next way to install: pip exits with 1 on Ctrl-C.
trap 'exit 130' INT
trap 'exit 143' TERM
wait_for_turn
created=
if ! new_enough "$venv/bin/python"; then
    created=yes
    python=$(find_python)
    echo "Creating $venv with $("$python" -V)"
    rm -rf "$venv"
    # Without pip: unpacking the one that comes with Python takes longer than all of uv's work.
    "$python" -m venv "$venv" --without-pip >/dev/null 2>&1 || cannot_create
fi

total=$(grep -cE '^[A-Za-z0-9]' "$lock")
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input)
# --no-deps: the lock file is complete, and leaves out what no import needs ([tool.uv] in pyproject.toml).
locked=(--no-deps --require-hashes --only-binary :all: -r)

# The pip of the Python that makes environments, at work on this one.
base_pip() {
    "$python" -m pip --disable-pip-version-check --no-input --python "$venv/bin/python" "$@"
}

# uv does not read pip's configuration: where that names another index, or none, pip is used.
has_own_index() {
    [ -n "${settings+known}" ] || settings=$("$@" config list 2>/dev/null) || unset settings
    [[ ${settings:-} =~ \.(index-url|no-index)= ]]
}

# pip, and uv where it is needed and not here; where Python has no pip that can do it, Python's own copy of pip.
install_pip() {
    local wanted='pip|uv'
    python=${python:-$(find_python)}
    if has_own_index base_pip || command -v uv >/dev/null; then wanted=pip; fi
    awk -v wanted="^($wanted)==" '/^[a-z]/ { found = $0 ~ wanted } found' locks/setup.lock |
        base_pip install --retries 0 --no-compile "${locked[@]}" /dev/stdin >>"$log" 2>&1 && [ -e "$venv/bin/pip" ] ||
        "$venv/bin/python" -m ensurepip --default-pip >>"$log" 2>&1 || cannot_create
}

# What no server imports before it pulls a model of a hub: more than half of all sources.
unused='/site-packages/(.+/(tests|cuda)|pip|setuptools|numpy/(distutils|f2py)'
unused+='|huggingface_hub|fsspec|anyio|httpx2|httpcore2|filelock)/|/pygments/lexers/[a-z]'

# Bytecode of the other modules, meanwhile and on all cores: in containers Python often writes none by itself.
compile_modules() { # FOLDER...
    local processes
    processes=$(nproc)
    [ "$processes" -le 8 ] || processes=8 # a container may have a share of many cores, and each process takes memory
    set -m # a process group of its own, for the processes that it starts
    "$venv/bin/python" -m compileall -q -j "$processes" -x "$unused" "$@" >>"$log" 2>&1 </dev/null &
    set +m
}

end_jobs() {
    local job
    for job in $(jobs -p); do kill -- "-$job" 2>/dev/null || true; done
}

# uv needs a tenth of pip's time.
find_uv() {
    local version
    if has_own_index "${pip[@]}"; then
        return 1
    elif command -v uv; then
        return
    fi
    version=$("$venv/bin/uv" --version 2>/dev/null | cut -d ' ' -f 2) || version=
    if grep -q "^uv==$version " locks/setup.lock; then
        echo "$venv/bin/uv"
        return
    fi
    "${pip[@]}" install --retries 0 --no-compile "${locked[@]}" locks/setup.lock >>"$log" 2>&1 && echo "$venv/bin/uv"
}

# uv draws its own progress on a terminal. Otherwise its output goes into the log.
install_with_uv() {
    local output=/dev/stderr settings=()
    [ "$mode" != alone ] || settings=(--no-config) # [tool.uv] leaves out what only the project does without
    [ -t 2 ] || output=$log
    "$1" pip install "${settings[@]}" --python "$venv/bin/python" "${locked[@]}" "$lock" 2>>"$output" &&
        compile_modules "$venv"/lib/python*/site-packages &&
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
    if ! "${pip[@]}" install --no-compile "${locked[@]}" "$lock" 2>&1 | tee -a "$log" | show; then
        tail -n 8 "$log" >&2
        if grep -q 'DO NOT MATCH THE HASHES' "$log"; then
            fail "The package index has other files than $lock names (full log: $log)." \
                "Use another index (PIP_INDEX_URL), or resolve again with make lock."
        fi
        fail "Packages could not be fetched (full log: $log)." \
            "Is there a network and a package index? PIP_INDEX_URL names an index, HTTPS_PROXY a proxy."
    fi
    compile_modules "$venv"/lib/python*/site-packages
    [ "$mode" = alone ] || "${pip[@]}" install --no-deps --no-build-isolation --editable . >>"$log" 2>&1 || {
        tail -n 8 "$log" >&2
        fail "The project itself could not be installed (full log: $log)."
    }
}

echo "Setting up $venv from $lock ($total packages)"
: >"$log"
trap end_jobs EXIT # Ctrl-C does not reach them
[ "$mode" = alone ] || compile_modules shm pipeline stages starling
[ -e "$venv/bin/pip" ] || install_pip
if ! { uv=$(find_uv) && install_with_uv "$uv"; }; then
    install_with_pip
fi
wait
echo "$venv is ready"
