"""`python -m gossamer`: the command, where it is not on the path."""

from gossamer.commands.cli import main

main()
