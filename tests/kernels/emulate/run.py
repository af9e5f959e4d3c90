#!/usr/bin/env python3
"""Builds the kernels for the CPU with sanitizers and runs them against attention in f64. Needs g++ 12 on x86-64.

    python3 tests/kernels/emulate/run.py [--cxx g++] [--only tiled]

One line for each variant; exit status 1 when one is wrong. See machine.hpp for what this can find and what it cannot.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
KERNELS = os.path.join(HERE, "..", "..", "..", "kernels")
VARIANTS = [
    ("naive", "F32", 64, ""), ("naive", "BF16", 40, ""), ("naive", "F16", 128, ""),
    ("tiled", "BF16", 64, ""), ("tiled", "F16", 64, ""), ("tiled", "BF16", 128, ""), ("tiled", "F16", 40, ""),
    ("tiled", "BF16", 96, ""),
    ("decode", "BF16", 64, "PAGED=0"), ("decode", "BF16", 128, "PAGED=0"), ("decode", "F16", 72, "PAGED=0"),
    ("decode", "BF16", 64, "PAGED=1"), ("decode", "F16", 128, "PAGED=1"),
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cxx", default="g++", help="compiler")
    parser.add_argument("--only", metavar="FAMILY", help="only this family")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for family, element, head_dim, extra in VARIANTS:
            if arguments.only not in (None, family):
                continue
            program = os.path.join(folder, "emulate")
            macros = [f"-DELEMENT={element}", f"-DHEAD_DIM={head_dim}", f'-DFAMILY="{family}.hpp"']
            macros += [f"-D{extra}"] if extra else []
            flags = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
            flags += ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function", f"-I{KERNELS}", f"-I{HERE}"]
            started = time.perf_counter()
            subprocess.run([arguments.cxx, *flags, *macros, os.path.join(HERE, "emulate.cpp"), "-o", program], check=True)
            built = time.perf_counter()
            result = subprocess.run([program], capture_output=True, text=True, timeout=900)
            label = " ".join([family, element, f"D={head_dim}", extra]).strip()
            said = "\n".join(result.stderr.splitlines()[:12])
            seconds = f"{built - started:.1f} s to build, {time.perf_counter() - built:.1f} s to run"
            print(f"{label:28} {result.stdout.strip()} ({seconds})" + (f"\n{said}" if said else ""), flush=True)
            failed |= result.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
