"""Checks of this home: configuration, directories, port, models, kernels, and what crashes have left."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.api.key_file import key_path, read_keys
from pipeline.catalog import pulled
from pipeline.config import paths
from pipeline.config.load import find_file
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ConfigError, ResourceError
from pipeline.models import digests, registry, sources, store
from pipeline.observe import status
from pipeline.runtime import directory_lock
from pipeline.runtime import run_dir as rundir
from pipeline.supervise import listen_fd
from pipeline.tls.certificate import files_of, read_certificate
from shm.checkpoint import VERSION, CheckpointError, load_index
from starling import model_list
from starling.doctor.finding import Finding, disk_bytes, megabytes, ok, problem, warning

LEAST_DAYS = 14  # before a certificate expires
LEAST_DISK = 1 << 30  # bytes: logs, state and saved pages of a small server


def check_home(config: Config) -> Iterator[Finding]:
    """Every finding about this home."""
    yield ok("configuration", f"{find_file() or 'defaults'}; {len(config.models)} model(s)")
    yield from directories(config)
    yield server(config)
    yield port(config)
    if config.server.tls_cert:
        yield certificate(config)
    yield api_keys(config)
    for model in model_list.known(config):
        yield model_files(model)
    yield kernels(config)
    yield tokenizer_kernels()
    yield from leftovers(config)


def directories(config: Config) -> Iterator[Finding]:
    """Can they be created and written, by this user alone where that matters?"""
    home = paths.home()
    for what, folder in (("home", home), ("run directory", paths.run_dir(config)), ("state", paths.state_dir(config))):
        place = folder
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            yield problem(what, f"{folder} cannot be written", "set another STARLING_HOME, or run as its owner")
            continue
        info = place.stat()
        if what == "run directory" and place == folder and stat.S_IMODE(info.st_mode) & 0o077:
            mode = f"{stat.S_IMODE(info.st_mode):o}"
            yield problem(what, f"{folder} has mode {mode}: others can reach its sockets", f"chmod 700 {folder}")
    free = shutil.disk_usage(_existing(home)).free
    if free < LEAST_DISK:
        yield warning("disk", f"{home}: {megabytes(free)} free", "free space there, or move STARLING_HOME")
    else:
        yield ok("disk", f"{home}: {megabytes(free)} free")


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def server(config: Config) -> Finding:
    """Does the server of this home run?"""
    records = [record for record in status.read_all(paths.run_dir(config)) if record.alive]
    if not records:
        return ok("server", "does not run")
    waiting = [f"{record.stage} ({record.reason or 'starting'})" for record in records if not record.ready]
    if waiting:
        return warning("server", f"runs; not ready: {', '.join(waiting)}", "see `starling status` and `starling logs`")
    return ok("server", f"runs, {len(records)} stages are ready")


def port(config: Config) -> Finding:
    """Can the server listen on its address, or does it?"""
    if not config.server.host:
        return ok("port", f"none: the server listens on {listen_fd.url(config)}")
    address = f"{config.server.host}:{config.server.port}"
    gateway = [one for one in status.read_all(paths.run_dir(config)) if one.alive and one.stage == "gateway"]
    if gateway:
        return ok("port", f"{address} is this server's ({listen_fd.url(config)})")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            config.server.host, config.server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except OSError as error:
        remedy = "stop the program that uses it, or set server.host and server.port"
        return problem("port", f"cannot listen on {address}: {error.strerror}", remedy)
    has_keys = config.auth.api_keys or key_path(paths.state_dir(config)).exists()
    if not has_keys and config.server.host not in ("127.0.0.1", "::1", "localhost"):
        return warning("port", f"{address} is reachable from other machines without a key", "run `starling keys add`")
    return ok("port", f"{address} is free")


def certificate(config: Config) -> Finding:
    """Can the server use its certificate, and for how long?"""
    files = files_of(config)
    assert files is not None
    try:
        found = read_certificate(files)
    except ConfigError as error:
        return problem("TLS", error.message, "the server does not start with these files, and keeps older ones")
    assert found is not None
    left_days = (found.not_after - time.time()) / 86_400
    if found.outdated:
        return problem("TLS", f"{files.cert} {found.outdated}", "put a new certificate and its key in place")
    until = time.strftime("%Y-%m-%d", time.gmtime(found.not_after))
    if left_days < LEAST_DAYS:
        return warning("TLS", f"{files.cert} expires on {until}", "put a new certificate and its key in place")
    return ok("TLS", f"{files.cert} is valid until {until}")


def api_keys(config: Config) -> Finding:
    """Can the key file be used?"""
    path = key_path(paths.state_dir(config))
    n_configured = len(config.auth.api_keys)
    try:
        n_stored = len(read_keys(paths.state_dir(config)))
    except ConfigError as error:
        return problem("API keys", error.message, f"until then no key of {path.name} is accepted")
    if not n_configured and not path.exists():
        return ok("API keys", "none: every client is admitted")
    return ok("API keys", f"{n_configured} configured, {n_stored} in {path}")


def model_files(model: ModelConfig) -> Finding:
    """File, digest and checkpoint of a configured or pulled model."""
    name, check, folder = model.name, f"model {model.name}", paths.models_dir()
    file = store.gguf_path(model, folder)
    if not file.is_file():
        if store.is_checkpoint(model, folder):
            return problem(check, f"{file} is missing", store.checkpoint_remedy(model, folder))
        record = store.record_of(model, folder)
        if record is not None and not model.path:
            found = f"{file}, the file that was pulled, is missing"
            command = f"starling pull {sources.shown(record.source)} --name {name} --sha256 {record.digest}"
            more = ", with the same --quant" if record.source.startswith("hf:") else ""
            return problem(check, found, f"run `{command}`{more}")
        if model.path and not sources.is_remote(model.path):
            return problem(check, f"{file} does not exist", "correct models[].path")
        return warning(check, "is not here yet", f"`starling prepare {name}` fetches it; `starling up` does so too")
    located = store.find(model, folder)
    expected = store.expected_digest(model, folder)
    if located is None and store.is_checkpoint(model, folder):
        return problem(check, f"{file} is damaged, or not complete", store.checkpoint_remedy(model, folder))
    if located is None and expected:
        found = f"{file} is new, or has changed since its SHA-256 was computed; expected {expected}"
        return warning(check, found, f"run `starling prepare {name}`, which computes it")
    if located is None:
        return warning(check, f"{file} is new or has changed", f"run `starling prepare {name}`")
    if expected and located.digest != expected:
        found = f"{file} has SHA-256 {located.digest}, expected {expected}"
        return problem(check, found, "correct models[].sha256, or remove the file and fetch it again")
    found = f"{megabytes(located.nbytes)}, sha256 {located.digest[:12]}"
    index_path = folder / f"{located.digest}.idx"
    try:
        index = load_index(index_path)
        if index_path.with_suffix(".bin").stat().st_size != index.bin_bytes or index.version != VERSION:
            return warning(check, f"{found}; its checkpoint is incomplete or old", f"run `starling prepare {name}`")
    except FileNotFoundError:
        return warning(check, f"{found}; not prepared", f"run `starling prepare {name}`, or let `starling up` do it")
    except (OSError, CheckpointError) as error:
        return problem(check, f"{found}; {error}", f"remove {index_path} and run `starling prepare {name}`")
    return ok(check, f"{found}; prepared. `starling verify {name}` reads every byte")


def kernels(config: Config) -> Finding:
    """Are the kernels compiled for this CPU and this version?"""
    try:
        from stages.worker.kernels import features, stored_code
    except (ConfigError, ResourceError):
        return warning("kernels", "there are none for this CPU", "see cpu")
    cache = features.cache_dir()
    for kv_type in sorted({model.kv_type for model in config.models}):
        if not stored_code.is_compiled(kv_type):
            remedy = "`starling prepare` compiles them, once, in a minute; the first start does so too"
            return warning("kernels", f"not compiled yet for this CPU, version and {kv_type}", remedy)
    return ok("kernels", f"compiled, {megabytes(disk_bytes(cache))} in {cache}")


def tokenizer_kernels() -> Finding:
    """Are the kernels of the tokenizer compiled? Without them the token ids are the same."""
    from stages.tokenizer.kernels import compiled

    place = compiled.directory()
    if not compiled.is_stored():
        found = "its kernels are not compiled yet for this version; without them texts are encoded more slowly"
        return warning("tokenizer", found, "`starling prepare` compiles them, once, in seconds; a start does so too")
    return ok("tokenizer", f"its kernels are compiled, {disk_bytes(place) / 1e3:,.0f} kB in {place}")


# ------------------------------------------------------------------ leftovers


def leftovers(config: Config) -> Iterator[Finding]:
    """What stopped or killed servers have left."""
    run_dir = paths.run_dir(config)
    dead = [one.stage for one in status.read_all(run_dir) if not one.alive]
    runs = bool(rundir.lock_holder(run_dir, "up")) or any(one.alive for one in status.read_all(run_dir))
    if dead and not runs:
        yield warning("leftovers", f"records of stages that died: {', '.join(dead)}", "the next start replaces them")
    yield from _arenas_of_dead_servers(config, runs)
    yield from _unfinished_downloads()
    yield from _unused_checkpoints(config)


def _arenas_of_dead_servers(config: Config, runs: bool, shm: Path = Path("/dev/shm")) -> Iterator[Finding]:
    own = paths.arena_dir(config)
    parents = (shm, paths.home_arena_parent())  # the latter: of a server that `starling up` moved
    found = (folder for parent in parents for folder in parent.glob(f"starling-{os.getuid()}-*"))
    for folder in sorted({own, *found}):
        if folder.is_symlink() or not folder.is_dir() or (folder == own and runs):
            continue
        if directory_lock.is_held(folder) or not (nbytes := disk_bytes(folder)):
            continue
        size = megabytes(nbytes)
        if folder == own:
            yield warning("leftovers", f"{size} of arenas of a killed server", "the next start uses them again")
        else:
            remedy = f"if no server of another STARLING_HOME uses it: rm -r {folder}"
            yield warning("leftovers", f"{folder} has {size} of arenas and no live server", remedy)


def _unfinished_downloads() -> Iterator[Finding]:
    folder = paths.models_dir() / ".fetch"
    if size := disk_bytes(folder):
        remedy = f"repeat the download, which continues it, or rm -r {folder}"
        yield warning("leftovers", f"{megabytes(size)} of unfinished downloads", remedy)


def _unused_checkpoints(config: Config) -> Iterator[Finding]:
    folder = paths.models_dir()
    known = {stamp.sha256 for stamp in digests.read_all(folder).values()}
    known |= {record.digest for record in registry.read_all(folder)}
    known |= {record.entry.digest for record, _ in pulled.read_all(folder)}
    files = [path for path in folder.glob("*.bin") if path.stem not in known] if folder.is_dir() else []
    size = sum(path.stat().st_blocks * 512 for path in files)
    if size:
        names = ", ".join(path.name[:12] for path in files[:3])
        remedy = "`starling gc` removes them"
        yield warning("leftovers", f"{megabytes(size)} of checkpoints without a model file ({names})", remedy)
