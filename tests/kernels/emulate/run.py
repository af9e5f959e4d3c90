#!/usr/bin/env python3
"""Builds the kernels for the CPU with sanitizers and runs them against attention in f64. Needs g++ 12 on x86-64.

    python3 tests/kernels/emulate/run.py [--cxx g++] [--only tiled] [--jobs N]

One line for each variant; exit status 1 when one is wrong. See machine.hpp for what this can find and what it cannot.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))
KERNELS = os.path.join(HERE, "..", "..", "..", "kernels")
# Families whose gradients are compared, by gradients.cpp.
BACKWARD = ["backward", "backward_scalar", "hopper_backward", "naive_backward"]
VARIANTS = [
    ("naive", "F32", 64, "LIBRARY_PRODUCTS=0"), ("naive", "BF16", 40, "LIBRARY_PRODUCTS=0"),
    ("naive", "F32", 64, "LIBRARY_PRODUCTS=1"), ("naive", "F16", 128, "LIBRARY_PRODUCTS=1"),
    ("tiled", "BF16", 64, "ROWS=128 KEYS=64 Q_KEPT=1"),
    ("tiled", "F16", 40, "ROWS=128 KEYS=64 Q_KEPT=1"),
    ("tiled", "BF16", 37, "ROWS=128 KEYS=64 Q_KEPT=1"),
    ("tiled", "BF16", 128, "ROWS=128 KEYS=64 Q_KEPT=0"),
    ("tiled", "F16", 128, "ROWS=128 KEYS=32 Q_KEPT=0"),
    ("tiled", "BF16", 96, "ROWS=128 KEYS=64 Q_KEPT=0"),
    ("tiled", "F16", 100, "ROWS=128 KEYS=64 Q_KEPT=0"),
    ("tiled", "BF16", 144, "ROWS=128 KEYS=32 Q_KEPT=0"),
    ("tiled", "F16", 192, "ROWS=64 KEYS=64 Q_KEPT=1"),
    ("tiled", "F16", 256, "ROWS=64 KEYS=64 Q_KEPT=0"),
    ("tiled", "BF16", 256, "ROWS=64 KEYS=32 Q_KEPT=0"),
    ("tiled", "F32", 64, "ROWS=64 KEYS=32 Q_KEPT=0"),
    ("tiled", "F32", 128, "ROWS=64 KEYS=16 Q_KEPT=0"),
    ("tiled", "F32", 256, "ROWS=64 KEYS=8 Q_KEPT=0"),
    ("tiled", "F32", 35, "ROWS=64 KEYS=32 Q_KEPT=0"),
    ("decode", "BF16", 64, "PAGE_TOKENS=0 WARPS=8 STAGES=4 ROWS=16"),
    ("decode", "BF16", 128, "PAGE_TOKENS=0 WARPS=8 STAGES=2 ROWS=8"),
    ("decode", "F16", 72, "PAGE_TOKENS=0 WARPS=4 STAGES=2 ROWS=8"),
    ("decode", "F16", 256, "PAGE_TOKENS=0 WARPS=4 STAGES=2 ROWS=8"),
    ("decode", "BF16", 33, "PAGE_TOKENS=0 WARPS=4 STAGES=4 ROWS=16"),
    ("decode", "F32", 64, "PAGE_TOKENS=0 WARPS=4 STAGES=4 ROWS=4"),
    ("decode", "F32", 200, "PAGE_TOKENS=0 WARPS=2 STAGES=2 ROWS=8"),
    ("decode", "BF16", 64, "PAGE_TOKENS=16 WARPS=4 STAGES=4 ROWS=8"),
    ("decode", "F16", 128, "PAGE_TOKENS=10 WARPS=4 STAGES=3 ROWS=16"),
    ("decode", "F32", 128, "PAGE_TOKENS=16 WARPS=4 STAGES=2 ROWS=16"),
    ("decode", "F32", 35, "PAGE_TOKENS=3 WARPS=4 STAGES=3 ROWS=8"),
    ("tiled", "BF16", 64, "ROWS=128 KEYS=64 Q_KEPT=1 K_FORMAT=INT8 V_FORMAT=INT8"),
    ("tiled", "F16", 128, "ROWS=128 KEYS=32 Q_KEPT=0 K_FORMAT=INT4 V_FORMAT=INT4 K_GROUP=64 K_ZERO=0 V_GROUP=32 V_ZERO=1"),
    ("tiled", "BF16", 100, "ROWS=128 KEYS=64 Q_KEPT=0 K_FORMAT=E4M3"),
    ("tiled", "F32", 35, "ROWS=64 KEYS=32 Q_KEPT=0 V_FORMAT=INT8"),
    ("tiled", "F32", 2, "ROWS=64 KEYS=32 Q_KEPT=0 K_FORMAT=INT8"),
    ("decode", "BF16", 128, "PAGE_TOKENS=16 WARPS=4 STAGES=4 ROWS=8 K_FORMAT=INT8 V_FORMAT=INT8"),
    ("decode", "F16", 64, "PAGE_TOKENS=16 WARPS=4 STAGES=4 ROWS=16 K_FORMAT=INT8 V_FORMAT=INT8"),
    ("decode", "BF16", 64, "PAGE_TOKENS=32 WARPS=4 STAGES=4 ROWS=16 K_FORMAT=INT4 V_FORMAT=INT4 K_GROUP=32 K_ZERO=0 V_GROUP=64 V_ZERO=1"),
    ("decode", "BF16", 128, "PAGE_TOKENS=16 WARPS=16 STAGES=4 ROWS=8 K_FORMAT=INT4 V_FORMAT=INT4 K_GROUP=32 K_ZERO=1 V_GROUP=32 V_ZERO=0"),
    ("decode", "BF16", 256, "PAGE_TOKENS=16 WARPS=8 STAGES=4 ROWS=8 K_FORMAT=INT4 V_FORMAT=INT4 K_GROUP=128 K_ZERO=0 V_GROUP=256 V_ZERO=0"),
    ("decode", "BF16", 128, "PAGE_TOKENS=0 WARPS=8 STAGES=4 ROWS=16 K_FORMAT=E4M3 V_FORMAT=E4M3"),
    ("decode", "F16", 192, "PAGE_TOKENS=16 WARPS=4 STAGES=2 ROWS=8 K_FORMAT=E5M2 V_FORMAT=E5M2"),
    ("decode", "BF16", 64, "PAGE_TOKENS=16 WARPS=4 STAGES=4 ROWS=8 K_FORMAT=E5M2 V_FORMAT=E4M3"),
    ("decode", "BF16", 256, "PAGE_TOKENS=16 WARPS=4 STAGES=2 ROWS=8 K_FORMAT=E4M3"),
    ("decode", "F16", 128, "PAGE_TOKENS=16 WARPS=4 STAGES=4 ROWS=8 V_FORMAT=INT8"),
    ("decode", "F16", 96, "PAGE_TOKENS=16 WARPS=4 STAGES=3 ROWS=16 K_FORMAT=INT4 V_FORMAT=E5M2 K_GROUP=32 K_ZERO=1"),
    ("decode", "BF16", 37, "PAGE_TOKENS=0 WARPS=4 STAGES=2 ROWS=8 K_FORMAT=E4M3 V_FORMAT=INT8"),
    ("decode", "F32", 256, "PAGE_TOKENS=16 WARPS=2 STAGES=2 ROWS=16 K_FORMAT=INT4 V_FORMAT=INT4 K_GROUP=256 K_ZERO=0 V_GROUP=32 V_ZERO=0"),
    ("decode", "F32", 35, "PAGE_TOKENS=8 WARPS=4 STAGES=3 ROWS=8 V_FORMAT=INT8"),
    ("hopper", "BF16", 128, "KEYS=176 CAPPED=0 NEGATIVE=0"), ("hopper", "F16", 64, "KEYS=112 CAPPED=1 NEGATIVE=1"),
    ("hopper", "F16", 128, "KEYS=128 CAPPED=0 NEGATIVE=0"), ("hopper", "F16", 256, "KEYS=64 CAPPED=1 NEGATIVE=0"),
    ("hopper", "BF16", 256, "KEYS=80 CAPPED=0 NEGATIVE=0"), ("hopper", "BF16", 64, "KEYS=128 CAPPED=0 NEGATIVE=0"),
    ("backward", "BF16", 64, "DETERMINISTIC=0 SMALL=0"), ("backward", "F16", 64, "DETERMINISTIC=1 SMALL=0"),
    ("backward", "F16", 128, "DETERMINISTIC=0 SMALL=0"), ("backward", "BF16", 128, "DETERMINISTIC=1 SMALL=0"),
    ("backward", "BF16", 96, "DETERMINISTIC=0 SMALL=1"), ("backward", "F16", 40, "DETERMINISTIC=0 SMALL=0"),
    ("backward", "BF16", 256, "DETERMINISTIC=0 SMALL=0"), ("backward", "F16", 200, "DETERMINISTIC=1 SMALL=0"),
    ("hopper_backward", "BF16", 64, "CAPPED=0"), ("hopper_backward", "F16", 64, "CAPPED=1"),
    ("hopper_backward", "F16", 128, "CAPPED=0"), ("hopper_backward", "BF16", 128, "CAPPED=1"),
    ("backward_scalar", "F32", 64, "TILE=32"), ("backward_scalar", "BF16", 37, "TILE=32"),
    ("backward_scalar", "F32", 256, "TILE=16"),
    ("naive_backward", "F32", 64, ""), ("naive_backward", "BF16", 40, ""), ("naive_backward", "F16", 128, ""),
    ("export", "BF16", 64, "QUERIES=0"), ("export", "F16", 128, "QUERIES=1"), ("export", "BF16", 37, "QUERIES=2"),
    ("export", "F16", 192, "QUERIES=0"),
    ("export", "F32", 18, "QUERIES=0 PLAINLY"), ("export", "F32", 33, "QUERIES=1 PLAINLY"), ("export", "F32", 64, "QUERIES=2 PLAINLY"),
    ("export", "BF16", 64, "QUERIES=0 K_FORMAT=INT8"), ("export", "F32", 64, "QUERIES=0 PLAINLY K_FORMAT=INT4"),
    ("select", "F32", 1, ""),
    ("score", "F32", 40, ""), ("score", "BF16", 128, ""), ("score", "F16", 7, ""),
    ("score", "BF16", 40, "K_FORMAT=INT8 V_FORMAT=E4M3"), ("score", "F32", 64, "K_FORMAT=INT4 V_FORMAT=E5M2"),
    ("compact", "F32", 33, ""), ("compact", "BF16", 64, ""), ("compact", "F16", 18, ""),
    ("compact", "BF16", 64, "K_FORMAT=INT8 V_FORMAT=INT8"), ("compact", "F32", 33, "K_FORMAT=INT8 V_FORMAT=E5M2"),
    ("compact", "BF16", 96, "K_FORMAT=INT4 V_FORMAT=INT4 K_GROUP=32 K_ZERO=1 V_GROUP=32 V_ZERO=0"),
    ("compact", "F16", 128, "K_FORMAT=E4M3 V_FORMAT=INT4 V_GROUP=128 V_ZERO=1"), ("compact", "F32", 64, "V_FORMAT=INT4"),
    ("model", "F32", 1, ""), ("model", "BF16", 1, ""), ("model", "F16", 1, ""),
]  # fmt: skip
# What the address sanitizer finds as well, at less cost in time.
LEFT_TO_ADDRESSES = ["null", "object-size", "pointer-overflow", "vptr", "nonnull-attribute", "returns-nonnull-attribute"]
# Families that are compared number by number, by lists.cpp; the others compute attention.
LISTS = ["export", "select", "score", "compact", "model"]


def run(cxx, folder, number, family, element, head_dim, extra):
    """(what to print, whether it went well) of one variant."""
    program = os.path.join(folder, str(number))
    macros = [f"-DELEMENT={element}", f"-DHEAD_DIM={head_dim}", f'-DFAMILY="{family}.hpp"']
    macros += [f"-D{macro}" for macro in [*extra.split(), *["DECODES"] * (family == "decode")]]
    harness = "gradients.cpp" if family in BACKWARD else "lists.cpp" if family in LISTS else "emulate.cpp"
    flags = ["-std=c++17", "-O1", "-fsanitize=address,undefined", f"-fno-sanitize={','.join(LEFT_TO_ADDRESSES)}", "-fno-sanitize-recover=all"]
    flags += ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi", "-Wno-unused-function", f"-I{KERNELS}", f"-I{HERE}"]
    started = time.perf_counter()
    build = [cxx, *flags, *macros, os.path.join(HERE, harness), "-o", program]
    subprocess.run(build, check=True)
    built = time.perf_counter()
    result = subprocess.run([program], capture_output=True, text=True, timeout=900)
    if result.returncode and result.stderr:
        # Once more for the lines where it happened, which take a third of the time to build.
        subprocess.run([*build, "-g"], check=True)
        result = subprocess.run([program], capture_output=True, text=True, timeout=900)
    label = " ".join([family, element, f"D={head_dim}", extra]).strip()
    said = "\n".join(result.stderr.splitlines()[:12])
    seconds = f"{built - started:.1f} s to build, {time.perf_counter() - built:.1f} s to run"
    return f"{label:28} {result.stdout.strip()} ({seconds})" + (f"\n{said}" if said else ""), result.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cxx", default="g++", help="compiler")
    parser.add_argument("--only", metavar="FAMILY", help="only this family")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of each family only each N-th variant [default: 1]")
    parser.add_argument("--turn", type=int, default=0, metavar="K", help="which of these: N turns, one after the other, have all [default: 0]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="variants at a time [default: every core]")
    arguments = parser.parse_args()
    if arguments.every < 1:
        parser.error(f"--every is {arguments.every}; it must be at least 1")
    families = {family: [variant for variant in VARIANTS if variant[0] == family] for family, *_ in VARIANTS}
    # At least one of a family.
    first = {family: arguments.turn % min(arguments.every, len(all)) for family, all in families.items()}
    wanted = [family for family in families if arguments.only in (None, family)]
    chosen = [variant for family in wanted for variant in families[family][first[family] :: arguments.every]]
    if not chosen:
        parser.error(f"no family '{arguments.only}'; there are {', '.join(families)}")
    good = True
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, arguments.jobs)) as pool:
        started = [pool.submit(run, arguments.cxx, folder, number, *variant) for number, variant in enumerate(chosen)]
        for future in started:
            line, well = future.result()
            print(line, flush=True)
            good &= well
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
