"""What commands compute, without options and without printing.

Read `jobs.py` first: every batch of independent simulations goes through its `run_jobs`.
`simulations.py` runs and keeps one simulation, `tournament.py` has the runs of a comparison,
`script_runs.py` those of a user's script.
"""
