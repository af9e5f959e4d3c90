#!/usr/bin/env python3
"""Write `tests/fixtures/kivi.json`: keys and values in two and four bits as KIVI's code makes them.

    python3 tests/conformance/kivi.py

Written from jy-yuan/KIVI (commit 150def81), `quant/new_pack.py`: `triton_quantize_and_pack_along_last_dim`, which `models/llama_kivi.py`
gives keys transposed (groups of 32 tokens for each channel) and values as they are (groups of 32 channels for each token). Its order of
operations, each rounded to f16 as torch does: scale = (max - min) / (2^bits - 1), x - min, / scale, clamp, round half to even. Packing
is left out: codes are a byte each. Numbers are drawn until rounding between the operations has no say in the codes and scales, because
kvsieve rounds scale and minimum to f16 and nothing else. All as hexadecimal bytes, f16 with the lowest byte first.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

GROUP, TOKENS, WIDTH = 32, 64, 32


def quantise(group: np.ndarray, bits: int, dtype: type) -> tuple[np.ndarray, np.float16, np.float16]:
    """Codes, scale and minimum of a group of f16 numbers, computed in `dtype`; the scale is rounded to f16 before it divides."""
    steps = dtype(2**bits - 1)
    x = group.astype(dtype)
    least, most = x.min(), x.max()
    scale = np.float16(dtype(dtype(most - least) / steps))
    codes = np.rint(np.clip((x - least).astype(dtype) / dtype(scale), 0, steps))
    return codes.astype(np.uint8), scale, np.float16(least)


def agree(group: np.ndarray) -> bool:
    for bits in (2, 4):
        (codes, scale, _), (wide, wide_scale, _) = quantise(group, bits, np.float16), quantise(group, bits, np.float32)
        if scale != wide_scale or (codes != wide).any():
            return False
    return True


def groups(draw: np.random.Generator, mean: np.ndarray) -> np.ndarray:
    """A group for each of the means, `[means, GROUP]`."""
    rows = []
    for shift in mean:
        while not agree(row := (draw.standard_normal(GROUP) * 2 + shift).astype(np.float16)):
            pass
        rows.append(row)
    return np.array(rows)


def main() -> None:
    draw = np.random.default_rng(0)
    # Some channels of keys are large in every token.
    channels = np.where(np.arange(WIDTH) % 7 == 3, 40.0, 0.0)
    keys = np.concatenate([groups(draw, channels).T for _ in range(TOKENS // GROUP)])
    values = np.concatenate([groups(draw, np.zeros(TOKENS)) for _ in range(WIDTH // GROUP)], axis=1)
    found = {"group": GROUP, "tokens": TOKENS, "width": WIDTH, "keys": keys.tobytes().hex(), "values": values.tobytes().hex()}
    for bits in (2, 4):
        # [groups, D] of keys, [tokens, groups] of values.
        of_keys = [[quantise(keys[at : at + GROUP, d], bits, np.float16) for d in range(WIDTH)] for at in range(0, TOKENS, GROUP)]
        of_values = [[quantise(row[at : at + GROUP], bits, np.float16) for at in range(0, WIDTH, GROUP)] for row in values]
        codes = np.concatenate([np.array([codes for codes, *_ in group]).T for group in of_keys])
        found[str(bits)] = {
            "key_codes": np.ascontiguousarray(codes).tobytes().hex(),
            "value_codes": np.concatenate([np.concatenate([codes for codes, *_ in row]) for row in of_values]).tobytes().hex(),
            **{
                f"{what}_{name}": np.array([[one[at] for one in group] for group in quantised], np.float16).tobytes().hex()
                for what, quantised in (("key", of_keys), ("value", of_values))
                for name, at in (("scales", 1), ("minimums", 2))
            },
        }
    path = Path(__file__).parent.parent / "fixtures" / "kivi.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
