"""A replica that is spread over several machines: which layers stand where, and in which order the
machines work on the micro-batches of a step. Nothing here knows a clock or a network; `sim` plays
these tables in virtual time and `real` runs them. Read `schedule.py` first, then `stages.py`."""
