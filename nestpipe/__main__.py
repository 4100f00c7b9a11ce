"""`python -m nestpipe` is the `nestpipe` command."""

from nestpipe.cli import main

main()
