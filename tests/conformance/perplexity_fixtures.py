#!/usr/bin/env python3
"""Write `tests/fixtures/perplexity.json`: perplexities of this repository's licence by transformers.

    scripts/fetch-smollm2
    pip install torch transformers==5.2.0 gguf==0.19.0
    python3 tests/conformance/perplexity_fixtures.py

`wikitext`: windows of 2048 tokens that do not overlap, all of whose tokens but the first are predicted. `llama-perplexity`:
windows of 512, whose first token is replaced by the one that begins a text, if the model has one; the last 255 are predicted.

transformers 5.2 reads SmolLM2's GGUF as Code Llama's tokenizer, which leaves digits together and begins texts with a token; the
pre-tokenizer is therefore put right, as the file names it (`smollm`) and the model's own tokenizer.json has it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

BUILTIN = {"pretrained_model_name_or_path": "models/builtin"}
SMOLLM2 = {"pretrained_model_name_or_path": "models/smollm2", "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}


@torch.no_grad()
def perplexity(model: torch.nn.Module, tokens: torch.Tensor, size: int, first: int, bos: int | None) -> dict[str, object]:
    means = []
    for window in tokens.unfold(0, size, size):
        window = window.clone()
        if bos is not None:
            window[0] = bos
        log_p = model(window[None]).logits[0].double().log_softmax(-1)
        nats = -log_p[:-1].gather(-1, window[1:, None])[first - 1 :, 0]
        means.append(nats.mean())
    nll = torch.stack(means).mean().item()
    error = torch.stack(means).std().item() / math.sqrt(len(means)) if len(means) > 1 else None
    return {"windows": len(means), "perplexity": math.exp(nll), "standard_error": error and error * math.exp(nll)}


def main() -> None:
    text, found = Path("LICENSE").read_text(), []
    for name, source in [("models/builtin", BUILTIN), ("/".join(SMOLLM2.values()), SMOLLM2)]:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
        if source is SMOLLM2:
            digits, level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
        begins = None if source is SMOLLM2 else tokenizer("a").input_ids[0]
        bos = begins if begins == tokenizer.bos_token_id else None
        tokens = torch.tensor(tokenizer(text, add_special_tokens=bos is not None).input_ids)
        for protocol, size, first, bos in [("wikitext", 2048, 1, None), ("llama-perplexity", 512, 257, bos)]:
            numbers = perplexity(model, tokens, size, first, bos)
            found.append({"model": name, "protocol": protocol, "tokens": len(tokens), **numbers})
    Path("tests/fixtures/perplexity.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
