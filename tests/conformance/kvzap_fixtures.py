#!/usr/bin/env python3
"""Write tests/fixtures/kvzap-linear and kvzap-mlp: random surrogates as kvpress saves and loads them, and what its class gives.

    git clone https://github.com/NVIDIA/kvpress && git -C kvpress checkout 8bb29b9
    pip install torch==2.15.0 transformers==4.57.3 datasets accelerate safetensors cachetools fire tabulate pandas scikit-learn
    PYTHONPATH=kvpress python3 tests/conformance/kvzap_fixtures.py

Each folder is what `KVzapModel.save_pretrained` writes, for a model of 3 layers, 2 KV heads and hidden states of 32 elements, and
`expected.safetensors`: `hidden` F32 [T, layers, hidden] and `scores` F32 [T, layers, Hkv].
"""

from pathlib import Path

import torch
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel
from safetensors.torch import save_file

# `save_pretrained` makes a configuration without arguments, to see which differ; this one has no defaults.
made = KVzapConfig.__init__
KVzapConfig.__init__ = lambda self, **given: made(self, **{"input_dim": 0, "output_dim": 0, "n_modules": 0, **given})

for name, inner in [("kvzap-linear", None), ("kvzap-mlp", 24)]:
    torch.manual_seed(11)
    to = Path(__file__).parents[1] / "fixtures" / name
    surrogate = KVzapModel(KVzapConfig(input_dim=32, output_dim=2, n_modules=3, hidden_dim=inner)).float()
    with torch.no_grad():
        for parameter in surrogate.parameters():
            parameter.copy_(torch.randn_like(parameter))
        hidden = torch.randn(20, 3, 32)
        surrogate.save_pretrained(to)
        save_file({"hidden": hidden, "scores": surrogate(hidden).contiguous()}, to / "expected.safetensors")
