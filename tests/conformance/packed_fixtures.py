#!/usr/bin/env python3
"""Write `tests/fixtures/packed.safetensors`: matrices as other programs pack them, and what they stand for there.

    pip install torch transformers safetensors bitsandbytes==0.50.2 compressed-tensors==0.20.0
    pip download --no-deps auto-gptq==0.7.1 autoawq==0.2.9    # unpacked side by side; they need no installation
    python3 tests/conformance/packed_fixtures.py FOLDER_OF_AUTO_GPTQ FOLDER_OF_AUTOAWQ

Every case `NAME` has the tensors of a linear layer as a folder holds them (`NAME.qweight`, ...), `NAME.values` F32
`[outputs, inputs]`, and in the metadata its `quantization_config`. Who packs and who unpacks:

- `gptq-*`: AutoGPTQ's `QuantLinear` packs (`qlinear_cuda.py`), and unpacks as it multiplies the identity by its weights, with f16
  scales held as f32 so that nothing is rounded. `gptq-v2` has the same zero points stored as they are, by one line here.
- `awq-*`: AutoAWQ's `dequantize_gemm` unpacks (`awq/utils/packing_utils.py`, scales likewise); its packing, which needs a GPU's
  program, is written out here in the order of its `AWQ_ORDER`.
- `nf4-*`, `int8`: bitsandbytes on the CPU, in f32.
- `fp8-*`: transformers' `_dequantize_fp8_weight` in f32; `fp8-row`, `fp8-one`: compressed-tensors' `dequantize`.

Only the class and functions that are named are loaded from AutoGPTQ and AutoAWQ, by their files.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import bitsandbytes as bnb
import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

tensors: dict[str, torch.Tensor] = {}
configs: dict[str, dict] = {}


def loaded(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def put(name: str, config: dict, parts: dict[str, torch.Tensor], values: torch.Tensor) -> None:
    configs[name] = config
    for end, tensor in {**parts, "values": values.to(torch.float32)}.items():
        tensors[f"{name}.{end}"] = tensor.contiguous().clone()


def drawn(groups: int, outputs: int, bits: int, draw: torch.Generator):
    """Scales that f16 holds, and zero points from 1 on: AutoGPTQ's first format has no room for 0."""
    scales = (torch.rand(groups, outputs, generator=draw) * 0.05 + 0.001).half().float()
    zeros = torch.randint(1, 2**bits, (groups, outputs), generator=draw)
    return scales, zeros


def gptq(linear, name: str, bits: int, group: int, ordered: bool, draw: torch.Generator, v2: bool = False) -> None:
    # AutoGPTQ packs 32 outputs at a time.
    inputs, outputs = 96 if group == -1 else 256 if (bits, group) == (4, 128) else 128, 32
    size = inputs if group == -1 else group
    scales, zeros = drawn(inputs // size, outputs, bits, draw)
    codes = torch.randint(0, 2**bits, (inputs, outputs), generator=draw)
    g_idx = torch.arange(inputs) // size
    if ordered:
        g_idx = g_idx[torch.randperm(inputs, generator=draw)]
    dense = torch.nn.Linear(inputs, outputs, bias=False)
    dense.weight.data = (scales[g_idx] * (codes - zeros[g_idx])).t().contiguous()
    layer = linear(bits, group, inputs, outputs, False, weight_dtype=torch.float32)
    layer.pack(dense, scales.t(), zeros.t().float(), g_idx.int())
    values = layer(torch.eye(inputs)).t()
    assert torch.equal(values, dense.weight.data), name
    qzeros = layer.qzeros
    if v2:
        qzeros = qzeros + int("0x" + ("1" * 8 if bits == 4 else "01" * 4), 16)
    config = dict(quant_method="gptq", bits=bits, group_size=group, desc_act=ordered)
    config["checkpoint_format"] = "gptq_v2" if v2 else "gptq"
    parts = dict(qweight=layer.qweight, qzeros=qzeros, scales=layer.scales.half(), g_idx=layer.g_idx.int())
    put(name, config, parts, values)


def awq(packing, name: str, group: int, draw: torch.Generator) -> None:
    inputs, outputs = 256, 16
    size = inputs if group == -1 else group
    scales, zeros = drawn(inputs // size, outputs, 4, draw)
    zeros[0, 3] = 0
    codes = torch.randint(0, 16, (inputs, outputs), generator=draw)

    def packed(codes: torch.Tensor) -> torch.Tensor:
        words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
        for at, output in enumerate(packing.AWQ_ORDER):
            words |= codes[:, output::8].numpy().astype(np.uint32) << np.uint32(4 * at)
        return torch.from_numpy(words.view(np.int32))

    qweight, qzeros = packed(codes), packed(zeros)
    values = packing.dequantize_gemm(qweight, qzeros, scales, 4, size)
    config = dict(quant_method="awq", bits=4, group_size=group, version="gemm", zero_point=True)
    put(name, config, dict(qweight=qweight, qzeros=qzeros, scales=scales.half()), values.t())


def nf4(name: str, blocksize: int, nested: bool, draw: torch.Generator) -> None:
    weight = torch.randn(8, 256, generator=draw) * 0.05
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=blocksize, quant_type="nf4", compress_statistics=nested, quant_storage=torch.uint8
    )
    values = bnb.functional.dequantize_4bit(packed, state)
    config = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    parts = {"weight": packed, **{f"weight.{end}": part for end, part in state.as_dict(packed=True).items()}}
    put(name, config, parts, values)


def int8(draw: torch.Generator) -> None:
    weight = torch.randn(16, 96, generator=draw) * 0.05
    codes, most, _ = bnb.functional.int8_vectorwise_quant(weight.half())
    values = bnb.functional.int8_vectorwise_dequant(codes, most)
    config = dict(quant_method="bitsandbytes", load_in_8bit=True)
    parts = {"weight": codes, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    put("int8", config, parts, values)


def fp8(name: str, shape: tuple[int, int], block: list[int], draw: torch.Generator) -> None:
    codes = (torch.randn(shape, generator=draw) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    extents = [-(-extent // of) for extent, of in zip(shape, block)]
    scales = torch.rand(extents, generator=draw) * 0.01 + 1e-5
    values = _dequantize_fp8_weight(codes, scales, block, torch.float32)
    config = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=block)
    put(name, config, {"weight": codes, "weight_scale_inv": scales}, values)


def compressed(name: str, strategy: str, draw: torch.Generator) -> None:
    codes = (torch.randn(16, 96, generator=draw) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand((16, 1) if strategy == "channel" else (1,), generator=draw) * 0.01 + 1e-5
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True)
    values = dequantize(codes, scales, args=args, dtype=torch.float32)
    weights = dict(num_bits=8, type="float", strategy=strategy, symmetric=True, dynamic=False)
    groups = {"group_0": dict(targets=["Linear"], weights=weights)}
    config = dict(quant_method="compressed-tensors", format="float-quantized", config_groups=groups)
    put(name, config, {"weight": codes, "weight_scale": scales}, values)


def main(auto_gptq: Path, autoawq: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    linear = loaded(auto_gptq / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py").QuantLinear
    packing = loaded(autoawq / "awq/utils/packing_utils.py")
    gptq(linear, "gptq-4-128", 4, 128, False, draw)
    gptq(linear, "gptq-4-32-ordered", 4, 32, True, draw)
    gptq(linear, "gptq-4-row", 4, -1, False, draw)
    gptq(linear, "gptq-8-64-ordered", 8, 64, True, draw)
    gptq(linear, "gptq-4-64-v2", 4, 64, False, draw, v2=True)
    gptq(linear, "gptq-8-128-v2", 8, 128, False, draw, v2=True)
    awq(packing, "awq-128", 128, draw)
    awq(packing, "awq-64", 64, draw)
    nf4("nf4-64", 64, False, draw)
    nf4("nf4-64-nested", 64, True, draw)
    nf4("nf4-128", 128, False, draw)
    int8(draw)
    fp8("fp8-blocks", (20, 160), [8, 64], draw)
    fp8("fp8-128", (130, 64), [128, 128], draw)
    compressed("fp8-row", "channel", draw)
    compressed("fp8-one", "tensor", draw)
    metadata = {name: json.dumps(config) for name, config in configs.items()}
    path = Path("tests/fixtures/packed.safetensors")
    save_file(tensors, path, metadata)
    path.chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
