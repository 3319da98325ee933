"""The contract of a method: each promise of its row as a law that is checked in virtual time.

The laws that the project's own tests check of every method in the table are these; a user checks a
method of their own by `gossamer check-method my.py:name`.
"""
