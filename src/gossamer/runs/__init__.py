"""The results of runs: their folders on disk, their statistics and their comparison.

Read `result` first (what a run returns), then `folder` (which writes it) and `kept_runs` (which
reads it). `arrival`, `ranking` and `contest` decide which method reaches a target first.
"""
