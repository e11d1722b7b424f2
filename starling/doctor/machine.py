"""Checks of the machine: CPU, cores, memory, shared memory, huge pages, files, clock."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline import cgroup, procfs
from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.models import capacity, control_cores, worker_groups
from shm import memory_nodes
from shm.huge_pages import is_granted, is_mapped_from
from starling.doctor.finding import Finding, disk_bytes, megabytes, ok, problem, warning

FILES_BESIDE_REQUESTS = 400  # of the gateway: probes, spare connections, its own files
GOOD_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
_2024 = 1_704_067_200.0  # no machine with this program has an earlier clock


class Machine(NamedTuple):
    """Where the facts are, so that tests can give others."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")


def check_machine(config: Config, machine: Machine) -> Iterator[Finding]:
    """Every finding about the machine."""
    limits = cgroup.read(machine.proc, machine.sys / "fs" / "cgroup")
    yield cpu()
    yield cores(config, limits, sorted(os.sched_getaffinity(0)))
    yield memory(config, limits, machine)
    yield arenas(config)
    for_arenas, for_weights = (
        is_granted(_existing(paths.arena_dir(config))),
        is_mapped_from(_existing(paths.models_dir())),
    )
    yield huge_pages(config, machine, for_arenas, for_weights)
    yield from nodes(config, machine, sorted(os.sched_getaffinity(0)))
    yield file_limit(config, *resource.getrlimit(resource.RLIMIT_NOFILE))
    yield clock(machine, time.time(), newest_file(config))


def cpu() -> Finding:
    """The instructions of the CPU, and the kernels that use them."""
    from pipeline.errors import ConfigError, ResourceError

    try:
        from stages.worker.kernels import amx_verdict, features  # chooses the kernels for this CPU
    except ConfigError as error:
        return problem("cpu", error.message, "run the server on another CPU, or correct STARLING_ISA")
    except ResourceError as error:
        found, _, remedy = error.message.partition("; ")
        return problem("cpu", found, remedy)
    isa = features.isa()
    kernels = {
        "portable": "AVX2 kernels",
        "avx-vnni": "AVX2 kernels with AVX-VNNI",
        "vnni": "AVX-512 VNNI kernels",
        "amx": "AVX-512 VNNI and AMX tile kernels",
        "tiles": "tile kernels without AMX, for tests",
        "dots": "kernels of AVX-VNNI without it, for tests",
    }[isa]
    name = _cpu_name()
    if wanted := os.environ.get("STARLING_ISA"):
        return warning("cpu", f"{name}: {kernels}, by STARLING_ISA={wanted}", "unset STARLING_ISA for the fastest")
    found = f"{name}: {kernels}"
    if thresholds := amx_verdict.tile_thresholds():
        found += f" (AMX {described(thresholds)})"
    elif isa == "amx":
        found += f" (AMX is not used: {amx_verdict.why_not()})"
    return ok("cpu", found)


def described(thresholds: Iterable[tuple[str, int]]) -> str:
    """The formats that use AMX, by the tokens of a product from which on they do: "from 16 tokens for Q4_0, Q8_0"."""
    by_tokens: dict[int, list[str]] = {}
    for name, tokens in sorted(thresholds, key=lambda pair: (pair[1], pair[0])):
        by_tokens.setdefault(tokens, []).append(name)
    return "; ".join(f"from {tokens} tokens for {', '.join(names)}" for tokens, names in by_tokens.items())


def _cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "this CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "this CPU")


def cores(config: Config, limits: cgroup.Limits, allowed: Sequence[int]) -> Finding:
    """Cores that the ranks get. Ranks that wait for each other stall when a quota stops one of them."""
    n_cores, control = len(allowed), control_cores.reserved(config, allowed)
    found = f"{n_cores} core{'s' if n_cores > 1 else ''}"
    if control:
        names = ", ".join(map(str, control))
        found += f", core{'s' if len(control) > 1 else ''} {names} {'are' if len(control) > 1 else 'is'}"
        found += " the control plane's"
    most, n_groups = 0, 1
    for model in config.models:
        groups = worker_groups.among(allowed, config, model, model.name)
        ranks = sum(model.ranks or len(cpus) for cpus in groups)
        if ranks > most:
            most, n_groups = ranks, len(groups)
    has = f"a model has {most} ranks" + (f" in {n_groups} groups" if n_groups > 1 else "")
    if limits.cpus is not None:
        found += f", the control group allows the time of {limits.cpus:g}"
        if limits.cpus < most:
            fits = max(1, int(limits.cpus) // n_groups)
            remedy = f"set models[].ranks: {fits}, or raise the quota (docker run --cpus, cpu.max) to {most}"
            return warning("cores", f"{found}, and {has}, which a quota stops in turn", remedy)
    if most > n_cores:
        return warning("cores", f"{found}, and {has}", f"set models[].ranks: {max(1, n_cores // n_groups)}")
    return ok("cores", found)


def memory(config: Config, limits: cgroup.Limits, machine: Machine) -> Finding:
    """Memory for weights and arenas of the models that are loaded at the start."""
    free = procfs.available_memory(machine.proc / "meminfo")
    where = "available"
    if limits.memory_free is not None and limits.memory_free < free:
        free, where = limits.memory_free, f"free below the control group's limit of {megabytes(limits.memory or 0)}"
    arenas_need = sum(capacity.need(config, model) for model in config.preloaded)
    adapters = sum(capacity.plan(config, model).adapters for model in config.preloaded)
    fixed = arenas_need + adapters + sum(capacity.weights_need(config, model) for model in config.preloaded)
    weights = sum(_file_bytes(model) for model in config.preloaded)
    found = f"{megabytes(free)} {where}; weights {megabytes(weights)}, arenas {megabytes(arenas_need)}"
    found += f", adapters {megabytes(adapters)}" if adapters else ""
    if fixed > free:
        return problem("memory", found, "lower kv_cache_mb, serve fewer models, or take a smaller quantization")
    if arenas_need + adapters + weights > free:
        remedy = "weights are read again from the disk while the model runs: take a smaller quantization or kv_cache_mb"
        return warning("memory", found, remedy)
    return ok("memory", found)


def _file_bytes(model: ModelConfig) -> int:
    from pipeline.models import store

    try:
        return store.gguf_path(model, paths.models_dir()).stat().st_size
    except OSError:
        return 0


def arenas(config: Config) -> Finding:
    """Space of the file system of the arenas."""
    folder = paths.arena_dir(config)
    own = disk_bytes(folder)
    facts = os.statvfs(_existing(folder))
    free, total = facts.f_bavail * facts.f_frsize + own, facts.f_blocks * facts.f_frsize
    need = sum(capacity.need(config, model) for model in config.preloaded)
    found = f"{folder.parent}: {megabytes(free)} of {megabytes(total)} free, arenas need {megabytes(need)}"
    if free >= need:
        return ok("arenas", found)
    remedy = (
        "raise its size (docker run --shm-size, mount -o remount,size=), lower kv_cache_mb, or set server.arena_dir; "
        "otherwise `starling up` puts them into STARLING_HOME, which is slower"
    )
    return warning("arenas", found, remedy)


def _existing(folder: Path) -> Path:
    """A folder, or the nearest one above it that exists."""
    while not folder.is_dir():
        folder = folder.parent
    return folder


def huge_pages(config: Config, machine: Machine, for_arenas: bool, for_weights: bool) -> Finding:
    """Huge pages matter for weights and for the KV cache.

    for_arenas: the cache gets them. for_weights: weights that are mapped from their file do.
    """
    folder = machine.sys / "kernel" / "mm"
    transparent = _chosen(folder / "transparent_hugepage" / "enabled")
    try:
        reserved = int((folder / "hugepages" / "hugepages-2048kB" / "nr_hugepages").read_text())
    except (OSError, ValueError):
        reserved = 0
    found = f"transparent: {transparent}; reserved: {reserved} of 2 MB; KV cache: {'yes' if for_arenas else 'no'}"
    found += f"; mapped weights: {'yes' if for_weights else 'no'}"
    if not for_arenas and _chosen(folder / "transparent_hugepage" / "shmem_enabled") == "deny":
        remedy = "echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled, which lets the KV cache ask for them"
        return warning("huge pages", found, remedy)
    if config.performance.use_mmap or transparent in ("always", "madvise"):
        return ok("huge pages", found)
    remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, which use_mmap: false needs for its speed"
    return warning("huge pages", found, remedy)


def _chosen(path: Path) -> str:
    """The value in brackets in a file of the kernel."""
    try:
        return path.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return "not available"


def nodes(config: Config, machine: Machine, allowed: list[int]) -> Iterator[Finding]:
    """The memory nodes of these CPUs, if there are several, and whether weights are copied to each."""
    found = memory_nodes.of(allowed, machine.sys / "devices" / "system" / "node")
    if len(found) > 1:
        copies = {
            "auto": "each has a copy of the weights if memory allows it",
            "always": "each has a copy of the weights",
            "never": "none has a copy of the weights",
        }[config.performance.weight_copies]
        yield ok("memory nodes", f"{len(found)}, with {' and '.join(str(len(cpus)) for cpus in found)} cores: {copies}")


def file_limit(config: Config, soft: int, hard: int) -> Finding:
    """The hard limit of open files: stages raise their soft limit to it."""
    need = config.server.max_concurrent_requests + FILES_BESIDE_REQUESTS
    shown = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    found = f"{shown} open files (hard limit), {need:,} for server.max_concurrent_requests"
    if hard == resource.RLIM_INFINITY or hard >= need:
        return ok("files", found)
    remedy = f"raise the hard limit (ulimit -Hn, LimitNOFILE=) to {need}, or lower server.max_concurrent_requests"
    return problem("files", found, remedy)


def clock(machine: Machine, now: float, newest: float) -> Finding:
    """The time: sessions, quotas and cached answers expire by it."""
    source = "unknown"
    try:
        file = machine.sys / "devices" / "system" / "clocksource" / "clocksource0" / "current_clocksource"
        source = file.read_text().strip()
    except OSError:
        pass
    found = f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(now))}, source {source}"
    if now < _2024:
        return problem("clock", found, "set the time (timedatectl set-ntp true)")
    if newest > now + 60:
        behind = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(newest))
        remedy = "set the time (timedatectl set-ntp true): sessions and cached answers expire by it"
        return warning("clock", f"{found}; a file of this home is of {behind}, in the future", remedy)
    if source not in (*GOOD_CLOCKS, "unknown"):
        return warning("clock", found, "each reading of this clock is a system call; boot with clocksource=tsc")
    return ok("clock", found)


def newest_file(config: Config) -> float:
    """The latest time of change of the files in the state and the models directory; 0.0 without files."""
    times = [0.0]
    for folder in (paths.state_dir(config), paths.models_dir()):
        try:
            with os.scandir(folder) as entries:
                times += [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        except OSError:
            continue
    return max(times)
