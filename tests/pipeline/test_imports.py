"""What each process imports: a module that it does not need costs memory in every server, for its whole life."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tls_files import DATA

# Compilers, other stages' libraries, and what only commands, downloads and tests need.
FORBIDDEN = {
    "aiohttp",
    "email",
    "honcho",
    "http.client",
    "huggingface_hub",
    "hypothesis",
    "importlib.metadata",
    "jinja2",
    "llvmlite",
    "multiprocessing",
    "numba",
    "prometheus_client",
    "pytest",
    "requests",
    "rich",
    "scipy",
    "ssl",
    "tokenizers",
    "uvloop",
    "xml",
    "zipfile",
}
# What a stage is for: by stage, those of FORBIDDEN that it needs.
NEEDED = {
    "gateway": {"aiohttp", "email", "http.client", "prometheus_client", "ssl", "uvloop"},
    "tokenizer": {"jinja2", "tokenizers"},
    "scheduler": set(),
    "kv": set(),
    "worker": set(),
}
SHOW = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def imported(code: str) -> set[str]:
    """The modules of a new process that runs `code`."""
    done = subprocess.run([sys.executable, "-c", f"{code}; {SHOW}"], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("stage", NEEDED)
def test_a_stage_imports_what_it_needs(stage: str) -> None:
    found = imported(f"import starling.cli.stage, stages.{stage}.stage")
    assert f"stages.{stage}.stage" in found
    assert (found & FORBIDDEN) - NEEDED[stage] == set()
    others = {name for name in NEEDED if name != stage}
    assert not {name for name in found if name.startswith("stages.") and name.split(".")[1] in others}


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("starling.cli.stage", set()),
        ("starling.cli.up", {"honcho", "multiprocessing"}),  # honcho runs in it, and imports the other one
        ("pipeline.ipc.poll_loop", set()),
    ],
)
def test_processes_that_only_start_others_import_little(module: str, needed: set[str]) -> None:
    """`up` checks the models before it starts the stages, without the compiler."""
    assert imported(f"import {module}") & FORBIDDEN == needed


def test_the_gateway_spends_nothing_on_certificates_of_a_client(tmp_path: Path) -> None:
    code = """
import ssl, sys
from starling.cli.stage import import_stage
import_stage("gateway")
from aiohttp import connector
contexts = connector._SSL_CONTEXT_VERIFIED, ssl.create_default_context()
print(*(context.cert_store_stats()["x509"] for context in contexts))
"""
    environment = {**os.environ, "SSL_CERT_FILE": str(DATA / "ca.pem"), "SSL_CERT_DIR": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "0 1\n"
