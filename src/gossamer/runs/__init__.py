"""Runs as they are kept and read: the folder on disk, results, statistics and who wins.

Read `result` first (what a run gives back), then `folder` (how it is written) and `kept_runs` (how
it is read again). `arrival`, `ranking` and `contest` say which method reached a target first.
"""
