#!/usr/bin/env python3
"""Write `tests/fixtures/larimar.json`: Larimar's public memory, run on drawn vectors.

    git clone https://github.com/IBM/larimar
    pip install torch numpy
    python3 tests/conformance/larimar_fixtures.py larimar/larimar_base/modules/memory.py

What the class `GPM` of that file gives, in f32 on a CPU: mean and covariance after an episode was written, read weights and
read-out, with every deviate that it drew. The code cannot take a fact out; `forget` is the paper's recursion, in f64 with
explicit inverses: `C <- C - wᵀ w / σ²`, `M <- M - C⁻¹ wᵀ (z - w M) / σ²`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import torch

CASES = [
    # name, slots, width, facts, cues, noise, direct writing, identity prior, steps
    ("one episode", 12, 20, 8, 5, 0.05, True, True, 15),
    ("few steps", 12, 20, 8, 5, 0.0, True, True, 3),
    ("random prior", 10, 24, 6, 4, 0.05, True, False, 15),
    ("more facts than slots", 6, 16, 20, 5, 0.1, True, True, 15),
    ("one after another", 12, 20, 8, 5, 0.1, False, True, 15),
    ("one after another, random prior", 8, 12, 20, 4, 0.3, False, False, 20),
]


def rounded(values: torch.Tensor | np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in np.asarray(values, dtype=np.float64).reshape(-1)]


def memory(gpm: type, slots: int, width: int, noise: float, direct: bool, identity: bool, steps: int):
    return gpm(code_size=width, memory_size=slots, direct_writing=direct, ordering=False, pseudoinverse_approx_step=steps,
               observation_noise_std=noise, identity=identity, deterministic=True)


@torch.no_grad()
def case(gpm: type, drawn: list[float], name: str, slots: int, width: int, count: int, asked: int, noise: float, direct: bool,
         identity: bool, steps: int) -> dict[str, object]:
    module = memory(gpm, slots, width, noise, direct, identity, steps)
    facts = torch.randn(count, width)
    cues = facts[:asked] + 0.3 * torch.randn(asked, width)
    drawn.clear()
    state, _ = module.write_to_memory(facts[:, None])
    read, weights, _, _ = module.read_with_encoded_input(cues[:, None], state, get_w=True, deterministic=True)
    return {
        "name": name, "slots": slots, "width": width, "noise": noise, "episode": direct, "steps": steps,
        "prior": rounded(module.memory_mean), "facts": rounded(facts), "cues": rounded(cues), "deviates": rounded(drawn),
        "mean": rounded(state[0]), "covariance": None if direct else rounded(state[1]),
        "weights": rounded(weights), "read": rounded(read),
    }


@torch.no_grad()
def capacity(gpm: type, slots: int = 16, width: int = 32, most: int = 48, values: int = 24) -> dict[str, object]:
    """Subjects that are asked for alone: which value of the table the read-out is nearest to, as more and more are written."""
    subjects, table = torch.randn(most, width) / 2**0.5, torch.randn(values, width) / 2**0.5
    choice = torch.arange(most) % values
    points = []
    for direct in (True, False):
        for count in (4, 8, 16, 24, 48):
            module = memory(gpm, slots, width, 0.0 if direct else 0.1, direct, True, 15)
            facts = (subjects + table[choice])[:count, None]
            state, _ = module.write_to_memory(facts)
            module._observation_noise_std = 0.0
            read = module.read_with_encoded_input(subjects[:count, None], state, get_w=True, deterministic=True)[0][:, 0]
            likeness = torch.nn.functional.cosine_similarity(read[:, None], table[None], dim=-1)
            best = likeness.max(-1)
            points.append({"episode": direct, "count": count, "recall": float((best.indices == choice[:count]).float().mean()),
                           "likeness": rounded(best.values)})
    return {"slots": slots, "width": width, "values": values, "noise": 0.1, "subjects": rounded(subjects),
            "table": rounded(table), "points": points}


def forget(slots: int = 8, width: int = 12, count: int = 10, noise: float = 0.2) -> dict[str, object]:
    rng = np.random.default_rng(3)
    facts, mean, precision = rng.normal(size=(count, width)), np.eye(slots, width), np.eye(slots) / (1 + 1e-6)
    addresses = facts @ np.linalg.pinv(mean)

    def update(index: int, sign: float) -> None:
        nonlocal mean, precision
        w = addresses[index : index + 1]
        precision = precision + sign * w.T @ w / noise**2
        mean = mean + sign * np.linalg.inv(precision) @ w.T @ (facts[index : index + 1] - w @ mean) / noise**2

    for index in range(count):
        update(index, 1.0)
    for index in (1, 6):
        update(index, -1.0)
    return {"slots": slots, "width": width, "noise": noise, "facts": rounded(facts), "forgotten": [1, 6],
            "mean": rounded(mean), "covariance": rounded(np.linalg.inv(precision))}


def main(path: str) -> None:
    spec = importlib.util.spec_from_file_location("larimar_memory", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The code asks for a GPU here and there.
    torch.Tensor.cuda = lambda self, *_: self
    drawn: list[float] = []
    deviates = torch.randn_like

    def randn_like(values: torch.Tensor) -> torch.Tensor:
        found = deviates(values)
        drawn.extend(found.reshape(-1).tolist())
        return found

    torch.randn_like = randn_like
    torch.manual_seed(0)
    cases = [case(module.GPM, drawn, *values) for values in CASES]
    found = {"torch": torch.__version__, "cases": cases, "capacity": capacity(module.GPM), "forget": forget()}
    Path("tests/fixtures/larimar.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
