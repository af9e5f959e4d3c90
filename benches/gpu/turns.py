"""Forms of hopper.cu and other attention kernels, pass by pass in turn, on the same tensors: what a change is worth.

    turns.py build DIR NAME=FILE:KEYS[:causal|full] ...       here: needs NVRTC (KVSIEVE_NVRTC), no GPU
    turns.py run DIR [--rounds 13] [--peers fa3,cudnn] [B,Hq,Hkv,L,causal|full ...]    there: needs PyTorch

`build` compiles forward passes of bf16 at D 128, each from a file of its own, with so many keys in a tile. `run` first holds
each to attention in f64, twice, and then times them all, in another order each round: a slow moment, or a GPU at the limit
of its power, falls on all of them alike. Processes of their own, as in the steps of main.py, differ by some percent there.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
HEAD_DIM, ROWS, CONSUMERS, BLOCK_BYTES = 128, 128, 2, 232_448
SHAPES = [(8, 16, 16, 2048), (2, 16, 16, 8192), (1, 16, 16, 16384), (1, 64, 8, 16384)]
# Cycles that the GPU waits before each pass, for the host to have sent it.
WAIT_CYCLES = 400_000


def build(folder, forms):
    sys.path.insert(0, os.path.join(HERE, "..", "..", "tests", "kernels"))
    import check

    os.makedirs(folder, exist_ok=True)
    listed = []
    for form in forms:
        name, rest = form.split("=")
        file, keys, *masks = rest.split(":")
        macros = {"ELEMENT": "BF16", "HEAD_DIM": HEAD_DIM, "KEYS": keys, "CAPPED": 0, "NEGATIVE": 0}
        ok, log, _, cubin = check.compile_variant(os.environ["KVSIEVE_NVRTC"], os.path.abspath(file), macros, "sm_90a", True)
        if not ok:
            sys.exit(f"turns.py: {file} does not compile:\n{log}")
        ((_, registers, *_, stores, loads),) = check.functions(log)
        print(f"{name}: {registers} registers, {stores + loads} bytes of spills")
        with open(f"{folder}/{name}.cubin", "wb") as out:
            out.write(cubin)
        listed.append({"name": name, "keys": int(keys), "masks": masks or ["causal", "full"]})
    with open(f"{folder}/list.json", "w", encoding="utf-8") as out:
        json.dump(listed, out)


class Problem(ctypes.Structure):
    """As in kernels/problem.cuh."""

    _fields_ = [(name, ctypes.c_uint64) for name in "q k v o lse scores partials".split()]
    _fields_ += [(name, ctypes.c_int) for name in "batch q_heads kv_heads q_len kv_len causal window splits split_keys".split()]
    _fields_ += [("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("unused", ctypes.c_int)]


def call(name, *arguments):
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        raise OSError(f"{name} gave status {status}")


def tensor_map(tensor, box_rows):
    """(what keeps it alive, its address): rows of 64 bf16, the swizzle of 128 bytes, as kernels/src/device/cuda/tensor_map.rs."""
    batch, heads, rows, columns = tensor.shape
    raw = ctypes.create_string_buffer(128 + 64)
    address = (ctypes.addressof(raw) + 63) // 64 * 64
    lengths = (ctypes.c_uint64 * 3)(columns, rows, batch * heads)
    strides = (ctypes.c_uint64 * 2)(columns * 2, rows * columns * 2)
    box, steps = (ctypes.c_uint32 * 3)(64, box_rows, 1), (ctypes.c_uint32 * 3)(1, 1, 1)
    bf16, swizzle_128, l2_256 = 9, 3, 3
    call(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(address), bf16, 3, ctypes.c_void_p(tensor.data_ptr()), lengths, strides, box,
        steps, 0, swizzle_128, l2_256, 0,
    )  # fmt: skip
    return raw, address


class Form:
    """A compiled form of the kernel."""

    def __init__(self, folder, about):
        self.name, self.keys, self.masks = about["name"], about["keys"], about["masks"]
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        with open(f"{folder}/{self.name}.cubin", "rb") as file:
            call("cuModuleLoadData", ctypes.byref(module), file.read())
        call("cuModuleGetFunction", ctypes.byref(self.function), module, b"hopper_forward")
        rows_bytes, tile_bytes = ROWS * HEAD_DIM * 2, self.keys * HEAD_DIM * 2
        stages = min(4, (BLOCK_BYTES - rows_bytes - 1024) // (2 * tile_bytes))
        self.shared_bytes = rows_bytes + 2 * stages * tile_bytes + 16 * CONSUMERS + 8 * (2 * CONSUMERS + 4 * stages)
        most_dynamic_shared = 8
        call("cuFuncSetAttribute", self.function, most_dynamic_shared, self.shared_bytes)

    def over(self, q, k, v, causal):
        """(a pass, its output)."""
        import torch

        (batch, q_heads, q_len, _), (_, kv_heads, kv_len, _) = q.shape, k.shape
        o, lse = torch.full_like(q, float("nan")), torch.empty(batch, q_heads, q_len, device="cuda")
        pointers = [tensor.data_ptr() for tensor in (q, k, v, o, lse)]
        problem = Problem(*pointers, 0, 0, batch, q_heads, kv_heads, q_len, kv_len, causal, 0, 0, 0, HEAD_DIM**-0.5, 0.0, 0)
        maps = [tensor_map(q, ROWS // CONSUMERS), tensor_map(k, self.keys), tensor_map(v, self.keys)]
        arguments = (ctypes.c_void_p * 4)(ctypes.addressof(problem), *(address for _, address in maps))
        blocks = min(batch * q_heads * -(-q_len // ROWS), torch.cuda.get_device_properties(0).multi_processor_count)
        kept = (problem, maps, lse, arguments)

        def run(kept=kept):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            threads = 128 * (1 + CONSUMERS)
            call("cuLaunchKernel", self.function, blocks, 1, 1, threads, 1, 1, self.shared_bytes, stream, arguments, None)

        return run, o


def judge(forms):
    """Forms and masks that are right, and the same in a second pass."""
    import torch

    from peers import repeated

    right = set()
    for form in forms:
        for mask in form.masks:
            q, k, v = (torch.randn(2, h, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for h, n in ((4, 300), (2, 450), (2, 450)))
            run, o = form.over(q, k, v, mask == "causal")
            run()
            first = o.clone()
            run()
            s = q.double() @ repeated(k, q).double().transpose(-1, -2) / HEAD_DIM**0.5
            if mask == "causal":
                s = s.masked_fill(torch.ones(300, 450, device="cuda", dtype=torch.bool).triu(151), float("-inf"))
            true = torch.softmax(s, -1) @ repeated(v, q).double()
            error, same = float((first.double() - true).norm() / true.norm()), torch.equal(first, o)
            print(f"{form.name} {mask}: {error:.1e} off, {'the same' if same else 'DIFFERS'} in a second pass", flush=True)
            if error < 3e-3 and same:
                right.add((form.name, mask))
    return right


def time_shape(shape, forms, peers, rounds):
    """Medians of ms by name, of passes in turn."""
    import torch

    from peers import attention

    batch, q_heads, kv_heads, length, causal = shape
    q, k, v = (torch.randn(batch, h, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for h in (q_heads, kv_heads, kv_heads))
    work = {form.name: form.over(q, k, v, causal)[0] for form in forms}
    for peer in peers:
        tensors = [x.transpose(1, 2).contiguous() for x in (q, k, v)] if peer == "fa3" else [q, k, v]
        work[peer] = lambda run=attention(peer), tensors=tensors: run(*tensors, causal)
    return medians(work, rounds)


def medians(work, rounds):
    """Medians of ms by name, of passes in turn with a cold L2, in another order each round."""
    import torch

    cold = torch.zeros(torch.cuda.get_device_properties(0).L2_cache_size // 2, device="cuda")
    times = {name: [] for name in work}
    with torch.no_grad():
        for at in range(rounds + 2):
            for name, run in random.sample(list(work.items()), len(work)):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                torch.cuda._sleep(WAIT_CYCLES)
                cold.sum()
                start.record()
                run()
                end.record()
                torch.cuda.synchronize()
                if at >= 2:
                    times[name].append(start.elapsed_time(end))
    return {name: statistics.median(samples) for name, samples in times.items()}


def run(folder, rounds, peers, shapes):
    import torch

    torch.zeros(1, device="cuda")  # makes the context
    random.seed(0)
    torch.manual_seed(0)
    with open(f"{folder}/list.json", encoding="utf-8") as file:
        forms = [Form(folder, about) for about in json.load(file)]
    right = judge(forms)
    for shape in shapes:
        batch, q_heads, kv_heads, length, causal = shape
        mask = "causal" if causal else "full"
        medians = time_shape(shape, [form for form in forms if (form.name, mask) in right], peers, rounds)
        pairs = length * (length + 1) / 2 if causal else length**2
        print(f"{q_heads}/{kv_heads} heads, B {batch}, {length} tokens {mask}")
        for name, ms in medians.items():
            beside = "".join(f"  {medians[peer] / ms:.3f} x {peer}" for peer in peers)
            print(f"  {name:16} {ms:8.4f} ms  {batch * q_heads * pairs * 4 * HEAD_DIM / ms / 1e9:4.0f} TFLOP/s{beside}", flush=True)


def shape_of(text):
    *numbers, mask = text.split(",")
    return (*map(int, numbers), mask == "causal")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["build", "run"])
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument("--peers", type=lambda text: text.split(","), default=["fa3", "cudnn"])
    asked = parser.parse_intermixed_args()
    if asked.what == "build":
        build(asked.folder, asked.rest)
    else:
        shapes = [shape_of(text) for text in asked.rest] or [(*shape, causal) for causal in (True, False) for shape in SHAPES]
        run(asked.folder, asked.rounds, asked.peers, shapes)
