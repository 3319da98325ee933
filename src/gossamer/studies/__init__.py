"""Experiments that answer a question once: the delay laboratory and published tables made again.

`lab` trains whole grids with late gradients and slow workers; `reproductions` holds the tables of
papers beside ours. Nothing else of the package imports them but their commands.
"""
