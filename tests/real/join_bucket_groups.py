"""The program of `join_groups.py` with the loops of `join_buckets.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import join_buckets
from join_groups import main

if __name__ == "__main__":
    main(vars(join_buckets))
