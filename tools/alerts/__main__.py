"""`make alerts`: a server, a Prometheus with the rules of configs/prometheus, and the faults that make each alert due.

    python -m tools.alerts [--factor 20] [--omit WHAT]

Each alert must fire after its fault and resolve after the fault has ended; no other alert may fire. Durations of the
rules are divided by `--factor`. `--omit` leaves one fault out: the check must then fail, which shows that it can.
Exit codes: 0 as expected, or Prometheus is not installed; 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from pipeline.config.schema import Config
from tools.alerts.faults import MODEL, SETTINGS, Fault, ServerFaults
from tools.alerts.prometheus import MISSING, Prometheus, is_installed
from tools.alerts.rules import alert_names, shortened
from tools.alerts.watch import AlertError, Watch
from tools.bench.http.server_under_test import ServerUnderTest
from tools.tiny_gguf import SHAPES, write_model

FACTOR = 20.0
FIRES_S, RESOLVES_S = 900.0, 3600.0  # the longest window and `for` of a rule until it fires, until it resolves
MARGIN_S = 60.0  # for a busy machine


def main(arguments: list[str]) -> int:
    """Check every alert; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.alerts", description=__doc__.splitlines()[0])
    parser.add_argument("--factor", type=float, default=FACTOR, help="divides the durations of the rules (%(default)s)")
    parser.add_argument("--omit", default="", metavar="ALERT", help="do not inject the fault of this alert")
    options = parser.parse_args(arguments)
    if not is_installed():
        print(f"skipped: {MISSING}")
        return 0
    model = {"name": MODEL, "path": "", "kv_cache_mb": 16, "ranks": 1}
    with tempfile.TemporaryDirectory(prefix="starling-alerts-") as home:
        model["path"] = str(write_model(Path(home) / "tiny.gguf", SHAPES["small"]))
        rules = shortened(options.factor)
        with (
            ServerUnderTest(model, sorted(os.sched_getaffinity(0)), SETTINGS, {}) as server,
            Prometheus(Path(home) / "prometheus", server.port, rules) as prometheus,
        ):
            config = msgspec.convert({"server": {"run_dir": str(server.run_dir)}}, Config)
            faults = ServerFaults(server.port, server.run_dir, config)
            try:
                check(faults.table(), alert_names(rules), Watch(prometheus), options.factor, options.omit)
            except AlertError as error:
                print(f"error: {error}")
                return 1
            finally:
                faults.close()
    return 0


def check(faults: list[Fault], alerts: list[str], watch: Watch, factor: float, omit: str = "") -> None:
    """Inject the faults one after the other, then wait until every alert has resolved. Raises `AlertError`."""
    if missing := set(alerts) - {name for fault in faults for name in fault.alerts}:
        raise AlertError(f"no fault makes {', '.join(sorted(missing))} due")
    fires_s, resolves_s = FIRES_S / factor + MARGIN_S, RESOLVES_S / factor + MARGIN_S
    for fault in faults:
        print(f"{fault.what} ...", flush=True)
        watch.wait_resolved(fault.alerts, resolves_s)
        watch.due.update(fault.others)
        begun = time.monotonic()
        if omit not in fault.alerts:
            fault.begin()
        try:
            injected_s = time.monotonic() - begun
            watch.wait_firing(fault.alerts, fires_s, None if omit in fault.alerts else fault.go_on)
        finally:
            fault.end()
        fired_s = time.monotonic() - begun
        print(f"  {', '.join(fault.alerts)}: fired after {fired_s:.1f} s, fault complete after {injected_s:.1f} s")
    print("no more faults ...", flush=True)
    last_s = watch.wait_resolved(alerts, resolves_s)
    print(f"all {len(alerts)} alerts have fired and resolved, the last one {last_s:.0f} s after the last fault")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
