"""`python -m tools.bench.fleet` runs the command of `command.py`."""

from tools.bench.fleet.command import run

run()
