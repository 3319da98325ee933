"""Recorded computations that outlive their process: what is kept, where, and for which models.

Read `trace_cache` first, then `graph_text` (how a recording is written down) and
`model_fingerprint` (which models have the same recording).
"""
