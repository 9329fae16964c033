"""`python -m offramp` is the command line."""

from offramp.cli import main

main()
