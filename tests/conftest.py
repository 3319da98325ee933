"""Bitwise claims hold at equal thread counts, so every test runs torch on one thread."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
