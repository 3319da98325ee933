"""Faults brought about on purpose in real workers: slow workers, slow links, pauses and deaths.

Read `injection` first: it is what a user asks for. `shaped_links` wraps any transport.
"""
