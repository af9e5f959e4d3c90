#!/usr/bin/env python3
"""Write the conformance fixture of GPTQ: what the authors' code makes of some matrices and inputs.

    git clone https://github.com/IST-DASLab/gptq      # commit 2d65066
    pip install torch==2.15.0 safetensors transformers
    python3 tests/conformance/gptq_fixtures.py gptq

writes tests/fixtures/gptq.safetensors: of each case NAME.weight [1, 1, rows, width], NAME.inputs [1, 1, tokens, width] and NAME.expected,
what the codes stand for, and in the metadata the recipe of each. Two things are set: blocks are as wide as groups, because the code takes a
group's scale from weights that its own block has not changed yet; and scales are rounded to f16 before codes are chosen by them, as
they are once they are packed.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

OUTPUT = Path(__file__).parent.parent / "fixtures" / "gptq.safetensors"
# Name, rows, width, bits, group, symmetric, order by size.
CASES = [
    ("symmetric", 24, 128, 4, 32, True, False),
    ("zero", 24, 128, 4, 64, False, False),
    ("act", 16, 96, 4, 32, True, True),
    ("act-zero", 16, 96, 4, 32, False, True),
    ("wide", 8, 192, 4, 192, False, False),
    ("eight", 8, 64, 8, 32, True, False),
]


def inputs(generator: torch.Generator, tokens: int, width: int) -> Tensor:
    """Inputs that go together, of different sizes, one of which is always 0."""
    mixed = torch.randn(tokens, width, generator=generator) @ torch.randn(width, width, generator=generator) / width**0.5
    sizes = torch.randn(width, generator=generator).exp()
    sizes[5] = 0
    return mixed * sizes


def coded(gptq, quant, weight: Tensor, rows: Tensor, bits: int, group: int, symmetric: bool, by_size: bool) -> Tensor:
    """What the codes stand for."""

    class Rounded(quant.Quantizer):
        def find_params(self, x: Tensor, weight: bool = False) -> None:
            super().find_params(x, weight)
            self.scale = self.scale.half().float()
            if not self.sym:
                least = torch.minimum(x.flatten(1).min(1)[0], torch.zeros(len(x)))
                self.zero = torch.round(-least.unsqueeze(1) / self.scale)

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    solver = gptq.GPTQ(layer)
    solver.quantizer = Rounded()
    solver.quantizer.configure(bits, perchannel=True, sym=symmetric)
    solver.add_batch(rows, None)
    with contextlib.redirect_stdout(io.StringIO()):
        solver.fasterquant(blocksize=group, percdamp=0.01, groupsize=group, actorder=by_size)
    return layer.weight.data


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    import gptq
    import quant

    torch.cuda.synchronize = lambda: None
    tensors, metadata = {}, {}
    for seed, (name, rows, width, bits, group, symmetric, by_size) in enumerate(CASES):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(rows, width, generator=generator) / 8
        read = inputs(generator, 160, width)
        tensors[f"{name}.weight"], tensors[f"{name}.inputs"] = weight, read
        tensors[f"{name}.expected"] = coded(gptq, quant, weight, read, bits, group, symmetric, by_size)
        order = "act" if by_size else "inputs"
        metadata[name] = f"gptq:bits={bits},group={group},order={order},symmetric={str(symmetric).lower()}"
    save_file({name: tensor[None, None].contiguous() for name, tensor in tensors.items()}, OUTPUT, metadata)
    print(json.dumps(metadata, indent=1))


if __name__ == "__main__":
    main()
