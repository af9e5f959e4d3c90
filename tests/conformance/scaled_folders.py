#!/usr/bin/env python3
"""Compare folders of numbers under scales that `kvsieve quantize` wrote with what the packages that others read them with make of the source.

    pip install torch==2.15.0 safetensors bitsandbytes==0.50.2 compressed-tensors==0.20.0 transformers
    for format in nf4 nf4:nested=true fp8 fp8:block=128 w8a8; do
        kvsieve quantize --model models/builtin --format $format --output ${format%%=*}
    done
    python3 tests/conformance/scaled_folders.py models/builtin nf4 nf4:nested fp8 fp8:block w8a8

Codes and scales of NF4 must be those of bitsandbytes (of a number between two levels either code), and what it makes of the folder's
bytes the nearest levels; nested scales must be what bitsandbytes' own nested state reads of the folder, and as near the plain ones as those
that it makes; fp8 and bytes must be what compressed-tensors makes of each matrix (of bytes under the same scales, 1/127 of the
largest: it takes 2/255), and fp8 by blocks the nearest floats under 1/448 of each block's largest number. Says how many of how many differ.
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

source, nf4, nested, fp8, fp8_blocks, w8a8 = (load_file(Path(folder) / "model.safetensors") for folder in sys.argv[1:])
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

differ, compared, off = 0, 0, 0.0
END = ".weight.quant_state.bitsandbytes__nf4"
for module in [name.removesuffix(END) for name in nested if name.endswith(END)]:
    parts = {name.removeprefix(f"{module}.weight."): part for name, part in nested.items() if name.startswith(f"{module}.weight.")}
    state = bnb.QuantState.from_dict(parts, device=torch.device("cpu"))
    weight = source[f"{module}.weight"].float()
    _, plain = bnb.quantize_4bit(weight, blocksize=state.blocksize, quant_type="nf4")
    _, own = bnb.quantize_4bit(weight, blocksize=state.blocksize, quant_type="nf4", compress_statistics=True)
    scales, theirs = (bnb.dequantize_blockwise(one.absmax, one.state2) + one.offset for one in (state, own))
    assert (scales - plain.absmax).norm() <= 1.001 * (theirs - plain.absmax).norm(), module
    assert torch.allclose(state.state2.code, own.state2.code, rtol=1e-6), module
    differ += (own.absmax != state.absmax).sum().item()
    compared += own.absmax.numel()
    read = bnb.dequantize_4bit(nested[f"{module}.weight"], state)
    off = max(off, ((read.float() - weight).norm() / weight.norm()).item())
print(f"nested: {differ} of {compared} codes of scales differ; read by bitsandbytes, off by at most {off:.4f} of a matrix")

differ, compared, off = 0, 0, 0.0
for module in [name.removesuffix(".weight_scale_inv") for name in fp8_blocks if name.endswith(".weight_scale_inv")]:
    weight, scale = source[f"{module}.weight"].float(), fp8_blocks[f"{module}.weight_scale_inv"]
    rows, columns = weight.shape
    assert scale.shape == (-(-rows // 128), -(-columns // 128)), module
    padded = torch.zeros(scale.shape[0] * 128, scale.shape[1] * 128)
    padded[:rows, :columns] = weight
    most = padded.view(scale.shape[0], 128, scale.shape[1], 128).abs().amax((1, 3))
    assert torch.allclose(most / 448, scale, rtol=1e-6), module
    each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    codes = (weight / each).to(torch.float8_e4m3fn)
    differ += (codes.view(torch.uint8) != fp8_blocks[f"{module}.weight"].view(torch.uint8)).sum().item()
    compared += codes.numel()
    off = max(off, ((fp8_blocks[f"{module}.weight"].float() * each - weight).norm() / weight.norm()).item())
print(f"fp8 by blocks: {differ} of {compared} codes differ, off by at most {off:.4f} of a matrix")

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
