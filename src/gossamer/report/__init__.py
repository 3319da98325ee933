"""What a person reads after a run: the page, pictures, and tables for other programs.

Read `page.build` first: it turns kept runs into the data of a page, which `page.html_file` writes.
`pictures` draws the same with matplotlib, `exporters` writes runs for other programs.
"""
