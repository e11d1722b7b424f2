"""The image of docs/deploying.md, built and run by podman as that page has it; `make test-deploy`.

It takes minutes: the image installs Starling from the package index, and its first start fetches the demo model and
compiles kernels.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from pipeline.config.schema import DEMO_MODEL
from tests.docs.container_engine import Engine
from tests.docs.page import DEPLOY_S, ServeBlock
from tests.e2e.server import ROOT
from tools.checks import markdown

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * DEPLOY_S),
    pytest.mark.skipif(not os.environ.get("STARLING_TEST_DEPLOY"), reason="takes minutes: make test-deploy"),
]
KEY = {"Authorization": "Bearer sk-change-me"}  # of the page's command


def commands() -> tuple[str, str]:
    """The command that builds the image, and the one that runs it."""
    text = (ROOT / "docs/deploying.md").read_text()
    block = next(block for block in markdown.blocks(text) if block.info == "sh deploy podman")
    build, run = re.findall(r"^podman (?:.*\\\n)*.*$", block.text, re.MULTILINE)
    return build, run


class Container(ServeBlock):
    """A container in the foreground, as the page starts it."""

    start_s = DEPLOY_S

    def __init__(self, home: Path, text: str, engine: Engine) -> None:
        super().__init__(home, text, {}, home)
        self.engine = engine
        self.environment = {**os.environ, **engine.environment}

    def inside(self, *command: str) -> tuple[int, str]:
        """Run a command in the container. Returns its exit code and what it printed."""
        done = self.engine.podman("exec", "--latest", *command, is_checked=False)
        return done.returncode, done.stdout + done.stderr


def ask(server: Container) -> str:
    body = {
        "model": DEMO_MODEL,
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 8,
        "temperature": 0,
    }
    assert server.request("POST", "/v1/chat/completions", body)[0] == 401
    status, answer, _ = server.request("POST", "/v1/chat/completions", body, KEY)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def test_the_image_serves_with_the_least_rights(engine: Engine, tmp_path: Path) -> None:
    build, run = commands()
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    server = Container(first, f"{build}\n{run}", engine)
    with server:
        text = ask(server)
        assert text
        assert server.inside("id", "-u") == (0, "10001\n")
        code, message = server.inside("touch", "/opt/starling/file")
        assert code != 0
        assert "Read-only file system" in message
        engine.check_health(engine.podman("ps", "--quiet").stdout.strip())
        assert server.stop(signal.SIGINT) in (0, 130, -signal.SIGINT)
    server = Container(second, run, engine)
    with server:
        assert not [line for line in server.output if "compile kernels" in line or "download" in line]
        assert ask(server) == text
        stages = json.loads(server.inside("starling", "status", "--json")[1])
        assert stages
        assert server.stop(signal.SIGTERM) in (0, 143, -signal.SIGTERM)
