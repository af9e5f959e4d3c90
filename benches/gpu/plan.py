"""What is measured: the steps of each part. Shapes are those of the goals; `tiny` ones are for the emulated device."""

import glob
import json
import os
import sys

import timing
from steps import Step

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.normpath(os.path.join(HERE, "..", ".."))
MODELS, BUILTIN = os.path.join(ROOT, "tests", "checkpoints"), os.path.join(ROOT, "models", "builtin")
PEERS = ("flash", "cudnn", "fa3")
# Every kernel of kernels/score.cu, export.cu, select.cu and compact.cu is behind one of them.
POLICIES = [
    "streaming-llm", "knorm", "keydiff", "h2o", "h2o:age=true", "snapkv:window=16", "tova", "max-attention", "scissorhands",
    "snapkv:window=16+vnorm", "ada-snapkv:window=16", "pyramidkv:window=4", "knorm+global",
]  # fmt: skip
TINY_POLICIES = ["knorm", "h2o", "ada-snapkv:window=4"]
# (B, Hq, Hkv, Lq, Lk, D), and the masks on the first of them; the others are causal.
SHAPES = [
    (2, 4, 2, 130, 190, 64), (1, 4, 1, 65, 300, 128), (1, 3, 3, 37, 83, 96), (2, 16, 2, 1, 3000, 128), (1, 2, 1, 70, 70, 256),
    (1, 2, 2, 40, 50, 40),
]  # fmt: skip
TINY_SHAPES = [(1, 2, 1, 20, 33, 64), (1, 4, 2, 1, 300, 64)]
MASKS = {
    "causal": {"causal": True}, "none": {}, "window": {"causal": True, "window": 50}, "softcap": {"causal": True, "softcap": 5.0},
}  # fmt: skip
DTYPES = ("bf16", "f16", "f32")
# Formats of keys and values, timed beside bf16 in pages.
CODES = tuple(timing.CODE_BYTES)
# Two visits of each kernel and peer in turn: a slow moment of the machine falls on all of them.
VISITS = (1, 2)


def python(script, *words):
    return [sys.executable, os.path.join(HERE, script), *words]


def doctor(binary):
    return Step("start", None, [binary, "doctor", "--json", "-"], 30)


def cell(measure, causal, length, batch, heads, head_dim=128, **more):
    q_heads, kv_heads = heads
    shape = {"context_tokens": length, "batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return {"measure": measure, "causal": causal, **shape, "dtype": "bf16", **more}


def grid(cell, kernel):
    """A cell as a grid of an experiment file."""
    lines = ["[[grid]]", f'kernel = "{kernel}"', f'heads = "{cell["q_heads"]}/{cell["kv_heads"]}"']
    rest = {key: value for key, value in cell.items() if key not in ("q_heads", "kv_heads")}
    return "\n".join(lines + [f"{key} = {json.dumps(value)}" for key, value in rest.items()]) + "\n"


def of(unit):
    """The kernel of a unit: 'tiled' of 'tiled backward'."""
    return unit.split()[0]


class Plan:
    """The steps of each part, for one binary on one GPU."""

    def __init__(self, binary, about):
        self.binary, self.tiny = binary, about["tiny"]
        self.l2_bytes = about["cuda"]["device"]["l2_bytes"]
        hopper = about["cuda"]["device"]["capability"] == "9.0"
        # Where kernels are not compiled before, the compiler's time is part of a check's.
        self.check_s = 20 if os.environ.get("KVSIEVE_CACHE") else 60
        # What was never run before, and matters most, comes first.
        self.forward = ["hopper"] * hopper + ["tiled", "decode", "naive"]
        self.backward = [f"{kernel} backward" for kernel in ["hopper"] * hopper + ["tiled", "naive"]]

    def checked(self, name, unit, shape, mask, dtype, limit_s=None, **more):
        asked = {"binary": self.binary, "kernel": of(unit), "backward": unit.endswith("backward"), "shape": shape, "dtype": dtype}
        asked |= {"mask": mask, **MASKS[mask], **more}
        return Step(name, unit, python("check.py", json.dumps(asked)), limit_s or self.check_s, slow="tool" in more)

    def smoke(self):
        """One small pass of each, twice: is it right, does it end, is it the same again?"""
        shape = (1, 2, 1, 33, 70, 128) if self.tiny else (1, 4, 2, 300, 450, 128)
        one_query = (*shape[:3], 1, *shape[4:])
        for unit in self.forward + self.backward:
            yield self.checked(f"smoke/{unit}", unit, one_query if unit == "decode" else shape, "causal", "bf16", twice=True)

    def experiment(self, name, unit, grids, limit_s=60, needs=(), more=()):
        timing = "min_rounds = 1\nmax_rounds = 2\ncap_s = 0.1" if self.tiny else "min_rounds = 8\nmax_rounds = 15\ncap_s = 4"
        text = f'name = "gpu"\n[timing]\n{timing}\n{"".join(grids)}'
        command = [self.binary, "run", "cells.toml", "--device", "cuda", "--out", "runs", "--json", "-", *more]
        return Step(name, unit, command, limit_s, needs, {"cells.toml": text})

    def timed(self, visit, name, units, peers, cells):
        """The same cells by kernels and peers, in turn."""
        asked = {"cells": cells, "l2_bytes": self.l2_bytes, "samples": 15}
        for unit, own in units.items():
            yield self.experiment(f"times/{name}/{unit}/{visit}", unit, [grid(cell, of(unit)) for cell in own])
        for peer in peers:
            yield Step(f"times/{name}/{peer}/{visit}", peer, python("peers.py", "times", peer, json.dumps(asked)), 60)

    def times(self):
        """Everything once, then everything once more: a visit that ends early has times of all."""
        for visit in VISITS:
            yield from self.visited(visit)
        layers = python("layers.py", "tiny" if self.tiny else "full", self.binary)
        yield Step("times/model/32 layers", "model of 32 layers", layers, 150, ("tiled", "decode"), slow=True)

    def visited(self, visit):
        yield from self.passes(visit, "forward")
        length, heads = (128, (4, 2)) if self.tiny else (65536, (32, 8))
        prefill = cell("evict", True, length, 1, heads, new_tokens=4 if self.tiny else 32)
        kept = prefill | {"policy": ["knorm"] if self.tiny else ["knorm", "snapkv"], "budget": 0.25}
        grids = [grid(prefill | {"policy": "full"}, "tiled"), grid(kept, "tiled")]
        yield self.experiment(f"times/evict/evict/{visit}", "evict", grids, needs=("tiled", "decode"))
        steps = [(128, 2, (4, 2))] if self.tiny else [(65536, 2, (32, 8)), (4096, 32, (32, 8))]
        cells = [cell("decode", True, *step) for step in steps]
        kinds = {"decode": {"page_tokens": "contiguous"}, "decode paged": {"page_tokens": 16}}
        kinds |= {f"decode {codes}": {"page_tokens": 16, "kv_format": codes} for codes in CODES}
        units = {unit: [one | kind for one in cells] for unit, kind in kinds.items()}
        yield from self.timed(visit, "decode", units, PEERS, cells)
        yield from self.passes(visit, "backward")

    def passes(self, visit, measure):
        lengths, total, heads = ([64, 96], 96, (2, 2)) if self.tiny else ([2048, 4096, 8192, 16384], 16384, (16, 16))
        for mask in ("causal", "full"):
            cells = [cell(measure, mask == "causal", length, max(1, total // length), heads) for length in lengths]
            others = [(16384, 1, (64, 8)), (8192, 2, (16, 16), 64), (8192, 1, (16, 16), 256)]
            others = [] if self.tiny else [cell(measure, mask == "causal", *other) for other in others]
            forward = measure == "forward"
            named = [unit for unit in (self.forward if forward else self.backward) if of(unit) in ("hopper", "tiled")]
            units = {unit: cells + others for unit in named} | ({"naive": cells} if forward else {})
            yield from self.timed(visit, f"{measure} {mask}", units, PEERS if forward else PEERS[:2], cells + others)

    def ceilings(self):
        yield Step("ceilings/ceilings", "ceilings", python("ceilings.py", "tiny" if self.tiny else "full"), 60)

    def check(self):
        """Every kernel, type and mask on every shape, and PyTorch's errors on the same problems."""
        shapes = TINY_SHAPES if self.tiny else SHAPES
        cases = [(shape, mask) for shape in shapes for mask in (MASKS if shape == shapes[0] else ["causal"])]
        asked = [{"shape": shape, "mask": mask, **MASKS[mask]} for shape, mask in cases]
        yield Step("check/pytorch", "pytorch", python("peers.py", "errors", json.dumps(asked)), 120)
        for shape, mask in cases:
            for dtype in DTYPES:
                for unit in self.forward + (self.backward if shape[3] > 1 else []):
                    name = f"check/{unit}/{dtype}/{mask}/{'x'.join(map(str, shape))}"
                    yield self.checked(name, unit, shape, mask, dtype)

    def policies(self):
        for policy in TINY_POLICIES if self.tiny else POLICIES:
            yield Step(f"policies/{policy}", f"policy {policy}", self.judged("policy", policy), 60)
        for codes in CODES:
            yield Step(f"policies/codes {codes}", f"codes {codes}", self.judged("codes", codes), 60, ("tiled", "decode"))

    def models(self):
        for config in sorted(glob.glob(f"{MODELS}/*/config.json")):
            name = os.path.basename(os.path.dirname(config))
            if not self.tiny or name in ("llama", "qwen3-bf16"):
                for kernel in ["tiled", "naive"] if name == "llama" else ["tiled"]:
                    command = self.judged("model", os.path.dirname(config), kernel)
                    yield Step(f"models/{name}/{kernel}", f"model {name}", command, 60, (kernel, "decode"))
        for policy in ["full", "snapkv", "h2o", "h2o+every:steps=4"]:
            yield Step(
                f"models/builtin/{policy}", f"model builtin {policy}", self.judged("answers", BUILTIN, policy), 120, ("tiled", "decode")
            )

    def judged(self, *words):
        return python("judged.py", "tiny" if self.tiny else "full", self.binary, *words)

    def maximum(self):
        """Where the memory ends: shapes whose longest passes take about a second."""
        for kernel, heads, batch in [("naive", (32, 8), 1), ("tiled", (32, 8), 512)]:
            one = cell("forward", True, 64, 1, (2, 2)) if self.tiny else cell("forward", True, 64, batch, heads)
            more = ["--find-max-context", *(["--limit-memory", "200KiB"] if self.tiny else [])]
            yield self.experiment(f"maximum/{kernel}", kernel, [grid(one, kernel)], 90, more=more)

    def sanitizer(self):
        shape = (1, 2, 1, 20, 33, 64) if self.tiny else (1, 4, 1, 65, 130, 128)
        for tool in ("memcheck", "racecheck", "synccheck"):
            for unit in self.forward + self.backward:
                yield self.checked(f"sanitizer/{tool}/{unit}", unit, shape, "causal", "bf16", 60, tool=tool)

    def experiments(self):
        """The shipped experiments, for their figures: kept in OUT/runs.tar."""
        for name in ["quickstart.toml"] if self.tiny else ["quickstart", "memory-vs-context", "latency-vs-context"]:
            files = {name: 'name = "quickstart"\n' + grid(cell("forward", True, 64, 1, (2, 2)), "tiled")} if self.tiny else {}
            command = [self.binary, "run", name, "--device", "cuda", "--out", "runs"]
            yield Step(
                f"experiments/{name}", f"experiment {name}", command, 120, ("tiled", "decode"), files, slow=True, keep="runs"
            )
