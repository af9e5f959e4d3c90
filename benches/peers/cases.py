"""What `compare.py` compares, and what is wanted of kvsieve in each case: a part is a list of rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

ACCURACY = "Accuracy: relative L2 error against f64, same inputs"


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a table: a pass of kvsieve, what it is compared with, and what is wanted of it."""

    section: str
    op: str
    dtype: str
    heads: tuple[int, int]
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool = False
    threads: int = 2
    peer: str = "PyTorch"  # or "PyTorch, group as rows", "naive", "1 thread"
    ratio_goal: float | None = None
    peak: str | None = None  # the probed ceiling: "fma", "bf16" or "read"
    peak_goal: float | None = None  # percent of it

    @property
    def problem(self) -> dict[str, Any]:
        """The problem in the worker's words."""
        return {name: getattr(self, name) for name in ("dtype", "heads", "q_len", "kv_len", "head_dim", "causal")}

    @property
    def kernel(self) -> str:
        return "decode" if self.op == "decode" else "tiled"

    @property
    def name(self) -> str:
        if self.op == "decode":
            q_heads, kv_heads = self.heads
            kind = f"MHA {q_heads}" if q_heads == kv_heads else f"GQA {q_heads}/{kv_heads}"
            rows = ", PyTorch: group as rows" if self.peer == "PyTorch, group as rows" else ""
            return f"{self.dtype} {kind} D {self.head_dim}, {self.kv_len} keys{rows}"
        return f"{self.dtype} D {self.head_dim} L {self.kv_len}{' causal' if self.causal else ''}"


def square(section: str, op: str, dtype: str, length: int, head_dim: int, causal: bool, **more: Any) -> Case:
    return Case(section, op, dtype, (8, 8), length, length, head_dim, causal, **more)


def forward_cases(quick: bool) -> Iterator[Case]:
    goals = {"f32": (2.3, "fma", 75.0), "bf16": (3.8, "bf16", 75.0), "f16": (2.0, None, None)}
    for dtype, (ratio, peak, percent) in goals.items():
        lengths = [2048] if dtype == "f16" else [1024, 2048] if quick else [1024, 2048, 4096, 8192]
        for length, dim, causal in itertools.product(lengths, (64, 128), (False, True)):
            for threads in (1, 2) if length == 2048 and dtype != "f16" else (2,):
                yield square(f"Forward, {dtype}", "forward", dtype, length, dim, causal,
                             threads=threads, ratio_goal=ratio, peak=peak, peak_goal=percent)


def backward_cases(quick: bool) -> Iterator[Case]:
    for dtype, peak in (("f32", "fma"), ("bf16", "bf16")):
        for dim, causal in itertools.product((64, 128), (False, True)):
            yield square("Backward", "backward", dtype, 1024 if quick else 2048, dim, causal, ratio_goal=1.8, peak=peak)


def decode_cases(quick: bool) -> Iterator[Case]:
    ratios = {("bf16", (8, 8)): 7.5, ("bf16", (32, 8)): 30.0}
    for dtype, heads, kv_len in itertools.product(("f32", "bf16", "f16"), ((8, 8), (32, 8)), (8192, 32768)):
        if quick and kv_len > 8192:
            continue
        case = Case("Decode (one query)", "decode", dtype, heads, 1, kv_len, 128,
                    ratio_goal=ratios.get((dtype, heads)), peak="read", peak_goal=80.0)
        yield case
        if dtype == "bf16" and heads == (32, 8):
            yield dataclasses.replace(case, peer="PyTorch, group as rows", ratio_goal=3.0)


def own_cases(quick: bool) -> Iterator[Case]:
    length = 2048 if quick else 4096
    for dim, causal in itertools.product((64, 128), (False, True)):
        yield square("Tiled against kvsieve's own naive kernel", "forward", "f32", length, dim, causal,
                     peer="naive", ratio_goal=4.0)
    for dtype, dim in itertools.product(("f32", "bf16"), (64, 128)):
        yield square("Two threads against one", "forward", dtype, length, dim, False, peer="1 thread", ratio_goal=1.9)


def accuracy_cases(_quick: bool) -> Iterator[Case]:
    for dtype in ("f32", "bf16", "f16"):
        for length, dim, causal in itertools.product((512, 1024), (64, 128), (False, True)):
            yield Case(ACCURACY, "forward", dtype, (4, 4), length, length, dim, causal)
        for heads, dim in itertools.product(((8, 8), (32, 8)), (64, 128)):
            yield Case(ACCURACY, "decode", dtype, heads, 1, 1024, dim)


# The parts by name; each takes whether the run is a quick one.
PARTS: dict[str, Callable[[bool], Iterator[Case]]] = {
    "forward": forward_cases,
    "backward": backward_cases,
    "decode": decode_cases,
    "own": own_cases,
    "accuracy": accuracy_cases,
}
