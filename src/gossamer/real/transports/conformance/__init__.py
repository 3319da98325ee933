"""The laws of a transport, for whoever has written one: frames, windows, sums, deaths, stops.

    python -m gossamer.real.transports.conformance --transport my_package:MyTransport -n 3

Read `laws` first. `death_laws` has those that end with a process dead or stopped, `tools` what both
are written with, and `group` starts the processes.
"""
