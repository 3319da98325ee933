"""The program of `join_groups.py` with the loops of `join_buckets.py`.

Over `torch` by messages, whose sums go on while backward does; those in shared memory do not.
"""

from __future__ import annotations

import os

import join_buckets
from join_groups import main

if __name__ == "__main__":
    os.environ["GOSSAMER_REDUCTION"] = "messages"
    main(vars(join_buckets))
