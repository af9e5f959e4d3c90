"""Writes tests/fixtures/w8a8/expected.safetensors: tokens, and logits [1, L, vocab] of the folder beside it as `transformers` computes them, which rounds the
inputs of its linear layers to bytes under their static scales; those of the output projection are rounded here, with a scale for each token.

    kvsieve quantize --model tests/checkpoints/llama --format w8a8:activations=static --text TEXT --samples 8 --length 64 --output tests/fixtures/w8a8
    python tests/conformance/w8a8.py

Made with torch 2.15.0, transformers 4.57.3 and compressed-tensors 0.20.0, and CONTRIBUTING.md for the text.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

TESTS = Path(__file__).parent.parent


def rounded(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return scale * torch.round(x / torch.where(scale == 0, torch.ones_like(scale), scale))


tokens = load_file(TESTS / "checkpoints" / "llama" / "expected.safetensors")["tokens"]
model = AutoModelForCausalLM.from_pretrained(TESTS / "fixtures" / "w8a8", dtype=torch.float32, attn_implementation="eager")
with torch.no_grad():
    model.lm_head.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    logits = model(tokens).logits
save_file({"tokens": tokens, "logits": logits.contiguous()}, TESTS / "fixtures" / "w8a8" / "expected.safetensors")
