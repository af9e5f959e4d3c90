#!/usr/bin/env python3
"""Write `tests/fixtures/gguf_blocks.json`: blocks by the `gguf` package, and what they stand for.

    pip install gguf==0.19.0
    python3 tests/conformance/gguf_blocks.py

For each type four blocks of 32 numbers: normal ones, some of one sign, some with an outlier, and zeros; all as hexadecimal
bytes, f32 with the lowest byte first.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants

TYPES = {name: GGMLQuantizationType[name.upper()] for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")}


def main() -> None:
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    x[1] = np.abs(x[1]) + 3
    x[2, 17] = -40
    x[3] = 0
    row, found = x.reshape(1, -1), {"numbers": x.tobytes().hex()}
    for name, kind in TYPES.items():
        blocks = quants.quantize(row, kind)
        found[name] = {"blocks": blocks.tobytes().hex(), "values": quants.dequantize(blocks, kind).tobytes().hex()}
    Path("tests/fixtures/gguf_blocks.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
