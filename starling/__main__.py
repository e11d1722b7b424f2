"""`python -m starling` is `starling`."""

from starling.cli import main

main()
