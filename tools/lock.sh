#!/usr/bin/env bash
# Resolve pyproject.toml into the lock files: pinned, hashed, without index addresses, one resolution for every
# supported Python.  Usage: lock.sh [PYTHON] [--upgrade].  Versions that are pinned already stay unless pyproject.toml
# rules them out; --upgrade takes the newest of all.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
upgrade=${2:-}
"$python" -m uv --version >/dev/null 2>&1 || "$python" -m pip install --quiet uv
header="# Written by tools/lock.sh (make lock) from pyproject.toml."
everywhere="implementation_name == 'cpython' and sys_platform == 'linux'"
lock() {
    local out=$1
    shift
    resolve "$out" "$@" pyproject.toml
}
resolve() {
    local out=$1
    shift
    "$python" -m uv pip compile --quiet $upgrade --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-annotate --no-header --output-file "$out" "$@"
    # Every line has the marker of the only supported platform: leave it out.
    { echo "$header" && sed "s/ ; $everywhere / /" "$out"; } >"$out.new"
    mv "$out.new" "$out"
}
resolve locks/setup.lock --group pyproject.toml:setup
lock locks/requirements.lock --group build
lock locks/requirements-dev.lock --constraint locks/requirements.lock --group build --group dev
lock locks/requirements-peers.lock --constraint locks/requirements-dev.lock --group build --group peers
lock locks/requirements-peers-native.lock --constraint locks/requirements-dev.lock --group build --group peers-native
lock locks/requirements-api.lock --constraint locks/requirements-dev.lock --group build --group api-examples
lock locks/requirements-image.lock --constraint locks/requirements.lock --group build --extra cloud --extra etcd --extra redis
lock locks/requirements-ray.lock --constraint locks/requirements-dev.lock --group build --extra ray
lock locks/requirements-fleet.lock --constraint locks/requirements-dev.lock --group build --group fleet-peers
resolve locks/requirements-peers-compiler.lock --no-config --group pyproject.toml:peers-compiler
resolve locks/requirements-peers-more.lock --no-config --group pyproject.toml:peers-more
# Without what [tool.uv] says of the project's own dependencies.
resolve locks/requirements-clients.lock --no-config --group pyproject.toml:clients
