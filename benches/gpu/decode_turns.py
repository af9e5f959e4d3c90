"""Forms of decode.cu, pass by pass in turn, on the same tensors: what a change is worth, as turns.py says it of hopper.cu.

    decode_turns.py build DIR NAME=FILE:FORMAT:WARPS:STAGES:ROWS ...    here: needs NVRTC (KVSIEVE_NVRTC), no GPU
    decode_turns.py run DIR [--rounds 20] [B,Hq,Hkv,L ...]              there: needs PyTorch

FORMAT is bf16, int8, fp8-e4m3 or int4. `build` compiles each form for bf16 queries of D 128 over one piece, not pages, from
a file of its own, whose rings must lie as this tree's. `run` first holds each to attention in f64 over what its codes stand for, then times them all, with a cold
L2 and in another order each round; ratios are beside the first.
"""

import argparse
import ctypes
import json
import os
import random
import sys

from timing import CODE_BYTES
from turns import HEAD_DIM, HERE, Problem, call, medians

MACROS = {
    "bf16": {}, "int8": {"K_FORMAT": 1, "V_FORMAT": 1}, "fp8-e4m3": {"K_FORMAT": 2, "V_FORMAT": 2},
    "int4": {"K_FORMAT": 4, "K_GROUP": 32, "K_ZERO": 0, "V_FORMAT": 4, "V_GROUP": 32, "V_ZERO": 0},
}  # fmt: skip
SHAPES = [(2, 32, 8, 65536), (32, 32, 8, 4096), (1, 32, 8, 16384)]
KEYS, MERGE_THREADS = 16, 256


def row_bytes(codes):
    return CODE_BYTES.get(codes, lambda d: 2 * d)(HEAD_DIM)


def build(folder, forms):
    sys.path.insert(0, os.path.join(HERE, "..", "..", "tests", "kernels"))
    import check

    os.makedirs(folder, exist_ok=True)
    listed = []
    for form in forms:
        name, rest = form.split("=")
        file, codes, *numbers = rest.split(":")
        warps, stages, rows = map(int, numbers)
        check.KERNELS = os.path.dirname(os.path.abspath(file))
        macros = {"ELEMENT": "BF16", "HEAD_DIM": HEAD_DIM, "PAGE_TOKENS": 0, "WARPS": warps, "STAGES": stages, "ROWS": rows}
        ok, log, _, cubin = check.compile_variant(
            os.environ["KVSIEVE_NVRTC"], os.path.abspath(file), macros | MACROS[codes], "sm_90a", True
        )
        if not ok:
            sys.exit(f"decode_turns.py: {file} does not compile:\n{log}")
        (_, registers, *_, stores, loads) = next(function for function in check.functions(log) if function[0] == "decode_partial")
        print(f"{name}: {registers} registers, {stores + loads} bytes of spills")
        with open(f"{folder}/{name}.cubin", "wb") as out:
            out.write(cubin)
        listed.append({"name": name, "codes": codes, "warps": warps, "stages": stages, "rows": rows})
    with open(f"{folder}/list.json", "w", encoding="utf-8") as out:
        json.dump(listed, out)


def up(x, to):
    return -(-x // to) * to


def splits(seen, lists, slots, step):
    """(splits, keys of each), as kernels/src/attention/cuda/decode.rs cuts them."""
    cuts = []
    for waves in range(1, 5):
        wanted = min(waves * up(lists, slots) // lists, max(1, up(seen, 256) // 256))
        keys = up(-(-seen // max(1, wanted)), step)
        count = -(-seen // keys)
        cuts.append((up(count * lists, slots) // slots * (keys + 128), count, keys))
    return min(cuts, key=lambda cut: cut[0])[1:]


class Form:
    """A compiled form of the kernel."""

    def __init__(self, folder, about):
        self.name, self.codes, self.warps, self.rows = about["name"], about["codes"], about["warps"], about["rows"]
        stage_bytes = 2 * up(KEYS * row_bytes(self.codes), 128)
        ring_bytes = up(max(about["stages"] * stage_bytes, 4 * self.rows * (HEAD_DIM + 2)), 128)
        self.shared_bytes = 2 * self.rows * HEAD_DIM + self.warps * ring_bytes
        module, self.partial, self.merge, blocks = (*(ctypes.c_void_p() for _ in range(3)), ctypes.c_int())
        with open(f"{folder}/{self.name}.cubin", "rb") as file:
            call("cuModuleLoadData", ctypes.byref(module), file.read())
        call("cuModuleGetFunction", ctypes.byref(self.partial), module, b"decode_partial")
        call("cuModuleGetFunction", ctypes.byref(self.merge), module, b"decode_merge")
        most_dynamic_shared = 8
        call("cuFuncSetAttribute", self.partial, most_dynamic_shared, self.shared_bytes)
        bytes_ = ctypes.c_size_t(self.shared_bytes)
        call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), self.partial, 32 * self.warps, bytes_)
        self.blocks = blocks.value

    def over(self, q, k, v, length):
        """(a pass, its output)."""
        import torch

        (batch, q_heads, _, _), lists = q.shape, k.shape[0]
        kv_heads, slots = lists // batch, self.blocks * torch.cuda.get_device_properties(0).multi_processor_count
        count, keys = splits(length, lists, slots, KEYS * self.warps)
        o, lse = torch.empty_like(q), torch.empty(batch, q_heads, 1, device="cuda")
        partials = torch.empty(count * batch * q_heads * (HEAD_DIM + 2), device="cuda")
        pointers = [tensor.data_ptr() for tensor in (q, k, v, o, lse)]
        problem = Problem(
            *pointers, 0, partials.data_ptr(), batch, q_heads, kv_heads, 1, length, 1, 0, count, keys, HEAD_DIM**-0.5, 0.0, 0
        )
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(problem))
        tiles = -(-q_heads // kv_heads // self.rows)
        kept = (problem, arguments, partials, q, k, v, lse)

        def run(kept=kept):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            part = (count, tiles, lists, 32 * self.warps, 1, 1, self.shared_bytes)
            call("cuLaunchKernel", self.partial, *part, stream, arguments, None)
            call("cuLaunchKernel", self.merge, batch * q_heads, 1, 1, MERGE_THREADS, 1, 1, 0, stream, arguments, None)

        return run, o


def encoded(codes, lists, length):
    """Rows of normal numbers [lists, L, bytes], and what they stand for [lists, L, D]."""
    import torch

    x = torch.randn(lists, length, HEAD_DIM, device="cuda").bfloat16()
    if codes == "bf16":
        return x, x.float()
    if codes == "fp8-e4m3":
        code = x.to(torch.float8_e4m3fn)
        return code.view(torch.uint8), code.float()
    if codes == "int8":
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        code = (x / scale).round()
        return torch.cat([scale.view(torch.uint8), code.to(torch.int8).view(torch.uint8)], -1), code * scale
    groups = x.float().view(lists, length, -1, 32)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).half()
    code = (groups / scale.float()).round().clamp(-7, 7)
    nibbles = (code + 8).to(torch.uint8)
    packed = torch.cat([nibbles[..., :16] | nibbles[..., 16:] << 4, scale.view(torch.uint8)], -1)
    return packed.reshape(lists, length, -1), (code * scale.float()).reshape(lists, length, -1)


def problem(forms, batch, q_heads, kv_heads, length):
    """Queries, and keys and values in each format of the forms with what they stand for."""
    import torch

    q = torch.randn(batch, q_heads, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    formats = sorted({form.codes for form in forms})
    return q, {codes: [encoded(codes, batch * kv_heads, length) for _ in range(2)] for codes in formats}


def error(form):
    """Relative distance to attention in f64."""
    import torch

    batch, q_heads, kv_heads, length = 2, 8, 2, 5000
    q, kv = problem([form], batch, q_heads, kv_heads, length)
    (k, keys), (v, values) = kv[form.codes]
    run, o = form.over(q, k, v, length)
    run()
    keys, values = (
        x.view(batch, kv_heads, length, HEAD_DIM).double().repeat_interleave(q_heads // kv_heads, 1) for x in (keys, values)
    )
    true = torch.softmax(q.double() @ keys.transpose(-1, -2) / HEAD_DIM**0.5, -1) @ values
    return float((o.double() - true).norm() / true.norm())


def time_shape(shape, forms, rounds):
    """Medians of microseconds by name, of passes in turn."""
    q, kv = problem(forms, *shape)
    work = {form.name: form.over(q, *(codes for codes, _ in kv[form.codes]), shape[3])[0] for form in forms}
    return {name: 1e3 * ms for name, ms in medians(work, rounds).items()}


def run(folder, rounds, shapes):
    import torch

    torch.zeros(1, device="cuda")  # makes the context
    random.seed(0)
    torch.manual_seed(0)
    with open(f"{folder}/list.json", encoding="utf-8") as file:
        forms = [Form(folder, about) for about in json.load(file)]
    for form in forms:
        print(f"{form.name}: {error(form):.1e} off, {form.blocks} blocks of a multiprocessor", flush=True)
    for shape in shapes:
        batch, q_heads, kv_heads, length = shape
        print(f"{q_heads}/{kv_heads} heads, B {batch}, {length} tokens")
        times = time_shape(shape, forms, rounds)
        first = times[forms[0].name]
        for form in forms:
            us, read_bytes = times[form.name], 2 * batch * kv_heads * length * row_bytes(form.codes)
            print(f"  {form.name:16} {us:8.2f} us  {read_bytes / us / 1e6:5.2f} TB/s  {first / us:.3f} x {forms[0].name}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["build", "run"])
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_intermixed_args()
    if asked.what == "build":
        build(asked.folder, asked.rest)
    else:
        run(asked.folder, asked.rounds, [tuple(map(int, text.split(","))) for text in asked.rest] or SHAPES)
