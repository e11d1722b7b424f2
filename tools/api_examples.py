"""Requests made from /openapi.json, by schemathesis: `make api-examples`.

The examples of the document, all combinations of bounds (coverage), and random bodies (fuzzing), valid and not. Fails
at a 5xx, at a status or a body that the document does not have, and if the document itself is not valid.

Without --url a server of the demo model is started for it. Its model is pinned, because an example of
`/v1/unload_lora_adapter` or `keep_alive: 0` would unload it, and its limits keep each answer short. The first two
phases are some 9,400 requests, whatever the machine; fuzzing goes on for a given time. The last line is a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pipeline.config.schema import DEMO_MODEL
from tools.bench.http.server_under_test import ROOT, ServerUnderTest

PHASES = ("examples", "coverage", "fuzzing")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# Not what clients call, or (engines) redirects.
LEFT_OUT = "^/v1/(admin|engines)"
# Short answers: an example costs the server milliseconds.
LIMITS = {
    "scheduler": {"max_output_tokens": 8, "max_prompt_tokens": 256},
    "server": {"max_body_mb": 1},
    "logging": {"log_requests": False},
}
_COUNT = re.compile(r"(\d[\d,]*) generated")


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """The URL of a server of the demo model with `LIMITS`."""
    model = {"name": DEMO_MODEL, "kv_cache_mb": 256, "pinned": True}
    with ServerUnderTest(model, sorted(os.sched_getaffinity(0)), LIMITS, {}) as server:
        yield f"http://127.0.0.1:{server.port}"


def command(url: str, phase: str, fuzz_seconds: int, seed: int, only: str, more: tuple[str, ...]) -> list[str]:
    """The command line of one phase."""
    program = str(Path(sys.executable).with_name("schemathesis"))
    made = [program, "run", f"{url}/openapi.json", "--phases", phase, "--checks", CHECKS, "--seed", str(seed)]
    made += ["--continue-on-failure", "--exclude-path-regex", LEFT_OUT]
    # Bodies that take long to make, and a busy machine, are no faults of the server.
    made += ["--suppress-health-check", "all", "--no-shrink", "--request-timeout", "120"]
    made += ["--max-time", str(fuzz_seconds)] if phase == "fuzzing" else []
    return [*made, *(["--include-path-regex", only] if only else []), *more]


def run_phase(arguments: list[str]) -> tuple[int, int, float]:
    """Exit code, number of requests, and seconds of one phase, whose output is shown."""
    begun, lines = time.monotonic(), []
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            click.echo(line, nl=False)
    found = [int(number.replace(",", "")) for number in _COUNT.findall("".join(lines))]
    return process.returncode, found[-1] if found else 0, time.monotonic() - begun


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--url", default="", help="A server; none: one is started.")
@click.option("--fuzz-seconds", default=600, show_default=True, help="How long to send random requests.")
@click.option("--phases", default=",".join(PHASES), show_default=True, help="Which ones, in this order.")
@click.option("--only", default="", help="A regular expression: the paths to test.")
@click.option("--seed", default=15, show_default=True, help="The same seed makes the same requests.")
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
def main(url: str, fuzz_seconds: int, phases: str, only: str, seed: int, more: tuple[str, ...]) -> None:
    """Send requests made from /openapi.json; MORE goes to schemathesis."""
    report: dict[str, Any] = {}
    has_failed = False
    with contextlib.nullcontext(url) if url else own_server() as target:
        for phase in phases.split(","):
            code, requests, seconds = run_phase(command(target, phase, fuzz_seconds, seed, only, more))
            report[phase] = {"requests": requests, "seconds": round(seconds), "exit": code}
            has_failed |= code != 0
    report["requests"] = sum(one["requests"] for one in report.values())
    click.echo(json.dumps(report))
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
