"""`python -m trireme`: the command line."""

from trireme.cli.main import main

main()
