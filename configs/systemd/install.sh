#!/usr/bin/env bash
# Install the systemd units of this checkout. They run as the user `starling`, with state in /var/lib/starling and the
# configuration /etc/starling/starling.yaml. Run it as root after `make setup`. It starts no unit.
#   configs/systemd/install.sh            install into /etc/systemd/system
#   configs/systemd/install.sh DIR        only write the units into DIR, to read or verify them
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
prefix=$(cd "$here/../.." && pwd)
into=${1:-/etc/systemd/system}
if [ ! -x "$prefix/.venv/bin/starling" ]; then
    echo "starling: $prefix/.venv/bin/starling does not exist; run 'make setup' first" >&2
    exit 1
fi
mkdir -p "$into"
for unit in "$here"/*.service "$here"/*.target; do
    sed "s|@PREFIX@|$prefix|g" "$unit" >"$into/$(basename "$unit")"
done
if [ $# -gt 0 ]; then
    echo "Units written to $into"
    exit 0
fi
getent passwd starling >/dev/null || useradd --system --home-dir /var/lib/starling --shell /usr/sbin/nologin starling
if [ ! -e /etc/starling/starling.yaml ]; then
    install -D -m 0644 "$prefix/configs/default.yaml" /etc/starling/starling.yaml
fi
systemctl daemon-reload
cat <<END
The units are installed. Next:
  sudo -u starling env STARLING_HOME=/var/lib/starling $prefix/.venv/bin/starling prepare
  systemctl enable --now starling.target
  systemctl status 'starling-*'
END
