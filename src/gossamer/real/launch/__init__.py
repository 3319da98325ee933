"""Starting workers on one host or several, watching over them and ending them.

Read `launcher` first. `environment` is the workers' side: it recognises who started a process and
connects it with the others.
"""
