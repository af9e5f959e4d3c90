#!/usr/bin/env python3
"""Write the conformance fixtures: what public implementations say of seeded tensors.

    pip install kvpress==0.5.5
    python3 tests/conformance/kvpress_fixtures.py            # writes into fixtures/ beside this file

For each input set it writes NAME.safetensors (q, k, v after RoPE, q_pre, k_pre, w_o; metadata rope_theta) and
NAME.expected.safetensors, and one cases.json. README.md says what they mean.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from pathlib import Path

import torch
from cases import Case, all_cases
from safetensors.torch import save_file


def describe(case: Case) -> dict[str, object]:
    """The case's entry in cases.json: tensors are named, not held."""
    entry: dict[str, object] = {
        "name": case.name,
        "policy": case.policy,
        "budget": str(case.budget),
        "input": f"{case.inputs.name}.safetensors",
        "expected": f"{case.inputs.name}.expected.safetensors",
        "scores": None if case.scores is None else f"{case.name}/scores",
        "kept": None if case.kept is None else f"{case.name}/kept",
        "outputs": {name: f"{case.name}/{name}" for name in case.outputs},
        "protected": {"sink": case.sink, "window": case.window},
        "tolerance": case.tolerance,
        "source": case.source if "formula" in case.source else f"kvpress {VERSION} {case.source}",
        "notes": case.notes,
    }
    return entry


def expected(case: Case) -> dict[str, torch.Tensor]:
    """The case's tensors."""
    tensors = {f"{case.name}/{name}": tensor for name, tensor in case.outputs.items()}
    if case.scores is not None:
        assert case.scores.isfinite().all(), case.name
        tensors[f"{case.name}/scores"] = case.scores
    if case.kept is not None:
        tensors[f"{case.name}/kept"] = case.kept.to(torch.uint8)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


VERSION = importlib.metadata.version("kvpress")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "fixtures", help="folder to write")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    # One thread adds in one order.
    torch.set_num_threads(1)
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    for inputs in {case.inputs.name: case.inputs for case in cases}.values():
        save_file(inputs.tensors(), folder / f"{inputs.name}.safetensors", inputs.metadata())
        tensors = [expected(case) for case in cases if case.inputs is inputs]
        merged = {name: tensor for part in tensors for name, tensor in part.items()}
        save_file(merged, folder / f"{inputs.name}.expected.safetensors")
    versions = {name: importlib.metadata.version(name) for name in ("kvpress", "torch", "transformers")}
    document = {"versions": versions, "cases": [describe(case) for case in cases]}
    (folder / "cases.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(cases)} cases, {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.2f} MB in {folder}")


if __name__ == "__main__":
    main()
