"""What commands compute, without options, and the functions of the same names for programs.

Read `jobs.py` first: every batch of independent simulations goes through its `run_jobs`.
`answer.py` is what `gossamer.compare`, `advise`, `cost` and `probe` return.
`simulations.py` runs and keeps one simulation, `tournament.py` has the runs of a comparison,
`script_runs.py` those of a user's script.
"""
