"""The manual page has every help page, unchanged."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from starling.cli import cli
from tests.e2e.server import ROOT
from tests.starling.test_help import commands
from tools.man_page import escaped

pytestmark = pytest.mark.slow

DATE = "2001-02-03"
EPOCH = 981_158_400  # its midnight, UTC
COLUMNS = 78  # of text on a terminal of 80
REQUESTS = {".TH", ".SH", ".SS", ".TP", ".B", ".BR", ".in", ".nf", ".fi"}
ESCAPES = {r"\e", r"\-", r"\&", r"\(aq", r"\(ga", r"\(ha", r"\(ti", r"\fI", r"\fB", r"\fR"}


@pytest.fixture(scope="module")
def source() -> str:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH), "COLUMNS": "40", "TZ": "Asia/Tokyo"}
    command = [sys.executable, "-m", "tools.man_page"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_text_is_escaped() -> None:
    assert escaped(".B 'a'\n'~b' \\n") == "\\&.B \\(aqa\\(aq\n\\(aq\\(tib\\(aq \\en"


def test_it_has_only_requests_and_escapes_that_are_meant(source: str) -> None:
    assert {line.split()[0] for line in source.splitlines() if line.startswith((".", "'"))} <= REQUESTS
    assert set(re.findall(r"\\(?:\(..|f.|.)", source)) <= ESCAPES
    assert source.isascii()
    text = "\n".join(line for line in source.splitlines() if not line.startswith(".TH"))
    assert re.findall(r"(?<!\\)[-'`^~].*", text) == [], "roff prints them as other characters"
    assert source.startswith(f'.TH STARLING 1 "{DATE}" "starling ')


def test_it_is_shown_as_the_help_pages(source: str) -> None:
    if not shutil.which("groff"):
        pytest.skip("not installed: groff")
    command = ["groff", "-man", "-ww", "-Tutf8", "-P-cbou", "-rLL=80n"]
    shown = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    assert shown.stderr == ""
    for words in commands():
        usage, _, page = CliRunner().invoke(cli, [*words, "--help"], terminal_width=COLUMNS).output.partition("\n\n")
        assert "".join(f" {line}\n" if line else "\n" for line in page.splitlines()) in shown.stdout, words
        assert usage.splitlines()[0].replace("Usage: cli", " Usage: starling") in shown.stdout
