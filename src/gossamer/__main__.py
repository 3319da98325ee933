"""`python -m gossamer`: the command, where it is not on the path."""

from gossamer.cli import main

main()
