#!/usr/bin/env python3
"""Write the conformance fixture of Attention Matching: what the authors' code fits to the queries of the fixtures.

    git clone https://github.com/adamzweiger/compaction      # commit 2e59cc8
    pip install torch==2.15.0 safetensors
    python3 tests/conformance/matching_fixtures.py compaction

writes fixtures/matching.json and fixtures/matching.expected.safetensors beside this file. The inputs are those of
kvpress_fixtures.py. Weights and values come from `_nnls_pg`, in f64 and with as many steps as it takes to end, and
`_compute_C2`; the choice of keys from `_select_keys_highest_attention`, which is shown the causal mask of the asking queries as a
bias. All query heads of a group ask together, as in the authors' per_layer_head.py.
"""

from __future__ import annotations

import json
import sys
from math import exp
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FIXTURES = Path(__file__).parent / "fixtures"
STEPS = 20_000
# Input, tokens that stay, largest bias, and whether values are fitted: where keys are weighted out (a bias of -4), those of the
# authors' code, which has no ridge, grow without bound.
FITS = [("one", 10, 3.0, True), ("two", 8, 2.6, True), ("mqa", 7, 2.6, True), ("one", 14, 4.0, False), ("two", 8, 3.0, False)]
CHOICES = [("one", 40, 64), ("two", 30, 16), ("mqa", 20, 96)]


def per_list(q: Tensor, k: Tensor, v: Tensor):
    """Queries of all heads that read a list, `[G * n, D]`, its keys and its values."""
    group = q.shape[1] // k.shape[1]
    for batch in range(k.shape[0]):
        for head in range(k.shape[1]):
            queries = q[batch, head * group : (head + 1) * group].reshape(-1, q.shape[3])
            yield queries, k[batch, head], v[batch, head]


def fitted(algorithm, q: Tensor, k: Tensor, v: Tensor, count: int, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """What stays by the smallest keys, with its biases and values."""
    stays, biases, values = [], [], []
    for queries, keys, own in per_list(q.double(), k.double(), v.double()):
        indices = keys.norm(dim=1).topk(count, largest=False).indices.sort().values
        scores = queries @ keys.T / keys.shape[1] ** 0.5
        weights = (scores - scores.max(dim=1, keepdim=True).values).exp()
        found = algorithm._nnls_pg(weights[:, indices], weights.sum(dim=1), STEPS, exp(-bound), exp(bound))
        bias = found.log()
        values.append(algorithm._compute_C2(keys[indices], bias, keys, own, queries))
        biases.append(bias)
        stays.append(torch.zeros(len(keys), dtype=torch.uint8).index_fill(0, indices, 1))
    shape = k.shape[:2]
    joined = [torch.stack(rows).unflatten(0, shape) for rows in (stays, biases, values)]
    return joined[0], joined[1].float(), joined[2].float()


def chosen(algorithm, q: Tensor, k: Tensor, v: Tensor, count: int, window: int) -> Tensor:
    """What stays by the root mean square of the last queries' attention."""
    length, stays = k.shape[2], []
    asking = torch.arange(length - window, length)
    mask = torch.zeros(window, length).masked_fill(torch.arange(length) > asking[:, None], float("-inf"))
    for queries, keys, _ in per_list(q[:, :, -window:], k, v):
        _, _, indices = algorithm._select_keys_highest_attention(keys, queries, count, mask.repeat(len(queries) // window, 1))
        stays.append(torch.zeros(length, dtype=torch.uint8).index_fill(0, torch.tensor(indices), 1))
    return torch.stack(stays).unflatten(0, k.shape[:2])


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    from compaction.algorithms.highest_attention_keys import HighestAttentionKeysCompaction

    torch.manual_seed(0)  # power iteration begins with a drawn vector
    torch.set_num_threads(1)
    algorithm = HighestAttentionKeysCompaction(score_method="rms", beta_method="nnls")
    no_beta = HighestAttentionKeysCompaction(score_method="rms", beta_method="zero")
    tensors, cases = {}, []

    def case(name: str, policy: str, budget: int, source: str, expected: dict[str, Tensor], tolerance: float) -> None:
        stem, kept = name.partition("/")[0], expected.pop("kept")
        tensors.update({f"{name}/{key}": value.contiguous() for key, value in expected.items()} | {f"{name}/kept": kept})
        cases.append(
            {
                "name": name, "policy": policy, "budget": str(budget), "input": f"{stem}.safetensors",
                "expected": "matching.expected.safetensors", "scores": None, "kept": f"{name}/kept",
                "outputs": {key: f"{name}/{key}" for key in expected}, "protected": {"sink": 0, "window": 0},
                "tolerance": tolerance, "source": source, "notes": "",
            }
        )

    for stem, count, bound, has_values in FITS:
        q, k, v = (load_file(FIXTURES / f"{stem}.safetensors")[name] for name in "qkv")
        kept, biases, values = fitted(algorithm, q, k, v, count, bound)
        fit, source = ("both", "_nnls_pg, _compute_C2") if has_values else ("bias", "_nnls_pg")
        policy = f"knorm+match:queries={q.shape[2]},fit={fit},bound={bound:g},ridge=1e-9"
        expected = {"kept": kept, "biases": biases} | ({"values": values} if has_values else {})
        case(f"{stem}/match/{count}-{bound:g}", policy, count, source, expected, 1e-4)
    for stem, count, window in CHOICES:
        q, k, v = (load_file(FIXTURES / f"{stem}.safetensors")[name] for name in "qkv")
        kept = chosen(no_beta, q, k, v, count, window)
        policy = f"rms-attention:window={window}"
        case(f"{stem}/rms-attention/{window}", policy, count, "_select_keys_highest_attention", {"kept": kept}, 1e-4)

    save_file(tensors, FIXTURES / "matching.expected.safetensors")
    versions = {"compaction": "2e59cc8", "torch": torch.__version__.partition("+")[0]}
    (FIXTURES / "matching.json").write_text(json.dumps({"versions": versions, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
