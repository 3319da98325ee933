"""Fewer bytes: compressors of what workers exchange, their promises, and the handle that uses them.

Pure tensor code, which methods may use too. Read `compressor` first, then one family (`casts`,
`signs`, `stochastic`, `sparse`, `low_rank`), then `registry`, which has the one table of promises,
and `compressed_worker`, which puts a compressor below a method that knows nothing of it.
"""

from gossamer.compression.compressor import Coder, Compressor, Stream
from gossamer.compression.registry import COMPRESSORS, parse_compressor

__all__ = ["COMPRESSORS", "Coder", "Compressor", "Stream", "parse_compressor"]
