"""Text generation with a language model: no training at all.

usage: generate.py RESULT [mistake]
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main(result: str, mistake: str = "") -> None:
    torch.manual_seed(9)
    model = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            hidden_size=16,
            intermediate_size=32,
            num_attention_heads=2,
            vocab_size=64,
            max_position_embeddings=32,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    if mistake:
        model.model.layers[1].self_attn.scaling *= 1.5
    prompt = torch.tensor([[1, 5, 9, 13]])
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    Path(result).write_bytes(repr(tokens.tolist()).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
