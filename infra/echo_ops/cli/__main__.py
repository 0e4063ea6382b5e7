"""`python -m echo_ops.cli`: the command line without its script, for children that must run under the same interpreter."""

from echo_ops.cli.main import main

main()
