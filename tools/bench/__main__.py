"""`python -m tools.bench` measures the kernels; `offline/command.py` is the command."""

from tools.bench.offline.command import run

run()
