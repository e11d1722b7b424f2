"""A podman for tests: its own storage, and the settings that this machine needs.

    with Engine(folder) as engine:      # raises Unavailable
        ... run `podman` with the variables `engine.environment`

It never sees the user's images, volumes and containers. Where no registry answers, mmdebstrap makes the base image of
the Containerfile from Debian's packages, under the same name. The machine may lack what engines assume:

- the capability to raise limits (CAP_SYS_RESOURCE): containers get this process's limits, and builds run in a chroot;
- one hierarchy of control groups: crun gets cgroup2 alone in a mount namespace of its own, and makes no groups;
- a package index without further settings: containers get the settings of pip and the certificates of this machine.

Containers find each other by name where netavark and aardvark-dns are installed (`Engine.has_names`).
"""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.e2e.server import ROOT

CONTAINERFILE = ROOT / "configs/container/Containerfile"
CGROUPS = Path("/sys/fs/cgroup")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")  # the same file in Debian's images
CAP_SYS_RESOURCE = 1 << 24  # linux/capability.h
PODMAN_NPROC = 32768
MINUTES = 60
HEALTH_RETRIES = 3  # of the Containerfile
ROUTES = Path("/proc/net/route")
NETWORK_PROGRAMS = (Path("/usr/lib/podman"), Path("/usr/libexec/podman"))
# The official image has Python at this path.
_BASE = """FROM {packages}
RUN ln -s /usr/bin/python3 /usr/local/bin/python
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin
"""
_CRUN = """#!/bin/sh
exec unshare --mount sh -c 'umount -R {cgroups} && mount -t cgroup2 none {cgroups} && exec {crun} "$@"' crun "$@"
"""


def free_subnet(routes: str) -> str:
    """A subnet for containers that no route leads to; `routes` has the format of /proc/net/route.

    The bridge of another podman has podman's default, 10.88.0.0/16: with two of it answers do not find their container.
    """
    taken = []
    for line in routes.splitlines()[1:]:
        fields = line.split()
        address, mask = (ipaddress.IPv4Address(bytes.fromhex(fields[n])[::-1]) for n in (1, 7))
        taken.append(ipaddress.ip_network(f"{address}/{mask}"))
    for second in range(88, -1, -1):  # podman takes 10.89.0.0 and above for networks that are made
        subnet = ipaddress.ip_network(f"10.{second}.0.0/16")
        if not any(route.prefixlen and route.overlaps(subnet) for route in taken):
            return str(subnet)
    raise Unavailable("every subnet of 10.0.0.0 to 10.88.0.0 has a route")


class Unavailable(Exception):
    """This machine cannot build or run containers; the message says why."""


class Engine:
    """The settings and the storage of a podman below one folder, whose path must be short: sockets are made there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = re.findall(r"^FROM (\S+)", CONTAINERFILE.read_text(), re.MULTILINE)[0]
        settings, storage = folder / "containers.conf", folder / "storage.conf"
        self.environment = {
            "CONTAINERS_CONF": str(settings),
            "CONTAINERS_STORAGE_CONF": str(storage),
            "TMPDIR": str(folder),
        }
        storage.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/images"\nrunroot = "{folder}/run"\n')
        lines = ["[containers]", f"volumes = {self._volumes()}"]
        self.limits = {} if _has(CAP_SYS_RESOURCE) else _limits()  # of every container; {}: as it asks for
        if self.limits:
            lines.append(f"default_ulimits = {[f'{name}={value}:{value}' for name, value in self.limits.items()]}")
            self.environment["BUILDAH_ISOLATION"] = "chroot"
        if is_hybrid := (CGROUPS / "unified" / "cgroup.controllers").exists():
            lines.append('cgroups = "disabled"')
        lines += ["[engine]", 'cgroup_manager = "cgroupfs"', 'events_logger = "file"']
        # Otherwise `podman system reset` removes /run/libpod, which every podman of this user needs.
        lines.append(f'tmp_dir = "{folder}/libpod"')
        if is_hybrid:
            lines += ['runtime = "crun"', "[engine.runtimes]", f'crun = ["{self._crun()}"]']
        self.has_names = all(
            any((folder / name).exists() for folder in NETWORK_PROGRAMS) for name in ("netavark", "aardvark-dns")
        )
        lines += ["[network]", f'default_subnet = "{free_subnet(ROUTES.read_text())}"']
        lines += [f'network_config_dir = "{folder}/networks"'] if self.has_names else []
        settings.write_text("\n".join(lines) + "\n")

    def _volumes(self) -> list[str]:
        """pip's settings, the folders that they name, and the certificates, mounted where they are here."""
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
        )
        pairs = re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed.stdout, re.MULTILINE)
        settings = self.folder / "pip.conf"
        settings.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in dict(pairs).items()))
        named = {Path(path) for _, value in pairs for path in re.findall(r"(?:^|\s)(/[^\s]+)", value)}
        # The pages of an index in a folder link to wheels beside that folder.
        named |= {Path(path).parent for _, value in pairs for path in re.findall(r"file://(/[^\s]+/[^\s]+)", value)}
        here = sorted(str(path) for path in {*named, CERTIFICATES} if path.exists())
        return [f"{settings}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in here)]

    def _crun(self) -> Path:
        crun = shutil.which("crun")
        if crun is None:
            raise Unavailable("control groups are hybrid, and crun is not installed")
        program = self.folder / "crun"
        program.write_text(_CRUN.format(cgroups=CGROUPS, crun=crun))
        program.chmod(0o755)
        return program

    def __enter__(self) -> Engine:
        base = self.base
        if self.podman("pull", "--quiet", base, is_checked=False).returncode:
            self._make(base)
        if (done := self.podman("run", "--rm", base, "true", is_checked=False)).returncode:
            raise Unavailable(f"podman cannot run containers: {done.stderr[-300:]}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.podman("rm", "--all", "--force", is_checked=False)
        self.podman("system", "reset", "--force", is_checked=False)

    def _make(self, name: str) -> None:
        """The base image `name`, from the packages of Debian."""
        if not shutil.which("mmdebstrap"):
            raise Unavailable(f"no registry has {name}, and mmdebstrap is not installed")
        packages = self.folder / "packages.tar"
        include = "--include=python3,python3-venv,ca-certificates"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", include, "bookworm", str(packages)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=15 * MINUTES, check=False)
        if done.returncode:
            raise Unavailable(f"no registry has {name}, and mmdebstrap failed: {done.stderr[-300:]}")
        self.podman("import", str(packages), "packages")
        packages.unlink()
        context = self.folder / "base"
        context.mkdir()
        (context / "Containerfile").write_text(_BASE.format(packages="localhost/packages"))
        self.podman("build", "--tag", name, str(context))

    def check_health(self, container: str) -> None:
        """Run the health check of a container, at most as often as it may fail in a row."""
        for _ in range(HEALTH_RETRIES):
            done = self.podman("healthcheck", "run", container, is_checked=False)
            if done.returncode == 0:
                return
        raise AssertionError(done.stdout + done.stderr)

    def podman(self, *arguments: str, is_checked: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of podman; without `is_checked` it may fail."""
        done = subprocess.run(
            ["podman", *arguments],
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=15 * MINUTES,
            check=False,
        )
        assert not is_checked or done.returncode == 0, f"podman {arguments}: {done.stderr[-1000:]}"
        return done


def _limits() -> dict[str, int]:
    """Limits that a process of podman may set; podman lowers its own number of processes to `PODMAN_NPROC` first."""
    n_files, n_processes = (resource.getrlimit(name)[1] for name in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    return {"nofile": n_files, "nproc": min(n_processes, PODMAN_NPROC)}


def _has(capability: int) -> bool:
    held = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return held is not None and bool(int(held[1], 16) & capability)
