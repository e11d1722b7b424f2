"""`python -m tools.bench.families`."""

from tools.bench.families.command import main

main()
