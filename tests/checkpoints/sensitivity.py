"""Writes sensitivity.safetensors: what the end of a pass depends on in some of the checkpoints beside this file, by torch's own gradients.

    python tests/checkpoints/sensitivity.py

`NAME/TEXT` `[layers, tokens]` holds the norms of the gradient of `sum |h|^2` by what attention adds to the residual stream at each token of a
text behind a context, with `h` what the last block puts out (KVgrad). Keys and values of the context are in a cache, into which no
gradient flows. The context is the first CONTEXT tokens of `expected.safetensors`; the texts are TEXTS of them. Made with torch 2.15.0 and
transformers 5.2.0, in f32 with eager attention.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

HERE = Path(__file__).parent
NAMES = ["gemma2", "llama", "llama-bias-tied", "llama3", "mistral", "phi3", "qwen2", "qwen3"]
CONTEXT = 26
TEXTS = [slice(26, 40), slice(3, 12), slice(0, 13)]


def norms(model, context, text):
    cache, outputs, last = DynamicCache(), [], []
    with torch.no_grad():
        model(context, past_key_values=cache)

    def end(_, __, out):
        last.append(out if torch.is_tensor(out) else out[0])

    def keep(_, __, out):
        out[0].retain_grad()
        outputs.append(out[0])

    hooks = [model.model.layers[-1].register_forward_hook(end)]
    hooks += [layer.self_attn.register_forward_hook(keep) for layer in model.model.layers]
    embedded = model.model.embed_tokens(text).detach().requires_grad_(True)
    model.model(inputs_embeds=embedded, past_key_values=cache)
    last[0].square().sum().backward()
    for hook in hooks:
        hook.remove()
    return torch.stack([out.grad[0].norm(dim=-1) for out in outputs]).contiguous()


tensors = {}
for name in NAMES:
    model = AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = load_file(HERE / name / "expected.safetensors")["tokens"]
    for index, part in enumerate(TEXTS):
        tensors[f"{name}/{index}"] = norms(model, tokens[:, :CONTEXT], tokens[:, part])
save_file(tensors, HERE / "sensitivity.safetensors")
