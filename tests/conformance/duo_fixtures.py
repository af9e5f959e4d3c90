#!/usr/bin/env python3
"""Write tests/fixtures/duo.safetensors: what DuoAttention's own code says of gates of heads, on tests/checkpoints/llama.

    git clone https://github.com/mit-han-lab/duo-attention && git -C duo-attention checkout fe93c31
    pip install torch==2.15.0 transformers==4.57.3 safetensors
    python3 tests/conformance/duo_fixtures.py --code duo-attention

Its mask of streaming heads, its streaming attention and its term on the gates are called; what lies between is `duo_attn/train.py` and
`duo_attn/patch/llama.py` (lines 120 to 129) in the words of a recent transformers. Written are `tokens` I64 [B, L], `judged` I64 [N] (rows of
B L), `near` I64 [2] (sink, recent), `alpha` F32 [layers, Hkv], `distance` F32 [1], `gradient` F32 [layers, Hkv] of the distance, and
`pressed` F32 [layers, Hkv] of the distance and 0.05 times the term.
"""

import argparse
import importlib.util
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

HERE = Path(__file__).parents[1]
SINK, RECENT, TOKENS = 3, 7, 48

parser = argparse.ArgumentParser()
parser.add_argument("--code", type=Path, required=True)
code = parser.parse_args().code / "duo_attn"


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


streaming, loss = loaded(code / "patch" / "streaming_attn.py"), loaded(code / "loss.py")

folder = HERE / "checkpoints" / "llama"
config = json.loads((folder / "config.json").read_text())
config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
model = LlamaModel(LlamaConfig(**config, attn_implementation="sdpa")).float()
weights = {name.removeprefix("model."): value for name, value in load_file(folder / "model.safetensors").items()}
missing, unexpected = model.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
assert not missing and unexpected == ["lm_head.weight"], (missing, unexpected)
model.requires_grad_(False)

torch.manual_seed(11)
tokens = torch.randint(3, config["vocab_size"], (2, TOKENS))
judged = torch.rand(2, TOKENS) < 0.4
alpha = torch.rand(config["num_hidden_layers"], config["num_key_value_heads"]).requires_grad_()
mask = streaming.generate_streaming_mask(TOKENS, SINK, RECENT, "cpu")
dense = ALL_ATTENTION_FUNCTIONS["sdpa"]


def mixed(module, query, key, value, attention_mask, **kwargs):
    full, _ = dense(module, query, key, value, attention_mask, **kwargs)
    near = streaming.streaming_attn_sdpa(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask)
    gates = alpha[module.layer_idx].clamp(0, 1).view(1, 1, -1, 1)
    gates = gates.repeat_interleave(full.shape[2] // gates.shape[2], 2)
    return (1 - gates) * near + gates * full, None


ALL_ATTENTION_FUNCTIONS["mixed"] = mixed
original = model(input_ids=tokens, use_cache=False).last_hidden_state
model.config._attn_implementation = "mixed"
pruned = model(input_ids=tokens, use_cache=False).last_hidden_state
distance = (original[judged] - pruned[judged]).pow(2).mean(dim=-1).sum() / judged.sum()
(gradient,) = torch.autograd.grad(distance, alpha, retain_graph=True)
(pressed,) = torch.autograd.grad(distance + 0.05 * loss.l1_loss(alpha.flatten()), alpha)
save_file(
    {
        "tokens": tokens,
        "judged": judged.flatten().nonzero().flatten(),
        "near": torch.tensor([SINK, RECENT]),
        "alpha": alpha.detach(),
        "distance": distance.detach().view(1),
        "gradient": gradient,
        "pressed": pressed,
    },
    HERE / "fixtures" / "duo.safetensors",
)
print(distance.item(), gradient.tolist())
