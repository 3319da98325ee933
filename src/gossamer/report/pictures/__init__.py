"""Pictures of runs by matplotlib, which is imported only when one is drawn.

Read `figure` first: it has the common parts of all pictures.
"""
