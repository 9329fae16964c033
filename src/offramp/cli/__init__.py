"""The command line: one file per group of verbs."""

from offramp.cli.app import main

__all__ = ["main"]
