"""summary.md, drawn from the records alone."""

from goals import goals
from problems import case_key, passes, problems, pytorch_errors
from timing import PEERS, Times, interval, median, ratio


def draw(records):
    """(text, problems)."""
    start = next((record for record in records if record["step"] == "start"), None)
    if start is None:
        return "No records.\n", ["there are no records"]
    about, times, wrong = start["found"][0], Times(records), problems(records)
    lines = heading(about, start, records)
    lines += ["", "## Problems", "", *([f"- {problem}" for problem in wrong] or ["None."])]
    lines += ["", "## Goals", "", *table(["goal", "measured", ""], goals(times, ceilings(records), limits(records)))]
    for measure in ("forward", "backward", "decode"):
        if shapes := times.of(measure):
            lines += ["", f"## Times: {measure}", "", *measured(times, shapes)]
    lines += evicted(times)
    if times.warnings:
        lines += ["", "## Warnings", "", *(f"- {warning}" for warning in times.warnings)]
    lines += ["", "## Ceilings", "", *ceiling_lines(records)]
    lines += ["", "## Correctness", "", *correctness(records)]
    lines += judged(records) + maximum(records) + ended(records)
    return "\n".join(lines) + "\n", wrong


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


def found(records, part):
    """(record, object) of a part's objects."""
    return [(record, line) for record in records if record["step"].startswith(part + "/") for line in record.get("found", [])]


def heading(about, start, records):
    device, nvml = about["cuda"]["device"], about["cuda"]["nvml"]
    versions = next(
        (f"PyTorch {line['torch']}, cuDNN {line['cudnn']}" for _, line in found(records, "times") if "torch" in line), "none"
    )
    return [
        f"# {device['name']}, kvsieve {about['version']} ({about['git_rev']})",
        "",
        f"{device['architecture']}, {device['multiprocessors']} multiprocessors, {device['total_bytes'] / 2**30:.0f} GiB, driver "
        f"{nvml.get('driver_version', 'unknown')}, CUDA {device['cuda_version']}, NVRTC {about['cuda']['nvrtc']['version']}; "
        f"peers: {versions}; begun {start['started_at']}.",
        *(["", "**Tiny sizes: times mean nothing.**"] if about["tiny"] else []),
    ]


def ceilings(records):
    both = {}
    for _, line in found(records, "ceilings"):
        both |= line
    return both


def ceiling_lines(records):
    both = ceilings(records)
    copy, product = both.get("copy_bytes_per_s"), both.get("cublas_bf16_flops_per_s")
    return [
        f"- copy within the GPU's memory: {f'{copy / 1e12:.2f} TB/s, reads and writes' if copy else 'not measured'}",
        f"- cuBLAS, product of random bf16 matrices: {f'{product / 1e12:.0f} TFLOP/s' if product else 'not measured'}",
    ]


def span(middle, low, high, digits=2):
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def milliseconds(samples):
    return span(*(each / 1e6 for each in (median(samples), *interval(lambda a: a, samples))), digits=4)


def measured(times, shapes):
    peers = [peer for peer in PEERS if any(peer in times.who(shape) for shape in shapes)]
    rows = []
    for shape in shapes:
        for who in dict.fromkeys(times.who(shape)):
            name = PEERS.get(who, who)
            samples = times.samples.get((shape.key, who))
            if not samples:
                rows.append([shape, name, times.without[(shape.key, who)], "", "", *[""] * len(peers)])
                continue
            rate, unit = shape.rate(median(samples), who)
            visits = times.visits[(shape.key, who)]
            apart = f"{100 * (max(visits) / min(visits) - 1):.1f}%" if len(visits) > 1 else ""
            faster = [None if who in PEERS else times.faster(shape, who, peer) for peer in peers]
            ratios = [span(*each) if each else "" for each in faster]
            rows.append([shape, name, milliseconds(samples), f"{rate:.3g} {unit}", apart, *ratios])
    head = ["shape", "who", "ms [95%]", "rate", "visits apart", *(f"x {PEERS[peer]}" for peer in peers)]
    return table(head, rows)


def evicted(times):
    if not times.evicted:
        return []
    cell, full = times.decoded, times.evicted.get("full")
    rows = [
        [policy, milliseconds(samples), span(*ratio(samples, full)) if full else ""] for policy, samples in times.evicted.items()
    ]
    heads = f"{cell['q_heads']}/{cell['kv_heads']} heads"
    title = f"## Times: decode after eviction to 25% of {cell['context_tokens']} tokens, {heads}"
    return ["", title, "", *table(["policy", "ms [95%]", "x full"], rows)]


def correctness(records):
    """Each unit and type: how many cases, the largest error of each result, PyTorch's largest on the same cases."""
    theirs, kept, refused = pytorch_errors(records), {}, {}
    for record, line in passes(records):
        entry = kept.setdefault((record["unit"], line["case"]["dtype"]), [0, {}, {}])
        entry[0] += 1
        for name, error in line["errors"].items():
            entry[1][name] = worse(entry[1].get(name, 0), error)
            if name in (known := theirs.get(case_key(line["case"]), {})):
                entry[2][name] = worse(entry[2].get(name, 0), known[name])
    for record in records:
        if record["step"].startswith("check/") and record["status"] in ("refused", "absent", "dropped"):
            refused[record["reason"]] = refused.get(record["reason"], 0) + 1
    rows = []
    for (unit, dtype), (count, ours, peer) in sorted(kept.items()):
        rows.append(
            [unit, dtype, count, *(f"{shown(ours.get(name))}{beside(peer.get(name))}" for name in ("o", "lse", "dq", "dk", "dv"))]
        )
    head = [
        "kernel",
        "type",
        "cases",
        *(f"{name} (PyTorch's)" if name != "lse" else name for name in ("o", "lse", "dq", "dk", "dv")),
    ]
    smoke = [record for record in records if record["step"].startswith("smoke/")]
    return [
        "Smoke test: "
        + (", ".join(f"{record['unit'] or record['step']} {record['status']}" for record in smoke) or "not run")
        + ".",
        "",
        "Largest relative L2 errors against f32 on the CPU:",
        "",
        *table(head, rows),
        *([""] if refused else []),
        *(f"- {reason} ({count} cases)" for reason, count in refused.items()),
    ]


def worse(a, b):
    """The larger; a NaN above all."""
    return b if b != b or b > a else a


def shown(error):
    return "" if error is None else f"{error:.1e}"


def beside(error):
    return "" if error is None else f" ({error:.1e})"


def judged(records):
    policies = [line for _, line in found(records, "policies") if "same" in line]
    codes = [line for _, line in found(records, "policies") if "codes" in line]
    models = [line for _, line in found(records, "models") if "off" in line]
    lines = []
    if policies:
        least = min(policies, key=lambda line: line["same"])
        same = f"at least {100 * least['same']:.2f}% of what is kept is the same ({least['policy']})"
        lines.append(f"- {len(policies)} policies beside the CPU's: {same}")
    if codes:
        most = max(codes, key=lambda line: line["off_cpu"] / line["allowed"])
        lines.append(
            f"- {len(codes)} passes over codes beside the CPU's: at most {most['off_cpu']:.1e} of the largest output off where "
            f"{most['allowed']:.0e} is allowed ({most['kernel']} over {most['codes']}, {most['dtype']})"
        )
    if models:
        most = max(models, key=lambda line: line["off"] / line["allowed"])
        off = f"at most {most['off']:.1e} deviations off ({most['model']}, {most['allowed']:.0e} allowed)"
        lines.append(f"- {len(models)} passes of models beside transformers': {off}")
    lines += [answers(line) for _, line in found(records, "models") if "same_tokens" in line]
    return ["", "## Policies and models", "", *(lines or ["Not run."])]


def answers(line):
    """What the built-in model took, on the GPU and on the CPU."""
    gpu, cpu = ([(line[device][key] or 0) / 1e6 for key in ("first_token_ns", "step_ns")] for device in ("cuda", "cpu"))
    return (
        f"- built-in model, {line['prompt_tokens']} tokens, {line['policy']}: first token {gpu[0]:.2f} ms (CPU {cpu[0]:.2f}), "
        f"then {gpu[1]:.3f} ms each (CPU {cpu[1]:.3f}); the first {line['same_tokens']} of {line['tokens']} words are the same"
    )


def limits(records):
    return [line for _, line in found(records, "maximum") if "found_tokens" in line]


def maximum(records):
    rows = [
        [line["cell"]["kernel"], line["found_tokens"], line["predicted_tokens"], f"{line['apart']:+.2%}", line["reason"] or ""]
        for line in limits(records)
    ]
    head = ["kernel", "tokens that ran", "predicted", "apart", "beyond"]
    return ["", "## Maximum context", "", *(table(head, rows) if rows else ["Not run."])]


def ended(records):
    """How the steps of each part ended."""
    counts = {}
    for record in records:
        part, status = record["step"].split("/")[0], record["status"]
        counts.setdefault(part, {}).setdefault(status, []).append(record.get("seconds", 0))
    rows = [
        [
            part,
            ", ".join(f"{len(each)} {status}" for status, each in by_status.items()),
            f"{sum(map(sum, by_status.values())):.0f}",
        ]
        for part, by_status in counts.items()
    ]
    lines = ["", "## Steps", "", *table(["part", "ended", "s"], rows)]
    others = {}
    for record in records:
        if record["status"] in ("dropped", "absent", "unfinished") and not record["step"].startswith("check/"):
            others.setdefault((record["status"], record["reason"]), []).append(record["step"])
    said = [
        f"- {status}: {reason} ({steps[0]}{f' and {len(steps) - 1} more' if len(steps) > 1 else ''})"
        for (status, reason), steps in others.items()
    ]
    return [*lines, "", *said] if said else lines
