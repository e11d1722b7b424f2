"""Files of a model hub's repositories: which there are, which one to take, and its download.

`huggingface_hub` looks up repositories and addresses; it honours HF_ENDPOINT, HF_TOKEN and the token of `hf auth
login`.  It is imported when it is used.  download.py brings the file, in ranges and for a reader; the token goes to
the hub's own origin, and to none of the hosts where it redirects to.

Where `registry.sources` bounds what may be fetched, requests go to the hub itself, to the hosts of files of the public
hub, and to what a pattern allows; a redirect elsewhere is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pipeline.errors import ConfigError, InvalidRequest, ModelUnavailable
from pipeline.models import model_directory
from pipeline.models.arriving import Reader
from pipeline.models.download import Progress, download
from pipeline.models.sources import HubSource, check_allowed

# By use: what fits most machines at little loss comes first.
_FIRST = ("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q6_K", "Q8_0")
PREFERRED = (*_FIRST, "Q3_K_M", "Q3_K_L", "Q3_K_S", "Q2_K", "F16", "BF16", "F32")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_QUANTIZATION = re.compile(r"(?<![A-Za-z0-9])(IQ[1-4]_[A-Z0-9_]+|Q[2-8](?:_[0-9KSML]+)*|BF16|F16|F32|FP16|FP32)", re.I)
_SPLIT = re.compile(r"-\d{5}-of-(?!00001\.)\d{5}\.gguf$")  # one of one is whole
_JOIN = "join all parts with llama-gguf-split --merge and pull the file"

ANY = ("*",)
PUBLIC_HUB = "https://huggingface.co"
PUBLIC_FILES = ("https://*.hf.co/*", "https://*.huggingface.co/*")  # where it redirects to


class HubFile(NamedTuple):
    """A file of a repository."""

    name: str
    nbytes: int
    sha256: str = ""  # of a large file
    blob: str = ""  # the name that Git gives the contents


class Repository(NamedTuple):
    """The files of one commit."""

    name: str
    commit: str
    files: tuple[HubFile, ...]


def quantization_of(file: str) -> str:
    """The quantization that a file's name tells, as Q4_K_M; "" if it tells none."""
    found = _QUANTIZATION.findall(file.rpartition("/")[2].removesuffix(".gguf"))
    return found[-1].upper().replace("FP", "F") if found else ""


def choose(repository: Repository, file: str = "", quantization: str = "") -> HubFile:
    """The file to take: `file`, or the only one of a quantization. Raises `InvalidRequest` that lists the choices."""
    where = f"hf:{repository.name}"
    names = {one.name: one for one in repository.files}
    if file:
        if file.endswith(PICKLED):
            raise InvalidRequest(f"{where}/{file} is pickled: reading it can run code; take a GGUF file", "source")
        if file.endswith(model_directory.SAFETENSORS):
            raise InvalidRequest(
                f"{where}/{file} is no model by itself; `starling pull {where}` fetches and converts the repository",
                "source",
            )
        if _SPLIT.search(file):
            raise InvalidRequest(f"{where}/{file} is one part of a GGUF file; {_JOIN}", "source")
        if file in names:
            return names[file]
        raise InvalidRequest(f"{where} has no file {file!r}{_choices(_ggufs(repository))}", "source")
    ggufs = _ggufs(repository)
    if not ggufs:
        raise InvalidRequest(f"{where} {_without_gguf(repository)}", "source")
    if quantization:
        fits = [one for one in ggufs if quantization_of(one.name) == quantization.upper()]
        if len(fits) == 1:
            return fits[0]
        what = "several files" if fits else "no file"
        raise InvalidRequest(f"{where} has {what} of {quantization.upper()}{_choices(fits or ggufs)}", "quantization")
    for preferred in PREFERRED:
        fits = [one for one in ggufs if quantization_of(one.name) == preferred]
        if len(fits) == 1:
            return fits[0]
        if fits:
            break
    if len(ggufs) == 1:
        return ggufs[0]
    raise InvalidRequest(f"{where} has several files; name one{_choices(ggufs)}", "source")


def is_directory(repository: Repository, file: str = "") -> bool:
    """Whether the repository is to be converted: it has safetensors, and no whole GGUF file."""
    names = {one.name for one in repository.files}
    return not file and not _ggufs(repository) and model_directory.has_weights(names)


def _ggufs(repository: Repository) -> list[HubFile]:
    """The model files: whole ones, without projectors of images."""
    files = [one for one in repository.files if one.name.endswith(".gguf")]
    return [one for one in files if not _SPLIT.search(one.name) and "mmproj" not in one.name.lower()]


def _choices(files: Sequence[HubFile]) -> str:
    lines = [f"  {one.name} ({one.nbytes / 1e6:,.0f} MB)" for one in files[:40]]
    return ":\n" + "\n".join(lines) if lines else ""


def _without_gguf(repository: Repository) -> str:
    names = [one.name for one in repository.files]
    if any(_SPLIT.search(name) for name in names):
        return f"has its GGUF in several parts only; {_JOIN}"
    if pickled := [name for name in names if name.endswith(PICKLED)]:
        return (
            f"has only pickled weights ({', '.join(pickled[:3])}), which can run code when they are read; it is refused"
        )
    return "has no GGUF file"


# ------------------------------------------------------------------ the hub


def look_up(source: HubSource, allowed: Sequence[str] = ANY) -> Repository:
    """The files of the repository. `allowed`: `registry.sources`. Raises `ConfigError`, `ModelUnavailable`."""
    from huggingface_hub import HfApi

    with _errors(source), _bounded(allowed):
        info = HfApi().model_info(source.repository, revision=source.revision or None, files_metadata=True)
    files = [
        HubFile(one.rfilename, one.size or 0, (one.lfs.sha256 or "") if one.lfs else "", one.blob_id or "")
        for one in info.siblings or ()
    ]
    return Repository(source.repository, info.sha or source.revision or "main", tuple(files))


def fetch(
    source: HubSource,
    repository: Repository,
    file: HubFile,
    part: Path,
    progress: Progress,
    allowed: Sequence[str] = ANY,
    reader: Reader | None = None,
) -> str:
    """Download the file to `part`, which keeps the received bytes when this raises; its SHA-256, hex.

    `source`: for messages. `reader`: uses the file while it arrives.  Raises as `look_up` and `download`.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repository.name, file.name, revision=repository.commit)
    with _errors(source), _bounded(allowed):
        get_hf_file_metadata(url)  # a file that may not be read is refused by its reason
    token = build_hf_headers().get("authorization", "")
    origin, patterns = _origin(url), _patterns(allowed)

    def headers_of(address: str) -> dict[str, str]:
        return {"Authorization": token} if token and _origin(address) == origin else {}

    def allow(address: str) -> None:
        check_allowed(address, patterns)

    return download(url, part, progress, str(source), allow, reader=reader, headers_of=headers_of)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port. Raises `ValueError` for a port that is none."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or PUBLIC_HUB


def _patterns(allowed: Sequence[str]) -> tuple[str, ...]:
    """What requests for a file of the hub may go to."""
    endpoint = urlsplit(_endpoint())
    own = f"{endpoint.scheme}://{endpoint.netloc}/*"
    return (*allowed, own, *(PUBLIC_FILES if _endpoint() == PUBLIC_HUB else ()))


@contextlib.contextmanager
def _bounded(allowed: Sequence[str]) -> Iterator[None]:
    """Within this, every request of the library, redirected ones included, is checked before it is sent."""
    if "*" in allowed:
        yield
        return
    from huggingface_hub import get_session

    patterns = _patterns(allowed)

    def check(request: Any) -> None:
        check_allowed(str(request.url), patterns)

    session = get_session()
    hooks = session.event_hooks
    session.event_hooks = {**hooks, "request": [*hooks["request"], check]}
    try:
        yield
    finally:
        session.event_hooks = hooks


@contextlib.contextmanager
def _errors(source: HubSource) -> Iterator[None]:
    """Translate the library's exceptions."""
    from huggingface_hub import errors

    endpoint = _endpoint()
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            f"{source}: {endpoint} asks for consent: accept it there and set HF_TOKEN", "source"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{source}: {endpoint} has no such repository, or it is private: set HF_TOKEN", "source"
        ) from None
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError, errors.HFValidationError) as error:
        raise ConfigError(f"{source}: {_line(error)}", "source") from None
    except errors.OfflineModeIsEnabled:
        raise ConfigError(
            f"{source}: HF_HUB_OFFLINE is set, so nothing is fetched from {endpoint}; unset it", "source"
        ) from None
    except OSError as error:  # connections are OSErrors of several kinds
        raise ModelUnavailable(f"{source}: {endpoint}: {_line(error)}; try again") from None
    except Exception as error:
        # The library's HTTP client has exceptions of its own, which are no OSErrors.
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2", "requests"):
            raise
        raise ModelUnavailable(f"{source}: {endpoint}: {_line(error)}; try again") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
