#!/usr/bin/env python3
"""Compare folders that `kvsieve quantize --format nf4` and `fp8` wrote with what the packages that others read them with make of the source.

    pip install torch==2.15.0 safetensors bitsandbytes==0.50.2 compressed-tensors==0.20.0 transformers
    kvsieve quantize --model models/builtin --format nf4 --output nf4 && kvsieve quantize --model models/builtin --format fp8 --output fp8
    python3 tests/conformance/scaled_folders.py models/builtin nf4 fp8

Codes and scales of NF4 must be those of bitsandbytes (of a number between two levels either code), and what it makes of the folder's
bytes the nearest levels; fp8 must be what compressed-tensors makes of each matrix. Says how many of how many differ.
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

source, nf4, fp8 = (load_file(Path(folder) / "model.safetensors") for folder in sys.argv[1:])
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

arguments = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
differ, compared, off = 0, 0, 0.0
for name in [name for name in fp8 if name.endswith(".weight_scale")]:
    module = name.removesuffix(".weight_scale")
    weight = source[f"{module}.weight"].float()
    scale, zero = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), arguments)
    assert torch.allclose(scale, fp8[name], rtol=1e-6), module
    codes = quantize(weight, fp8[name], zero, arguments, dtype=torch.float8_e4m3fn)
    differ += (codes.view(torch.uint8) != fp8[f"{module}.weight"].view(torch.uint8)).sum().item()
    compared += codes.numel()
    read = dequantize(fp8[f"{module}.weight"], fp8[name], args=arguments)
    off = max(off, ((read.float() - weight).norm() / weight.norm()).item())
print(f"fp8: {differ} of {compared} codes differ; read by compressed-tensors, off by at most {off:.4f} of a matrix")
