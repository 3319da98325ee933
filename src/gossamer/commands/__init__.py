"""The command line: one file per command. Read `cli.py` first, then the command that you want.

`options.py` has the options that commands share, `kept_run.py` has what every command does that
keeps a run, `console.py` prints results. `work/` computes, `view/` shows runs while they go on, and
`studies/` has the commands of the laboratory and of the reproductions.
"""
