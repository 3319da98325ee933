"""The page of a run: one HTML file that opens from disk.

Read `data` first: it is the interface between Python and the page's own script. `build` makes it
from `gathered_runs`, and `html_file` writes it.
"""
