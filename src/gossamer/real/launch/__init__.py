"""The launcher of workers on one host or several: it starts, watches and ends them.

Read `launcher` first. `environment` is the workers' side: it recognises the launcher of a process
and connects the process with the others.
"""
