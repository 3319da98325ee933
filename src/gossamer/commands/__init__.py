"""The command line: one file per command. Read `cli.py` first, then the command that you want.

`options.py` has the options that commands share, `kept_run.py` what every command does that keeps a
run, `console.py` how results are printed. `view/` shows runs while they go on, `studies/` has the
commands of the laboratory and of the reproductions.
"""
