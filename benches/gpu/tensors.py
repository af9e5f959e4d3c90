"""Safetensors files of random bf16 tensors, with the standard library alone."""

import array
import json
import random
import struct


def normal(count, generator=None):
    """Normally distributed numbers in bf16, drawn from a table: there may be many."""
    generator = generator or random.Random(0)
    # The upper half of an f32 is a bf16.
    table = [struct.unpack("<I", struct.pack("<f", generator.gauss(0, 1)))[0] >> 16 for _ in range(4096)]
    return array.array("H", generator.choices(table, k=count))


def write(path, shape, seed=0):
    """q, k, v and do, normally distributed; `shape` is (B, Hq, Hkv, Lq, Lk, D)."""
    batch, q_heads, kv_heads, q_len, kv_len, head_dim = shape
    generator = random.Random(seed)
    header, data, at = {}, [], 0
    q_dims, kv_dims = [batch, q_heads, q_len, head_dim], [batch, kv_heads, kv_len, head_dim]
    for name, dims in (("q", q_dims), ("k", kv_dims), ("v", kv_dims), ("do", q_dims)):
        count = dims[0] * dims[1] * dims[2] * dims[3]
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [at, at + 2 * count]}
        data.append(normal(count, generator))
        at += 2 * count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for part in data:
            part.tofile(file)


def arrays(path):
    """The numbers of a file by name."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    return {
        name: numbers(about["dtype"], data[slice(*about["data_offsets"])])
        for name, about in header.items()
        if name != "__metadata__"
    }


def numbers(dtype, data):
    if dtype == "F16":
        return array.array("f", struct.unpack(f"<{len(data) // 2}e", data))
    if dtype == "BF16":
        data = array.array("I", (half << 16 for half in array.array("H", data))).tobytes()
    found = array.array({"F32": "f", "BF16": "f", "I64": "q"}[dtype])
    found.frombytes(data)
    return found


def read(path, torch):
    """The tensors of a file as PyTorch's."""
    types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = bytearray(file.read())
    tensors = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        start, end = about["data_offsets"]
        flat = torch.frombuffer(data[start:end], dtype=types[about["dtype"]])
        tensors[name] = flat.reshape(about["shape"])
    return tensors
