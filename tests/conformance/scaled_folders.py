#!/usr/bin/env python3
"""Compare folders that `kvsieve quantize --format nf4`, `fp8` and `w8a8` wrote with what the packages that others read them with make of the source.

    pip install torch==2.15.0 safetensors bitsandbytes==0.50.2 compressed-tensors==0.20.0 transformers
    for format in nf4 fp8 w8a8; do kvsieve quantize --model models/builtin --format $format --output $format; done
    python3 tests/conformance/scaled_folders.py models/builtin nf4 fp8 w8a8

Codes and scales of NF4 must be those of bitsandbytes (of a number between two levels either code), and what it makes of the folder's
bytes the nearest levels; fp8 and bytes must be what compressed-tensors makes of each matrix (of bytes under the same scales, 1/127 of the
largest: it takes 2/255). Says how many of how many differ.
"""

import json
import sys
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file

source, nf4, fp8, w8a8 = (load_file(Path(folder) / "model.safetensors") for folder in sys.argv[1:])
differ, compared, off = 0, 0, 0.0
for name in [name for name in nf4 if name.endswith(".quant_state.bitsandbytes__nf4")]:
    module = name.removesuffix(".weight.quant_state.bitsandbytes__nf4")
    state = json.loads(bytes(nf4[name].tolist()))
    weight = source[f"{module}.weight"].float()
    codes, expected = bnb.quantize_4bit(weight, blocksize=state["blocksize"], quant_type="nf4", quant_storage=torch.uint8)
    assert torch.equal(expected.absmax, nf4[f"{module}.weight.absmax"]), module
    assert torch.equal(expected.code, nf4[f"{module}.weight.quant_map"]), module
    differ += (codes != nf4[f"{module}.weight"]).sum().item()
    compared += codes.numel()
    read = bnb.dequantize_4bit(nf4[f"{module}.weight"], expected)
    off = max(off, ((read - weight).norm() / weight.norm()).item())
print(f"nf4: {differ} of {compared} bytes differ; read by bitsandbytes, off by at most {off:.4f} of a matrix")

for kind, folder, dtype, factor in [("float", fp8, torch.float8_e4m3fn, 1.0), ("int", w8a8, torch.int8, 127.5 / 127)]:
    arguments = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="channel")
    differ, compared, off = 0, 0, 0.0
    for name in [name for name in folder if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        weight = source[f"{module}.weight"].float()
        scale, zero = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), arguments)
        assert torch.allclose(factor * scale, folder[name], rtol=1e-6), module
        codes = quantize(weight, folder[name], zero, arguments, dtype=dtype)
        differ += (codes.view(torch.uint8) != folder[f"{module}.weight"].view(torch.uint8)).sum().item()
        compared += codes.numel()
        read = dequantize(folder[f"{module}.weight"], folder[name], args=arguments)
        off = max(off, ((read.float() - weight).norm() / weight.norm()).item())
    print(f"{kind}: {differ} of {compared} codes differ; read by compressed-tensors, off by at most {off:.4f} of a matrix")
