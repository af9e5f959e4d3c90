"""Times in the records: samples of each shape and who took them, medians with intervals, ratios."""

import random

PEERS = {"flash": "flash", "cudnn": "cuDNN", "fa3": "FlashAttention-3"}
RESAMPLES = 400
# Bytes of a key in codes, by the head dim: what a decode step over them reads.
CODE_BYTES = {"int8": lambda d: d + 4, "fp8-e4m3": lambda d: d, "int4": lambda d: d // 32 * 18}


def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def interval(statistic, *samples):
    """95% bootstrap interval of a statistic of medians, one of each list of samples; the same every time."""
    generator = random.Random(0)
    drawn = sorted(statistic(*(median(generator.choices(each, k=len(each))) for each in samples)) for _ in range(RESAMPLES))
    return drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES) - 1]


class Shape:
    """One problem: what a cell is, whoever computes it."""

    def __init__(self, cell):
        self.key = tuple(
            cell[name] for name in ("measure", "causal", "context_tokens", "batch", "q_heads", "kv_heads", "head_dim")
        )
        self.measure, self.causal, self.length, self.batch, self.q_heads, self.kv_heads, self.head_dim = self.key

    def __str__(self):
        mask = "" if self.measure == "decode" else " causal" if self.causal else " full"
        depth = "" if self.head_dim == 128 else f" of {self.head_dim}"
        return f"{self.q_heads}/{self.kv_heads} heads{depth}, B {self.batch}, {self.length} tokens{mask}"

    def flops(self):
        """4 D for each visible pair of query and key, backward 2.5 times that."""
        pairs = self.length * (self.length + 1) // 2 if self.causal else self.length**2
        return self.batch * self.q_heads * pairs * 4 * self.head_dim * (2.5 if self.measure == "backward" else 1)

    def kv_bytes(self, who="decode"):
        """Keys and values as `who` reads them: in 16 bits, or in codes."""
        row = CODE_BYTES.get(who.removeprefix("decode "), lambda d: 2 * d)(self.head_dim)
        return self.batch * self.kv_heads * self.length * 2 * row

    def rate(self, nanoseconds, who):
        """(units per second, unit)."""
        if self.measure == "decode":
            return self.kv_bytes(who) / nanoseconds / 1e3, "TB/s"
        return self.flops() / nanoseconds / 1e3, "TFLOP/s"


class Times:
    """Samples by shape and by who took them: a unit ('tiled backward') or a peer."""

    def __init__(self, records):
        self.shapes, self.samples, self.visits, self.without, self.warnings = {}, {}, {}, {}, []
        self.evicted, self.decoded, self.model = {}, None, {}
        for record in records:
            if record["step"].startswith("times/"):
                for line in record.get("found", []):
                    if "cell" in line:
                        self.take(record["unit"], line)
                    elif record["step"].startswith("times/model/"):
                        self.model |= line

    def take(self, who, line):
        cell = line["cell"]
        if cell["measure"] == "evict":
            return self.take_evicted(line)
        shape = Shape(cell)
        self.shapes.setdefault(shape.key, shape)
        place = (shape.key, who)
        if who in PEERS:
            samples = line.get("samples_ns")
            why = line.get("refused")
            if samples and not line["hidden"]:
                self.warn(f"{PEERS[who]} on {shape} waited for the host")
        else:
            ok = line["status"] == "ok"
            samples = line["latency"][cell["measure"]]["samples_ns"] if ok else None
            why = None if ok else f"{line['status']}: {line['reason']}"
            if ok and cell["kernel"] == "naive" and not (line.get("gemm") or "").startswith("cuBLAS"):
                self.warn("naive has its fallback GEMM and not cuBLAS's: a ratio to it means nothing")
            for reason in (line.get("gpu") or {}).get("throttle", []):
                self.warn(f"clocks were held down after {who} on {shape}: {reason}")
        if samples:
            self.samples.setdefault(place, []).extend(samples)
            self.visits.setdefault(place, []).append(median(samples))
        elif why:
            self.without[place] = why

    def take_evicted(self, line):
        if line["status"] == "ok":
            self.evicted.setdefault(line["cell"]["policy"], []).extend(line["latency"]["decode"]["samples_ns"])
            self.decoded = line["cell"]

    def warn(self, text):
        if text not in self.warnings:
            self.warnings.append(text)

    def of(self, measure):
        """The shapes of a measure, by mask and length."""
        found = [shape for shape in self.shapes.values() if shape.measure == measure]
        return sorted(found, key=lambda shape: (not shape.causal, shape.q_heads, shape.length))

    def who(self, shape):
        return [who for key, who in [*self.samples, *self.without] if key == shape.key]

    def faster(self, shape, who, other):
        """How many times as fast `who` is as `other`, with its interval; None if either was not timed."""
        ours, theirs = (self.samples.get((shape.key, name)) for name in (who, other))
        return ratio(ours, theirs) if ours and theirs else None


def ratio(ours, theirs):
    """Speed over speed: (median, low, high)."""
    return (median(theirs) / median(ours), *interval(lambda a, b: b / a, ours, theirs))
