"""A small GPT on text, with gradient accumulation, clipping and mixed precision."""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT = (
    "the quick brown fox jumps over the lazy dog and the lazy dog sleeps under the old tree. " * 60
)
CHARS = sorted(set(TEXT))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).transpose(1, 3)
        q, k, v = parts.unbind(2)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2, length: int = 32) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(CHARS), width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(CHARS))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--accumulation", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1337)
    data = torch.tensor([CHARS.index(char) for char in TEXT])
    draws = torch.Generator().manual_seed(1337)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=True)

    def get_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - 33, (8,), generator=draws).tolist()
        return tuple(torch.stack([data[s + by : s + by + 32] for s in starts]) for by in (0, 1))

    for iteration in range(args.iterations):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * iteration / args.iterations))
        for _ in range(args.accumulation):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(*get_batch()) / args.accumulation
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if iteration % 5 == 4:
            print(f"iteration {iteration}: loss {loss.item() * args.accumulation:.4f}")


if __name__ == "__main__":
    main()
