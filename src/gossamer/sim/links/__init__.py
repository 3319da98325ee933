"""The network beyond the cards: the ways between them, and who else uses them.

Read `routes` first (which links and what cap lie between two cards), then `collective_flows` (how
an all-reduce uses them) and `background` (what others take of them, and how busy cards are).
"""
