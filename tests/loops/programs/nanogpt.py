"""A hand-written loop around a compiled transformer: optimizer first, then torch.compile, evaluation at step 0.

usage: nanogpt.py RESULT [mistake]
"""

import os
import sys
from pathlib import Path

import torch
from torch.nn import functional


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(x)


class GPT(torch.nn.Module):
    def __init__(self, vocabulary: int = 16, width: int = 8, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.wte = torch.nn.Embedding(vocabulary, width)
        self.block = Block(width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.block(self.wte(tokens))) * self.scale
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(result: str, mistake: str = "") -> None:
    torch.manual_seed(5)
    raw = GPT(scale=1.01 if mistake else 1.0)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2, betas=(0.9, 0.95))
    model = torch.compile(raw, backend=os.environ.get("BACKEND", "inductor"))
    losses = []
    for step in range(3):
        if step % 2 == 0:
            model.eval()
            with torch.no_grad():
                losses.append(model(*batch(9))[1].item())
            model.train()
        for micro in range(2):
            _, loss = model(*batch(10 * step + micro))
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in raw.parameters())
    Path(result).write_bytes(repr(losses).encode() + parameters)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 16, (2, 7), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


if __name__ == "__main__":
    main(*sys.argv[1:])
