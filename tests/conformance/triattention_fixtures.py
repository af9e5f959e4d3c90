#!/usr/bin/env python3
"""Write fixtures/triattention.safetensors: what TriAttention's public code says of the tensors in fixtures/.

    git clone https://github.com/WeianMao/triattention && git -C triattention checkout c3744ee
    pip install torch==2.15.0 transformers==4.57.6 safetensors numpy
    python3 tests/conformance/triattention_fixtures.py --code triattention

The class `TriAttention` scores and selects. It runs in f64: its table of RoPE and its frequencies are replaced by ones of f64, for in
f32 a phase at a distance of 65536 is off by 0.004. What it says as it is, in f32, is printed beside. README.md says what the file
holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent / "fixtures"


def calibrated(script: types.ModuleType, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> dict:
    """Statistics of each head from queries after RoPE `[layers, Hq, L, D]`, as scripts/calibrate.py makes them."""
    pairs = script._to_complex_pairs(script._invert_rope(q, cos, sin, 1.0))
    return {"mean": pairs.mean(dim=2), "norm": pairs.abs().mean(dim=2)}


class Code:
    """The public class, over the layers of one input set."""

    def __init__(self, methods: types.ModuleType, name: str, stats: dict, theta: float, kv_heads: int, single: bool):
        layers, heads, half = stats["mean"].shape
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            config = {
                "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "rope_theta": theta,
                "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 2 * half, "hidden_size": 64,
            }
            (path / "config.json").write_text(json.dumps(config))
            each = [(layer, head) for layer in range(layers) for head in range(heads)]
            of = {
                at: methods.HeadFrequencyStats(stats["mean"][at].to(torch.complex64), stats["norm"][at].float()) for at in each
            }
            from triattention.methods.pruning_utils import save_head_frequency_stats

            save_head_frequency_stats(path / "stats.pt", each, of, {"head_dim": 2 * half, "rope_style": "half"})
            # What scripts/cli.py sets for the published runs; layers alone where `own` says so.
            self.config = methods.TriAttentionConfig(
                stats_path=path / "stats.pt", model_path=path, device=torch.device("cpu"), dtype=torch.float32, budget=0,
                normalize_scores=True, count_prompt_tokens=True, allow_prefill_compression=True, use_slack_trigger=True,
            )
            self.code = methods.TriAttention(self.config)
        if not single:
            self.config.dtype = torch.float64
            omega = theta ** (-torch.arange(half, dtype=torch.float64) / half)
            self.code.omega = omega
            self.code.rotary = lambda base, positions: table(positions, omega)
            for at, head in self.code.head_stats.items():
                head.q_mean_complex, head.q_abs_mean = stats["mean"][at], stats["norm"][at]

    def scores(self, keys: list[torch.Tensor], own: bool) -> torch.Tensor:
        """Scores `[layers, Hkv, n]` by the class's scores of query heads; what it does with these is inside its selection."""
        found = []
        group, positions = self.code.num_key_value_groups, self.code.cache_positions_per_layer_perhead
        for layer, k in enumerate(keys):
            of_heads = None if positions is None else [torch.tensor(positions[layer, head]) for head in range(k.shape[1])]
            shared = torch.tensor(self.code.cache_positions)
            raw = self.code._compute_layer_head_scores(k, shared, layer, positions_per_kv_head=of_heads)
            z = (raw - raw.mean(1, keepdim=True)) / raw.std(1, unbiased=False, keepdim=True).clamp_min(1e-6)
            found.append(z.unflatten(0, (-1, group)).amax(1))
        stacked = torch.stack(found)
        return stacked if own else stacked.mean(0, keepdim=True).expand_as(stacked)

    def kept(self, keys: list[torch.Tensor], budget: int, own: bool) -> torch.Tensor:
        """Slots that its selection keeps, ascending, `[layers, Hkv, budget]`."""
        self.config.budget = self.code.budget = budget
        self.code.per_head_pruning, self.code.per_layer_perhead_pruning = not own, own
        kept = self.code.compute_keep_indices(tuple((k, k) for k in keys)).sort(-1).values
        return kept if own else kept[None].expand(len(keys), -1, -1)


def table(positions: torch.Tensor, omega: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[1, L, D]` in f64."""
    angles = positions[0].double()[:, None] * omega
    both = torch.cat([angles, angles], -1)[None]
    return both.cos(), both.sin()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, required=True, help="checkout of the public code")
    parser.add_argument("--out", type=Path, default=FOLDER / "triattention.safetensors", help="file to write")
    args = parser.parse_args()
    sys.path.insert(0, str(args.code))
    import triattention.methods.triattention as methods

    spec = importlib.util.spec_from_file_location("calibrate", args.code / "scripts/calibrate.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    torch.set_num_threads(1)

    written: dict[str, torch.Tensor] = {}
    # Sequences of an input set are layers. A second round comes after `first` tokens were cut to the budget and the rest came.
    for name, budget, first in [("one", 40, None), ("two", 37, None), ("mqa", 24, None), ("long", 60, 180), ("two", 30, 100)]:
        with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
            theta = float(file.metadata()["rope_theta"])
        inputs = load_file(FOLDER / f"{name}.safetensors")
        q, k = inputs["q"].double(), inputs["k"].double()
        layers, kv_heads, tokens, width = k.shape
        omega = theta ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
        stats = calibrated(script, q, *table(torch.arange(tokens)[None], omega))
        written[f"{name}/centres"] = torch.cat([stats["mean"].real, stats["mean"].imag], -1).float()
        written[f"{name}/norms"] = stats["norm"].float()
        for own in [True, False] if first is None else [True]:
            both = []
            for single in [False, True]:
                made = Code(methods, name, stats, theta, kv_heads, single)
                at = made.code
                key = f"{name}/{'own' if own else 'mean'}"
                keys = [k[layer : layer + 1] for layer in range(layers)]
                if first is not None:
                    key = f"{name}/again"
                    at.cache_positions, at.absolute_position = list(range(first)), first
                    before = made.kept([k[:, :, :first] for k in keys], budget, own)
                    rest = torch.arange(first, tokens).expand(layers, kv_heads, -1)
                    held = torch.cat([before, rest], -1)
                    # The class's own book-keeping, as behind its first compression.
                    at.cache_positions_per_layer_perhead = {
                        (layer, head): held[layer, head].tolist() for layer in range(layers) for head in range(kv_heads)
                    }
                    at.cache_positions = held[0, 0].tolist()
                    gather = held[..., None].expand(-1, -1, -1, width)
                    keys = [k[layer : layer + 1].gather(2, gather[layer : layer + 1]) for layer in range(layers)]
                    if not single:
                        written[f"{key}/held"] = held
                else:
                    at.cache_positions = list(range(tokens))
                at.absolute_position = tokens
                scores, kept = made.scores(keys, own), made.kept(keys, budget, own)
                assert torch.equal(scores.topk(budget, -1).indices.sort(-1).values, kept), (key, "its selection is by these scores")
                if not single:
                    written[f"{key}/scores"], written[f"{key}/kept"] = scores.float().contiguous(), kept.contiguous()
                both.append((scores, kept))
            (double, kept), (f32, other) = both
            print(f"{key}: f32 is off by {(double - f32).abs().max():.1e}, keeps {int((kept != other).sum())} other tokens")
    save_file(written, args.out, {"code": "WeianMao/triattention c3744ee", "torch": torch.__version__})
    print(f"{args.out.stat().st_size / 1e3:.0f} kB in {args.out}")


if __name__ == "__main__":
    main()
