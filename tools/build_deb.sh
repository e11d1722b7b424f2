#!/usr/bin/env bash
# Build dist/starling_VERSION_amd64.deb with Debian's own tools from the wheel of this version and the locked packages.
# Usage: build_deb.sh PYTHON.  The package is for the Debian release whose python3 has PYTHON's version: 3.11 is Debian 12.
# Its maintainer is DEBFULLNAME <DEBEMAIL>, by default git's user.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1

fail() {
    printf '\nstarling: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '          %s\n' "$@" >&2
    exit 1
}

for tool in dh dpkg-buildpackage; do
    command -v "$tool" >/dev/null || fail "$tool is needed to build a Debian package, and is not installed." \
        "On Debian and Ubuntu: apt install debhelper."
done
full_name=${DEBFULLNAME:-$(git config user.name || true)} email=${DEBEMAIL:-$(git config user.email || true)}
[ -n "$full_name" ] && [ -n "$email" ] || fail "A package names its maintainer: set DEBFULLNAME and DEBEMAIL."

version=$(sed -n '0,/^version = "\(.*\)"$/s//\1/p' pyproject.toml)
read -r minor next < <("$python" -c 'import sys; a, b = sys.version_info[:2]; print(f"{a}.{b} {a}.{b + 1}")')
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH
work=$PWD/build/deb
source=$work/starling-$version
tree=$source/tree
home=$tree/usr/lib/starling
packages=$home/lib/python$minor/site-packages
documents=$tree/usr/share/doc/starling
log=$work/log
rm -rf "$work"
mkdir -p "$packages" "$home/bin" "$documents" "$tree/usr/bin" "$tree/etc/starling" "$tree/lib/systemd/system"

# A virtual environment of Debian's Python: `python -m venv` would write this machine's paths into it.
pip=("$python" -m pip --disable-pip-version-check --no-input install --quiet --no-compile --no-deps --target "$packages")
echo "Fetching the packages of locks/requirements-image.lock for Python $minor"
# --no-deps: the lock file is complete.
"${pip[@]}" --require-hashes --only-binary :all: -r locks/requirements-image.lock >"$log" 2>&1 || {
    tail -n 8 "$log" >&2
    fail "Packages could not be fetched (full log: $log)." \
        "Is there a network and a package index? PIP_INDEX_URL names an index, HTTPS_PROXY a proxy."
}
rm -rf "$packages/bin"
"${pip[@]}" --no-index "dist/starling-$version-py3-none-any.whl"
# What only builds, and the programs of other packages.
rm -rf "$packages"/{bin,setuptools,setuptools-*,pkg_resources,_distutils_hack,distutils-precedence.pth,wheel,wheel-*}
find "$packages" -type f -perm /111 -exec chmod a-x {} + # nothing there is run as a program
printf 'home = /usr/bin\ninclude-system-site-packages = false\nversion = %s\n' "$minor" >"$home/pyvenv.cfg"
ln -s "/usr/bin/python$minor" "$home/bin/python3"
printf '#!/usr/lib/starling/bin/python3\nimport sys\n\nfrom starling.cli import main\n\nsys.exit(main())\n' >"$home/bin/starling"
chmod 755 "$home/bin/starling"
ln -s ../lib/starling/bin/starling "$tree/usr/bin/starling"

for unit in configs/systemd/*.service configs/systemd/*.target configs/fleet/systemd/*.service; do
    sed -e 's|@PREFIX@/.venv/bin/|/usr/bin/|' -e 's|@PREFIX@/|/usr/share/doc/starling/|' "$unit" \
        >"$tree/lib/systemd/system/$(basename "$unit")"
done
install -m 644 configs/default.yaml "$tree/etc/starling/starling.yaml"
cp -r README.md ARCHITECTURE.md docs "$documents"
mkdir "$documents/examples"
cp -r configs/fleet/*.yaml configs/prometheus configs/grafana "$documents/examples"
for shell in bash:bash-completion/completions/starling zsh:zsh/vendor-completions/_starling \
    fish:fish/vendor_completions.d/starling.fish; do
    file=$tree/usr/share/${shell#*:}
    mkdir -p "$(dirname "$file")"
    "$python" -m starling completion "${shell%%:*}" >"$file"
done
mkdir -p "$tree/usr/share/man/man1"
"$python" -m tools.man_page >"$tree/usr/share/man/man1/starling.1"

cp CHANGELOG.md "$source"
cp -r configs/debian "$source/debian"
sed -i -e "s|@MAINTAINER@|$full_name <$email>|" -e "s|@PYTHON@|$minor|" -e "s|@NEXT_PYTHON@|$next|" "$source/debian/control"
printf 'starling (%s) unstable; urgency=medium\n\n  * See changelog.gz.\n\n -- %s <%s>  %s\n' "$version" \
    "$full_name" "$email" "$(date -R -u -d "@$SOURCE_DATE_EPOCH")" >"$source/debian/changelog"
echo "Building the package"
(cd "$source" && dpkg-buildpackage --build=binary --no-sign --no-check-builddeps) >>"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    fail "The package could not be built (full log: $log)."
}
mv "$work/starling_${version}_amd64.deb" dist/
rm -rf "$work"
ls "dist/starling_${version}_amd64.deb"
