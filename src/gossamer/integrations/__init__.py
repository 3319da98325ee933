"""Frameworks that drive a training loop, coupled by `gossamer.join`.

`transformers`, `accelerate` and `lightning` each need the library of that name. Nothing here is
imported before it is asked for.
"""
