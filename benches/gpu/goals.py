"""What the kernels are to reach, and whether they do: ratios within one run."""

from timing import PEERS, median, ratio

OURS = {"hopper": ("hopper",), "tiled": ("tiled",), "backward": ("hopper backward", "tiled backward")}
# (whose speed, measure, beside which peer, at least so many times as fast). `backward` is the best that the GPU has.
BESIDE = [
    ("hopper", "forward", "cudnn", 1.0), ("hopper", "forward", "fa3", 1.0), ("backward", "backward", "cudnn", 0.7),
    ("tiled", "forward", "flash", 0.9),
]  # fmt: skip
# On an H200 alone, 64/8 heads: TFLOP/s by mask.
H200 = {False: 690, True: 670}
# How far the longest context that runs may be from the predicted one.
APART = {"naive": 0.01, "tiled": 0.02}
# Decode over codes beside bf16: the goals of the CPU for int8 and int4, whose bytes say 1.94 and 3.56.
CODED_TIMES = {"int8": 1.7, "fp8-e4m3": 1.7, "int4": 2.8}
COPY_SHARE, PAGED_SHARE, EVICTED_TIMES, KERNELS_TIMES = 0.85, 0.05, 3.0, 1.2


def goals(times, ceilings, limits):
    """Rows of (goal, measured, met or missed)."""
    rows = []
    for ours, measure, peer, least in BESIDE:
        for shape in longest(times, measure):
            who = next((unit for unit in OURS[ours] if (shape.key, unit) in times.samples), OURS[ours][0])
            faster = times.faster(shape, who, peer)
            name = who if who.endswith(measure) else f"{who} {measure}"
            goal = f"{name}, {shape}: {'>' if least == 1 else f'at least {least}x'} {PEERS[peer]}"
            rows.append(row(goal, faster, "{:.2f}x", faster and faster[0] >= least))
    for shape in longest(times, "forward"):
        if (shape.q_heads, shape.kv_heads) == (64, 8):
            samples = times.samples.get((shape.key, "hopper"))
            rate = samples and shape.rate(median(samples), "hopper")[0]
            goal = f"on an H200: hopper, {shape}: {H200[shape.causal]} TFLOP/s"
            rows.append([goal, f"{rate:.0f} TFLOP/s" if rate else "not measured", verdict(rate and rate >= H200[shape.causal])])
    for shape in longest(times, "decode"):
        samples, copy = times.samples.get((shape.key, "decode")), ceilings.get("copy_bytes_per_s")
        share = samples and copy and shape.kv_bytes() / median(samples) * 1e9 / copy
        goal = f"decode, {shape}: at least {COPY_SHARE:.0%} of a copy's bandwidth"
        rows.append([goal, f"{share:.0%}" if share else "not measured", verdict(share and share >= COPY_SHARE)])
        faster = times.faster(shape, "decode paged", "decode")
        goal = f"decode in pages of 16 tokens, {shape}: within {PAGED_SHARE:.0%} of contiguous"
        cost = faster and [1 / x - 1 for x in faster]
        rows.append(row(goal, cost, "{:+.1%}", cost and cost[0] <= PAGED_SHARE))
        for codes, least in CODED_TIMES.items():
            faster = times.faster(shape, f"decode {codes}", "decode paged")
            goal = f"decode over {codes}, {shape}: at least {least}x bf16 in pages"
            rows.append(row(goal, faster, "{:.2f}x", faster and faster[0] >= least))
    full = times.evicted.get("full")
    for policy, samples in times.evicted.items():
        if policy != "full" and full:
            faster = ratio(samples, full)
            goal = f"decode after {policy} to 25% of {times.decoded['context_tokens']} tokens: at least {EVICTED_TIMES:.0f}x full"
            rows.append(row(goal, faster, "{:.2f}x", faster[0] >= EVICTED_TIMES))
    goal = f"token of a model of 32 layers: at most {KERNELS_TIMES}x the sum of its kernels"
    step_ns, kernels_ns = times.model.get("step_ns"), times.model.get("kernels_ns")
    shown = f"{step_ns / 1e6:.3f} ms" if step_ns else "not measured"
    if kernels_ns:
        shown += f", {step_ns / kernels_ns:.2f}x of {kernels_ns / 1e6:.3f} ms in {times.model['kernels']:.0f} kernels"
    rows.append([goal, shown, verdict(step_ns / kernels_ns <= KERNELS_TIMES if kernels_ns else None)])
    for line in limits:
        kernel, apart = line["cell"]["kernel"], line["apart"]
        goal = f"longest context of {kernel}: within {APART[kernel]:.0%} of the predicted"
        rows.append([goal, f"{apart:+.2%}", verdict(abs(apart) <= APART[kernel])])
    return rows


def longest(times, measure):
    """Shapes of a measure with its longest context."""
    shapes = times.of(measure)
    most = max((shape.length for shape in shapes), default=0)
    return [shape for shape in shapes if shape.length == most]


def verdict(met):
    return "" if met is None else "met" if met else "missed"


def row(goal, measured, shown, met):
    """`measured`: a median and the two ends of its interval."""
    if not measured:
        return [goal, "not measured", ""]
    low, high = sorted(measured[1:])
    return [goal, f"{shown.format(measured[0])} [{shown.format(low)}, {shown.format(high)}]", verdict(met)]
