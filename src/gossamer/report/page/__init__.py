"""The page of a run: its data from kept runs, and one HTML file that opens from disk.

Read `data` first: it is the contract between Python and the page's own script. `build` puts it
together from `gathered_runs`; `html_file` writes it.
"""
