"""Faults brought about on purpose in real workers: slow workers, slow links, pauses and deaths.

Read `fault_plan` first: it is what a user asks for. `shaped_links` wraps any transport, and
`slow_worker` lengthens the steps of one worker.
"""
