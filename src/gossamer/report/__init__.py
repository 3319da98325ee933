"""Reports of runs: the page, pictures, and files for other programs.

Read `page.build` first: it makes the data of a page from run folders, and `page.html_file` writes
the page. `pictures` draws with matplotlib, and `exporters` write runs for other programs.
"""
