#!/usr/bin/env bash
# Install the systemd units of this checkout. They run as the user `starling`, with state in /var/lib/starling and the
# configuration /etc/starling/starling.yaml. Run it as root after `make setup`. It starts no unit.
#   configs/systemd/install.sh            install into /etc/systemd/system
#   configs/systemd/install.sh DIR        only write the units into DIR, to read or verify them
#   UNITS=fleet configs/systemd/install.sh [DIR]   instead the units of a fleet's orchestrator and agent
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
prefix=$(cd "$here/../.." && pwd)
into=${1:-/etc/systemd/system}
configuration=$prefix/configs/default.yaml
configured=/etc/starling/starling.yaml
case ${UNITS:-server} in
server) units=$here ;;
fleet) units=$prefix/configs/fleet/systemd configured=/etc/starling/fleet.yaml configuration=$prefix/configs/fleet/host-2.yaml ;;
*) echo "starling: UNITS is ${UNITS}; leave it out, or set it to fleet" >&2; exit 1 ;;
esac
if [ ! -x "$prefix/.venv/bin/starling" ]; then
    echo "starling: $prefix/.venv/bin/starling does not exist; run 'make setup' first" >&2
    exit 1
fi
mkdir -p "$into"
for unit in "$units"/*.service "$units"/*.target; do
    [ -e "$unit" ] || continue
    sed "s|@PREFIX@|$prefix|g" "$unit" >"$into/$(basename "$unit")"
done
if [ $# -gt 0 ]; then
    echo "Units written to $into"
    exit 0
fi
getent passwd starling >/dev/null || useradd --system --home-dir /var/lib/starling --shell /usr/sbin/nologin starling
# systemd makes it as well, but commands such as `starling prepare` need it before.
[ -d /var/lib/starling ] || install -d -o starling -g starling -m 0700 /var/lib/starling
if [ ! -e "$configured" ]; then
    install -D -g starling -m 0640 "$configuration" "$configured"  # it may get API keys
fi
systemctl daemon-reload
if [ "${UNITS:-server}" = fleet ]; then
    cat <<END
The units are installed. Next: edit $configured, copy the fleet's token, then on each host one of
  systemctl enable --now starling-orchestrator.service
  systemctl enable --now starling-agent.service
END
    exit 0
fi
cat <<END
The units are installed. Next:
  sudo -u starling env STARLING_HOME=/var/lib/starling STARLING_CONFIG=$configured $prefix/.venv/bin/starling prepare
  systemctl enable --now starling.target
  systemctl status 'starling-*'
END
