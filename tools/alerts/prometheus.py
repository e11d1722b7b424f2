"""A Prometheus process that scrapes processes of this machine and evaluates rules."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from pipeline.runtime.process import die_with_parent
from tools.ports import free_port

START_S = 60.0
STOP_S = 60.0
MISSING = "prometheus is not installed (Debian: prometheus)"


def is_installed() -> bool:
    """Whether there is a Prometheus to start; `MISSING` says what to install."""
    return shutil.which("prometheus") is not None


class Prometheus:
    """Scrapes ports of 127.0.0.1 every `interval_s`. A context manager; it has scraped when entered."""

    def __init__(
        self,
        home: Path,
        target: int | Mapping[str, Sequence[int]],
        rules: Mapping[str, Any],
        interval_s: float = 1.0,
        authorization: Mapping[str, str] | None = None,
    ) -> None:
        """`home` is created. `target`: the port of a server, or the ports of each job.

        `rules` is a rules file's contents, `authorization` a part of the scrape configuration.
        """
        self.port = free_port()
        self._home = home
        every = f"{round(1000 * interval_s)}ms"
        home.mkdir()
        (home / "rules.yml").write_text(yaml.safe_dump(dict(rules)))
        ports = {"starling": (target,)} if isinstance(target, int) else target
        jobs: list[dict[str, Any]] = [
            {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in several]}]}
            for name, several in ports.items()
        ]
        for job in jobs if authorization is not None else ():
            job["authorization"] = dict(authorization or {})
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": ["rules.yml"],
            "scrape_configs": jobs,
        }
        (home / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = (home / "log").open("wb")
        self.process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'data'}"),
                *(f"--web.listen-address=127.0.0.1:{self.port}", "--enable-feature=exemplar-storage"),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )

    def get(self, path: str, **query: str) -> Any:
        """`data` of an answer of the API. Raises `OSError`."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression, now."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def firing(self) -> dict[str, dict[str, str]]:
        """Labels of the alerts that fire, by name; of several with one name any."""
        found = self.get("alerts")["alerts"]
        return {one["labels"]["alertname"]: one["labels"] for one in found if one["state"] == "firing"}

    def wait_scraped(self) -> Self:
        """Wait until there are samples to compare later ones with. Raises `RuntimeError` with its log."""
        deadline = time.monotonic() + START_S
        found: list[dict[str, Any]] = []
        while not found:
            problem = "its target does not respond"
            try:
                found = self.query("sum_over_time(up[1h]) >= 3")
            except OSError as error:
                problem = str(error)
            if not found and (self.process.poll() is not None or time.monotonic() > deadline):
                log = (self._home / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"Prometheus did not start: {problem}\n{log}")
            time.sleep(0.1)
        return self

    def close(self) -> None:
        """End the process. Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(STOP_S)
        self._log.close()

    def __enter__(self) -> Self:
        try:
            return self.wait_scraped()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()
