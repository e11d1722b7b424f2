"""`python -m tools.bench.offline` runs the command of `command.py`."""

from tools.bench.offline.command import run

run()
