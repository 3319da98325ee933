"""Pictures of runs by matplotlib, which is imported only when one is drawn.

Read `figure` first: it has what all pictures share.
"""
