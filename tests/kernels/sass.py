#!/usr/bin/env python3
"""Counts the instructions of a kernel's main loop, by kind. Needs NVRTC and nvdisasm, no GPU.

    pip install nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-nvdisasm
    python3 tests/kernels/sass.py tiled.cu ELEMENT=BF16 HEAD_DIM=128 ROWS=128 KEYS=64 Q_KEPT=0 --arch sm_90a

The main loop is the one with the most matrix products, of several the outermost; without any, the longest. Of the ways
through it that one is counted which has most products, then most copies, then fewest instructions: a tile without masks and
caps, whose successor is copied. What stands in a loop inside it counts `--trips` times, a number for each such loop in their
order, else once; a line tells of them. A loop is whatever lies before a jump back: where the compiler lays code out of order
(hopper.cu), some of these are none. Counts are per warp.
"""

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile

import check

# The first that matches; names as nvdisasm writes them, without the predicate.
KINDS = [
    ("products", r"[HIDQ]?MMA|HGMMA|UTC\w*MMA|WARPGROUP"),
    ("ldmatrix", r"LDSM"),
    ("copies", r"LDGSTS|UTMALDG|UBLKCP"),
    ("shared", r"LDS|STS|ATOMS|STSM"),
    ("global", r"LDG|STG|LD\b|ST\b|RED|ATOMG|ATOM\b|UTMA|LDL|STL"),
    ("exp2", r"MUFU"),
    ("shuffle", r"SHFL|VOTE"),
    ("barrier", r"BAR|SYNCS|DEPBAR|LDGDEPBAR|WARPSYNC|MEMBAR|FENCE|ARRIVES|NANOSLEEP|ERRBAR"),
    ("float", r"F(FMA|MUL|ADD|MNMX|SEL|SETP|CHK)|HFMA|HADD|HMUL|HMNMX|FMNMX3"),
    ("convert", r"F2F|F2I|I2F|I2FP|F2FP"),
    ("branch", r"BRA|BRX|BSSY|BSYNC|EXIT|CALL|RET|BREAK|JMP|YIELD|NOP|PLOP3"),
    ("move", r"U?MOV|R2UR|S2R|S2UR|CS2R|PRMT|U?SEL|R2P|P2R"),
    ("integer", r"."),
]
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
LABEL = re.compile(r"^(\.L\w+):")
TARGET = re.compile(r"`\((\.L\w+)\)")


def kind_of(name):
    return next(kind for kind, pattern in KINDS if re.match(pattern, name))


def functions(text):
    """(name, [(label or None, instruction's name, whether it has a condition, target)]) of every kernel in a disassembly."""
    for part in re.split(r"^\.text\.", text, flags=re.M)[1:]:
        code, labels = [], {}
        for line in part.splitlines():
            if line.lstrip().startswith(".section"):
                break
            if found := LABEL.match(line):
                labels[found.group(1)] = len(code)
            elif found := INSTRUCTION.match(line):
                target = TARGET.search(found.group(3))
                conditional = "@" in line.split(found.group(2))[0] or re.search(r"\bU?P\d", found.group(3)) is not None
                code.append((found.group(2), conditional, target and target.group(1)))
        yield part.split(":")[0], [(name, conditional, labels.get(target)) for name, conditional, target in code]


def loops(code):
    """(first, last) of every loop, inner ones after the outer: one for each target of a jump back."""
    last = {}
    for at, (name, _, target) in enumerate(code):
        if name.startswith("BRA") and target is not None and target < at:
            last[target] = max(at, last.get(target, 0))
    return sorted(last.items(), key=lambda loop: (loop[0], -loop[1]))


def count(code, loop, inner, trips):
    """Counts by kind of the way through a loop that has most products, then most copies, then fewest instructions."""
    first, last = loop
    direct = [part for part in inner if not any(o != part and o[0] <= part[0] and part[1] <= o[1] for o in inner)]
    after = {}  # counts from an instruction to the loop's end; None: no way leads there

    def value(counts):
        return (counts["products"], counts["copies"], -sum(counts.values()))

    def from_here(at):
        if at == last + 1 or at == first:
            return collections.Counter()  # the end, or a jump back
        return after.get(at) if first < at <= last else None

    for at in range(last, first - 1, -1):
        nested = next((part for part in direct if part[0] == at), None)
        if nested is not None:
            within = [part for part in inner if part != nested and nested[0] <= part[0] and part[1] <= nested[1]]
            body = count(code, nested, within, trips)
            own = collections.Counter({kind: n * trips.get(nested, 1) for kind, n in body.items()})
            ends = {target for name, _, target in code[at : nested[1] + 1] if name.startswith("BRA") and target is not None}
            ends = [from_here(end) for end in ends | {nested[1] + 1} if end > nested[1]]
            ends = [end for end in ends if end is not None]
            after[at] = own + max(ends, key=value) if ends else None
            continue
        name, conditional, target = code[at]
        ways = []
        if name.startswith("BRA") and target is not None:
            ways.append(from_here(target) if target > at or target == first else None)
            if conditional:
                ways.append(from_here(at + 1))
        elif not (name.startswith("EXIT") and not conditional):
            ways.append(from_here(at + 1))
        ways = [way for way in ways if way is not None]
        after[at] = max(ways, key=value) + collections.Counter([kind_of(name)]) if ways else None
    return after[first] or collections.Counter()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="a file of kernels/, as tiled.cu")
    parser.add_argument("macros", metavar="MACRO=VALUE", nargs="*", help="as check.py prints them")
    parser.add_argument("--arch", action="append", help="an architecture; may be given again [default: sm_80 and sm_90a]")
    parser.add_argument("--function", help="only this kernel of the file")
    parser.add_argument("--trips", type=lambda text: [int(n) for n in text.split(",")], default=[], metavar="N,N")
    parser.add_argument("--nvrtc", metavar="PATH", help="libnvrtc.so.N")
    parser.add_argument("--nvdisasm", metavar="PATH", default=shutil.which("nvdisasm"), help="[default: the one on PATH]")
    parser.add_argument("--keep", metavar="FILE", help="write the disassembly there (of the last architecture)")
    arguments = parser.parse_intermixed_args()
    if not arguments.nvdisasm:
        parser.error("nvdisasm is not on PATH: pip install nvidia-cuda-nvdisasm, or give --nvdisasm PATH")
    macros = dict(macro.split("=", 1) if "=" in macro else (macro, "1") for macro in arguments.macros)
    kinds = [kind for kind, _ in KINDS]
    print("| arch | kernel | registers | spills | all | " + " | ".join(kinds) + " | ldmatrix per product |\n|" + "---|" * (len(kinds) + 6))
    for architecture in arguments.arch or ["sm_80", "sm_90a"]:
        compiled, log, _, cubin = check.compile_variant(arguments.nvrtc, arguments.file, macros, architecture, True)
        if not compiled:
            sys.exit(f"{arguments.file} does not compile for {architecture}:\n{log.strip()}")
        said = {name: (registers, stores + loads) for name, registers, _, _, stores, loads in check.functions(log)}
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            text = subprocess.run([arguments.nvdisasm, "-c", file.name], check=True, capture_output=True, text=True).stdout
        if arguments.keep:
            with open(arguments.keep, "w", encoding="utf-8") as file:
                file.write(text)
        for function, code in functions(text):
            if arguments.function not in (None, function):
                continue
            found = loops(code)
            if not found:
                continue

            def inside(loop):
                return [part for part in found if part != loop and loop[0] <= part[0] and part[1] <= loop[1]]

            # Numbers for loops are those of the outermost that has most products, or is longest.
            def size(loop):
                return sum(kind_of(name) == "products" for name, _, _ in code[loop[0] : loop[1] + 1]), loop[1] - loop[0]

            inner = inside(max(found, key=size))
            trips = dict(zip(inner, arguments.trips))
            counted = {loop: count(code, loop, inside(loop), trips) for loop in found}
            main_loop = max(found, key=lambda loop: (counted[loop]["products"], loop[1] - loop[0]))
            counts = counted[main_loop]
            registers, spills = said[function]
            ratio = f"{counts['ldmatrix'] / counts['products']:.3f}" if counts["products"] else "-"
            cells = [architecture, function, registers, spills, sum(counts.values()), *(counts[kind] for kind in kinds), ratio]
            print("| " + " | ".join(map(str, cells)) + " |")
            for number, loop in enumerate(inner):
                told = ", ".join(f"{counted[loop][kind]} {kind}" for kind in kinds if counted[loop][kind])
                if told and loop != main_loop:
                    print(f"  loop {number + 1} inside {function}, counted {trips.get(loop, 1)} times: {told}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
