"""The command line. Modules of commands are imported when their command runs, so that `--help` stays quick."""

from echo_ops.cli.main import main

__all__ = ["main"]
