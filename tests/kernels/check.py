#!/usr/bin/env python3
"""Compiles every variant of every kernel with NVRTC and prints what ptxas says of it. Needs no GPU.

    pip install nvidia-cuda-nvrtc==13.0.88
    python3 tests/kernels/check.py [--arch sm_90a ...] [--nvrtc libnvrtc.so.13] [--markdown FILE] [--jobs N]

One row for each kernel function: registers, shared memory that is known at compile time, stack, spills. Exit status 0
when all is well; 1 when a variant does not compile, spills registers, uses local memory, or draws a warning.
"""

import argparse
import ctypes
import functools
import glob
import itertools
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor

KERNELS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "kernels")
ARCHITECTURES = ["sm_80", "sm_90a", "sm_100"]
ONLY = {"hopper.cu": "sm_90a", "hopper_backward.cu": "sm_90a"}  # files with instructions that other architectures lack


def variants():
    """(file, macros) of every variant that the crate may ask for, at the head dims that matter."""
    for element, head_dim, library in itertools.product(["F32", "BF16", "F16"], [64, 256], [0, 1]):
        yield "naive.cu", {"ELEMENT": element, "HEAD_DIM": head_dim, "LIBRARY_PRODUCTS": library}
    # Tiles of keys by head dim, as kernels/src/attention/cuda/tiled.rs chooses them. F16 differs from BF16 in single instructions.
    tiles = [(37, 64), (64, 64), (96, 64), (100, 64), (100, 32), (127, 64), (128, 64), (128, 32), (143, 32), (144, 32)]
    tiles += [(150, 64), (160, 64), (190, 64), (192, 64), (250, 64), (256, 64), (256, 32)]
    for element, (head_dim, keys) in [*itertools.product(["BF16"], tiles), ("F16", (128, 64)), ("F16", (144, 32))]:
        yield "tiled.cu", tiled(element, head_dim, keys)
    for head_dim, keys in [(64, 32), (100, 32), (128, 32), (128, 16), (192, 32), (192, 16), (224, 32), (256, 16), (256, 8)]:
        yield "tiled.cu", tiled("F32", head_dim, keys)
    # Warps and stages as kernels/src/attention/cuda/decode.rs chooses them where a block may have 100 to 227 KiB.
    rings = [(64, 8, 4), (96, 8, 2), (100, 8, 2), (128, 8, 2), (128, 4, 2), (192, 4, 3), (192, 2, 3), (256, 4, 2), (256, 2, 2)]
    for page_tokens, (head_dim, warps, stages) in itertools.product([0, 16, 10], rings):
        yield "decode.cu", decode("BF16", head_dim, page_tokens, warps, stages, 16 if head_dim <= 192 else 8)
    for head_dim, warps, stages in [(64, 8, 4), (128, 8, 2), (250, 4, 2), (256, 4, 2)]:
        yield "decode.cu", decode("BF16", head_dim, 16, warps, stages, 8)
    yield "decode.cu", decode("F16", 128, 16, 8, 2, 16)
    for rows, (head_dim, warps, stages) in itertools.product([4, 16], [(64, 4, 4), (128, 4, 3), (250, 2, 2), (256, 2, 3)]):
        yield "decode.cu", decode("F32", head_dim, 16 if rows == 16 else 0, warps, stages, rows)
    yield "sweep.cu", {"ELEMENT": "F32", "HEAD_DIM": 8}
    # Tiles of keys by head dim and soft-cap, as kernels/src/attention/cuda/hopper.rs chooses them; the sign is one number in them.
    tiles = [(64, 128, 0), (64, 112, 1), (128, 176, 0), (128, 128, 0), (128, 128, 1), (256, 80, 0), (256, 64, 1)]
    signs = itertools.product(["BF16"], tiles, [0])
    for element, (head_dim, keys, capped), negative in [*signs, ("BF16", tiles[3], 1), ("F16", tiles[3], 0)]:
        macros = {"ELEMENT": element, "HEAD_DIM": head_dim, "KEYS": keys, "CAPPED": capped, "NEGATIVE": negative}
        yield "hopper.cu", macros
    tiles = [(64, 0), (96, 0), (96, 1), (128, 0), (128, 1), (192, 0), (256, 0)]
    for element, (head_dim, small), fixed in [*itertools.product(["BF16"], tiles, [0, 1]), ("F16", (128, 0), 0)]:
        yield "backward.cu", {"ELEMENT": element, "HEAD_DIM": head_dim, "DETERMINISTIC": fixed, "SMALL": small}
    for element, head_dim, capped in [*itertools.product(["BF16"], [64, 128], [0, 1]), ("F16", 128, 0)]:
        yield "hopper_backward.cu", {"ELEMENT": element, "HEAD_DIM": head_dim, "CAPPED": capped}
    for element, head_dim, tile in [("F32", 64, 32), ("F32", 128, 32), ("F32", 256, 16), ("BF16", 100, 32), ("BF16", 256, 32)]:
        yield "backward_scalar.cu", {"ELEMENT": element, "HEAD_DIM": head_dim, "TILE": tile}
    for element, head_dim in itertools.product(["F32", "BF16"], [64, 256]):
        yield "naive_backward.cu", {"ELEMENT": element, "HEAD_DIM": head_dim}
    for element, head_dims in [("BF16", [64, 96, 100, 128, 192, 256]), ("F16", [128])]:
        for head_dim, queries in itertools.product(head_dims, [0, 1, 2]):
            yield "export.cu", {"ELEMENT": element, "HEAD_DIM": head_dim, "QUERIES": queries}
    for head_dim, queries in itertools.product([64, 256], [0, 1, 2]):
        yield "export_plain.cu", {"ELEMENT": "F32", "HEAD_DIM": head_dim, "QUERIES": queries}
    yield "select.cu", {"ELEMENT": "F32", "HEAD_DIM": 1}
    for element, head_dim in itertools.product(["F32", "BF16", "F16"], [64, 256]):
        yield "score.cu", {"ELEMENT": element, "HEAD_DIM": head_dim}
        yield "compact.cu", {"ELEMENT": element, "HEAD_DIM": head_dim}
    # Keys and values in codes: INT8 is 1, E4M3 2, E5M2 3, INT4 4 with a group and perhaps a zero point.
    int8, fp8 = {"K_FORMAT": 1, "V_FORMAT": 1}, {"K_FORMAT": 2, "V_FORMAT": 3}
    int4 = {"K_FORMAT": 4, "K_GROUP": 64, "K_ZERO": 0, "V_FORMAT": 4, "V_GROUP": 32, "V_ZERO": 1}
    for codes in [int8, fp8, int4]:
        for head_dim, rows in [*itertools.product([64, 128, 192], [8, 16]), (256, 8)]:
            warps = 16 if head_dim == 64 or codes == int4 and head_dim * rows == 1024 else 8
            stages = 2 if head_dim > 128 and codes != int4 else 4
            yield "decode.cu", decode("BF16", head_dim, 16, warps, stages, rows) | codes
        yield "decode.cu", decode("BF16", 128, 0, 8, 4, 8) | codes
        yield "decode.cu", decode("F16", 128, 16, 8, 2, 8) | codes
        if codes != int4:
            yield "decode.cu", decode("BF16", 96, 16, 8, 4, 16) | codes
        for head_dim in [128, 256]:
            yield "decode.cu", decode("F32", head_dim, 16, 4, 2, 16) | codes
        for element, head_dim, keys in [("BF16", 64, 64), ("BF16", 128, 64), ("BF16", 192, 64), ("F32", 128, 32), ("F32", 256, 16)]:
            yield "tiled.cu", tiled(element, head_dim, keys) | codes
        yield "export.cu", {"ELEMENT": "BF16", "HEAD_DIM": 128, "QUERIES": 0} | codes
        yield "export_plain.cu", {"ELEMENT": "F32", "HEAD_DIM": 128, "QUERIES": 0} | codes
        for file in ["score.cu", "compact.cu"]:
            yield file, {"ELEMENT": "BF16", "HEAD_DIM": 256} | codes
    for element in ["F32", "BF16", "F16"]:
        yield "model.cu", {"ELEMENT": element, "HEAD_DIM": 1}


def tiled(element, head_dim, keys):
    """Macros of a variant of tiled.cu."""
    half = element != "F32"
    kept = half and (head_dim <= 64 or 144 < head_dim <= 192)
    shape = {"ROWS": 128 if half and head_dim <= 144 else 64, "KEYS": keys, "Q_KEPT": int(kept)}
    return {"ELEMENT": element, "HEAD_DIM": head_dim, **shape}


def decode(element, head_dim, page_tokens, warps, stages, rows):
    """Macros of a variant of decode.cu."""
    shape = {"PAGE_TOKENS": page_tokens, "WARPS": warps, "STAGES": stages, "ROWS": rows}
    return {"ELEMENT": element, "HEAD_DIM": head_dim, **shape}


@functools.cache
def load_nvrtc(path):
    """The library named, else the wheel's beside this interpreter, or the system's."""
    found = [path] if path else []
    if not path:
        for folder in sys.path:
            found += sorted(glob.glob(os.path.join(folder, "nvidia", "*", "lib", "libnvrtc.so.*")))
        found = [name for name in found if ".alt." not in name] + ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    for name in found:
        # The builtins must be loaded first where no search path leads to them.
        for builtins in glob.glob(os.path.join(os.path.dirname(name), "libnvrtc-builtins.so*")):
            if ".alt." not in builtins:
                ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    if path:
        sys.exit(f"'{path}' cannot be loaded; --nvrtc takes a libnvrtc.so.N")
    sys.exit("NVRTC not found: pip install nvidia-cuda-nvrtc==13.0.88, or give --nvrtc PATH")


def compile_variant(library, file, macros, architecture, machine_code=False):
    """(whether it compiled, the compiler's log, seconds, the machine code where it is asked for)"""
    nvrtc = load_nvrtc(library)
    with open(os.path.join(KERNELS, file), encoding="utf-8") as source:
        text = source.read().encode()
    options = [f"--gpu-architecture={architecture}", "-std=c++17", "--ptxas-options=-v", f"--include-path={KERNELS}"]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, file.encode(), 0, None, None):
        raise RuntimeError("nvrtcCreateProgram failed")
    started = time.perf_counter()
    encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    seconds = time.perf_counter() - started
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    nvrtc.nvrtcGetProgramLog(program, log)
    cubin = b""
    if machine_code and status == 0:
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, buffer)
        cubin = buffer.raw
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status == 0, log.value.decode(errors="replace"), seconds, cubin


def functions(log):
    """(name, registers, shared, stack, spill stores, spill loads) of every kernel function of a ptxas log."""
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.split("'")[0]

        def number(pattern, default=None):
            found = re.search(pattern, part)
            if not found and default is None:
                sys.exit(f"ptxas no longer says '{pattern}' of {name}: this script must follow")
            return int(found.group(1)) if found else default

        yield (
            name,
            number(r"Used (\d+) registers"),
            number(r"(\d+) bytes smem", 0),
            number(r"(\d+) bytes stack frame"),
            number(r"(\d+) bytes spill stores"),
            number(r"(\d+) bytes spill loads"),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", help="an architecture; may be given again [default: all]")
    parser.add_argument("--only", metavar="FILE", help="only this file, as tiled.cu")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th variant [default: 1]")
    parser.add_argument("--turn", type=int, default=0, metavar="K", help="which of these: N turns, one after the other, have all [default: 0]")
    parser.add_argument("--nvrtc", metavar="PATH", help="libnvrtc.so.N")
    parser.add_argument("--markdown", metavar="FILE", help="write the table there too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="variants at a time [default: every core]")
    arguments = parser.parse_args()
    if arguments.every < 1:
        parser.error(f"--every is {arguments.every}; it must be at least 1")
    nvrtc = load_nvrtc(arguments.nvrtc)
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    rows, wrong, slowest = [], [], (0.0, "")
    todo = []
    for number, arch in enumerate(arguments.arch or ARCHITECTURES):
        # Each architecture begins with another variant, so that together they have more of them.
        first = (number + arguments.turn) % arguments.every
        todo += [(file, macros, arch) for file, macros in list(variants())[first :: arguments.every]]
    todo = [variant for variant in todo if ONLY.get(variant[0], variant[2]) == variant[2] and arguments.only in (None, variant[0])]
    if not todo:
        parser.error(f"no variant of '{arguments.only}' for these architectures; files are named as tiled.cu")
    with ProcessPoolExecutor(max(1, arguments.jobs)) as pool:  # NVRTC holds a lock: threads would wait for each other
        compiled_all = list(pool.map(compile_variant, itertools.repeat(arguments.nvrtc), *zip(*todo)))
    for (file, macros, architecture), (compiled, log, seconds, _) in zip(todo, compiled_all):
        label = f"{file} {' '.join(f'{name}={value}' for name, value in macros.items())} {architecture}"
        slowest = max(slowest, (seconds, label))
        if not compiled:
            wrong.append(f"{label}: does not compile\n{log.strip()}")
            continue
        wrong += [f"{label}: {line.strip()}" for line in log.splitlines() if re.search(r"warning|C75\d\d", line)]
        for name, registers, shared, stack, stores, loads in functions(log):
            rows.append((architecture, name, " ".join(f"{m}={v}" for m, v in macros.items()), registers, shared, stack, stores, loads))
            if stack or stores or loads:
                wrong.append(f"{label}: {name} has {stack} bytes of stack, {stores} + {loads} bytes of spills")
    header = "| arch | kernel | variant | registers | static shared | stack | spill stores | spill loads |\n|" + "---|" * 8
    table = "\n".join([header] + ["| " + " | ".join(map(str, row)) + " |" for row in rows])
    print(table)
    if arguments.markdown:
        with open(arguments.markdown, "w", encoding="utf-8") as file:
            file.write(table + "\n")
    print(f"\nNVRTC {major.value}.{minor.value}: {len(rows)} functions; slowest variant {slowest[0]:.2f} s ({slowest[1]})")
    for line in wrong:
        print("WRONG", line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
