"""Tables of small trainings: each at the best of a few rates, with three seeds and intervals.

They train on one core in minutes. Read `trials` first: it has what all of them share.
"""
