#!/usr/bin/env python3
"""Write `tests/fixtures/gguf_blocks.json`: blocks by the `gguf` package, and what they stand for.

    pip install gguf==0.19.0
    python3 tests/conformance/gguf_blocks.py

For each type that the package can quantise, four blocks of 32 numbers: normal ones, some of one sign, some with an outlier, and
zeros. For the others two super-blocks of 256 elements (or as many of 32) of random bits under random scales, and one of zeros. All
as hexadecimal bytes, f32 with the lowest byte first.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

WRITTEN = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
# Where the f16 scales of a super-block lie.
READ = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,)}


def main() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((4, 32)).astype(np.float32)
    x[1] = np.abs(x[1]) + 3
    x[2, 17] = -40
    x[3] = 0
    row, found = x.reshape(1, -1), {"numbers": x.tobytes().hex()}
    for name in WRITTEN:
        kind = GGMLQuantizationType[name.upper()]
        blocks = quants.quantize(row, kind)
        found[name] = {"blocks": blocks.tobytes().hex(), "values": quants.dequantize(blocks, kind).tobytes().hex()}
    for name, scales in READ.items():
        kind = GGMLQuantizationType[name.upper()]
        elements, size = GGML_QUANT_SIZES[kind]
        blocks = draw.integers(0, 256, (2 * 256 // elements + 1, size), dtype=np.uint8)
        blocks[-1] = 0
        for at in scales:
            halves = draw.standard_normal(len(blocks) - 1).astype(np.float16)
            blocks[:-1, at : at + 2] = halves.reshape(-1, 1).view(np.uint8)
        values = quants.dequantize(blocks.reshape(1, -1), kind)
        found[name] = {"blocks": blocks.tobytes().hex(), "values": values.tobytes().hex()}
    Path("tests/fixtures/gguf_blocks.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
