"""Deliberate faults of real workers: slow workers, slow links, pauses and deaths.

Read `fault_plan` first, which has the faults that a user asks for. `shaped_links` slows the links
of any transport down, and `slow_worker` makes the steps of one worker longer.
"""
