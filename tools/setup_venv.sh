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

# The entry of one package in the lock file of what installs the others.
setup_entry() { awk -v wanted="^$1==" '/^[a-z]/ { found = $0 ~ wanted } found' locks/setup.lock; }

# One package, by the pip of the Python that makes environments, at work on this one.
fetch_with_base_pip() { # NAME
    local entry
    entry=$(setup_entry "$1") # not a pipe, whose writer fails if pip ends without reading
    "$python" -m pip --disable-pip-version-check --no-input --python "$venv/bin/python" \
        install --retries 0 --no-compile "${locked[@]}" /dev/stdin >>"$log" 2>&1 <<<"$entry" && [ -e "$venv/bin/$1" ]
}

# Where Python has no pip that can fetch the locked one, Python's own copy.
ensure_pip() {
    [ -e "$venv/bin/pip" ] || fetch_with_base_pip pip ||
        "$venv/bin/python" -m ensurepip --default-pip >>"$log" 2>&1 || cannot_create
}

# pip's configuration. A new environment has none of its own: its Python's pip knows it.
read_settings() {
    if [ ! -e "$venv/bin/pip" ]; then
        settings=$("$python" -m pip --disable-pip-version-check config list 2>/dev/null) && return
        ensure_pip
    fi
    settings=$("${pip[@]}" config list 2>/dev/null) || settings=
}

setting() { # NAME; what the environment says goes before what is in files
    local section
    for section in :env: install global; do
        if [[ $'\n'$settings =~ $'\n'$section"."$1"='"([^\']*)"'" ]]; then
            echo "${BASH_REMATCH[1]}"
            return
        fi
    done
}

# uv does not read pip's configuration: where that names another index, or none, pip is used.
has_own_index() { [[ $settings =~ \.(index-url|no-index)= ]]; }

# uv with pip's proxy and certificates, or with the machine's: uv has only those of public authorities.
run_uv() {
    local file proxy
    proxy=$(setting proxy)
    for file in "${SSL_CERT_FILE:-}" "$(setting cert)" "${REQUESTS_CA_BUNDLE:-}" "${CURL_CA_BUNDLE:-}" \
        /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/ca-bundle.pem; do
        [ ! -f "$file" ] || break
    done
    [ ! -f "$file" ] || local -x SSL_CERT_FILE=$file
    [ -z "$proxy" ] || local -x HTTP_PROXY=$proxy HTTPS_PROXY=$proxy
    "$uv" "$@"
}

# What no server imports before it pulls a model of a hub: more than half of all sources.
unused='/site-packages/(.+/(tests|cuda)|pip|setuptools|wheel|numpy/(distutils|f2py)|numba/(pycc|testing)'
unused+='|huggingface_hub|fsspec|anyio|httpx2|httpcore2|h11|filelock|packaging|tqdm|pygments|markdown_it'
unused+='|rich/_unicode_data)/|/idna/uts46data'

# Bytecode of the other modules, meanwhile: in containers Python often writes none by itself.
compile_modules() { # PROCESSES FOLDER...
    local processes=$1
    shift
    [ "$processes" -ge 1 ] || processes=1
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
    if has_own_index; then
        return 1
    elif uv=$(command -v uv); then
        return
    fi
    uv=$venv/bin/uv
    version=$("$uv" --version 2>/dev/null | cut -d ' ' -f 2) || version=
    if grep -q "^uv==$version " locks/setup.lock; then
        return
    fi
    [ -e "$venv/bin/pip" ] || ! fetch_with_base_pip uv || return 0
    ensure_pip
    "${pip[@]}" install --retries 0 --no-compile "${locked[@]}" locks/setup.lock >>"$log" 2>&1
}

# uv draws its own progress on a terminal. Otherwise its output goes into the log.
install_with_uv() {
    local entry output=/dev/stderr options=(--python "$venv/bin/python")
    entry=$(setup_entry pip)
    [ "$mode" != alone ] || options+=(--no-config) # [tool.uv] leaves out what only the project does without
    [ -t 2 ] || output=$log
    run_uv pip install "${options[@]}" "${locked[@]}" "$lock" -r - 2>>"$output" <<<"$entry" &&
        compile_modules "$cores" "$venv"/lib/python*/site-packages &&
        { [ "$mode" = alone ] ||
            run_uv pip install --quiet "${options[@]}" --no-deps --no-build-isolation --editable . >>"$log" 2>&1; }
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
    ensure_pip
    if ! "${pip[@]}" install --no-compile "${locked[@]}" "$lock" 2>&1 | tee -a "$log" | show; then
        tail -n 8 "$log" >&2
        if grep -q 'DO NOT MATCH THE HASHES' "$log"; then
            fail "The package index has other files than $lock names (full log: $log)." \
                "Use another index (PIP_INDEX_URL), or resolve again with make lock."
        fi
        fail "Packages could not be fetched (full log: $log)." \
            "Is there a network and a package index? PIP_INDEX_URL names an index, HTTPS_PROXY a proxy."
    fi
    compile_modules "$cores" "$venv"/lib/python*/site-packages
    [ "$mode" = alone ] || "${pip[@]}" install --no-deps --no-build-isolation --editable . >>"$log" 2>&1 || {
        tail -n 8 "$log" >&2
        fail "The project itself could not be installed (full log: $log)."
    }
}

echo "Setting up $venv from $lock ($total packages)"
: >"$log"
trap end_jobs EXIT # Ctrl-C does not reach them
cores=$(nproc)
[ "$mode" = alone ] || compile_modules $((cores - 1)) shm pipeline stages starling # one core fetches
[ -e "$venv/bin/pip" ] || python=${python:-$(find_python)}
read_settings
if ! { find_uv && install_with_uv; }; then
    has_own_index || echo "uv has failed (log: $log): pip installs all packages, which takes longer"
    install_with_pip
fi
wait
echo "$venv is ready"
