"""Writes activations.safetensors: logits [L, vocab] of some of the checkpoints beside this file, as `transformers` computes
them where the input of every linear layer is rounded to bytes, with one scale for each token: W8A8 without the W8.

    python tests/checkpoints/activations.py

`code = round(x / scale)`, halves to even, `scale = max |x| / 127` of the row, in front of each `torch.nn.Linear`,
the output projection included. Made with torch 2.15.0 and transformers 5.24.0.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
NAMES = ["llama", "gemma2", "phi3", "qwen3"]


def rounded(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    steps = x / torch.where(scale == 0, torch.ones_like(scale), scale)
    return scale * torch.round(steps)


def logits(name):
    model = AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    with torch.no_grad():
        return model(load_file(HERE / name / "expected.safetensors")["tokens"]).logits[0].contiguous()


save_file({name: logits(name) for name in NAMES}, HERE / "activations.safetensors")
