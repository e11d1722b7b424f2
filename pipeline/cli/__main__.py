"""`python -m pipeline.cli` is `starling`."""

from pipeline.cli import main

main()
