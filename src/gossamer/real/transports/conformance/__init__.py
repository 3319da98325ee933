"""The laws of every transport, for authors of new ones: frames, windows, sums, deaths, stops.

    python -m gossamer.real.transports.conformance --transport my_package:MyTransport -n 3

Read `laws` first. `death_laws` has the laws in which processes die or stop. Both use `tools`, and
`group` starts the processes.
"""
