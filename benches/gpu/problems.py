"""What is wrong, by the records: each line names a kernel, a peer, a policy or a model."""

from records import WRONG

# An error is that of the type if it is at most so many times PyTorch's in the same type, or f32's rounding of a sum over
# the keys one after another, of which PyTorch may have several.
TIMES_PYTORCH = 2
ROUNDING, LEAST_ROUNDING = 2**-24, 1e-6


def problems(records):
    by_unit = {}
    for record in records:
        # Not every kernel has every type. A smoke test, a policy or a model asks for nothing that is not there.
        refused = record["status"] == "refused" and record["step"].split("/")[0] not in ("check", "sanitizer")
        if record["status"] in WRONG or refused:
            by_unit.setdefault(record["unit"] or record["step"], []).append(record)
    found = []
    for unit, wrong in by_unit.items():
        first, more = wrong[0], f", and in {len(wrong) - 1} steps more" if len(wrong) > 1 else ""
        found.append(f"{unit} {first['status']} in {first['step']} ({first['reason']}){more}")
    return found + inexact(records)


def pytorch_errors(records):
    """PyTorch's errors by (shape, mask, type)."""
    lines = (line for record in records if record["step"] == "check/pytorch" for line in record["found"] if "errors" in line)
    return {case_key(line["case"]): line["errors"] for line in lines}


def case_key(case):
    return tuple(case["shape"]), case["mask"], case["dtype"]


def passes(records):
    """(record, its object with errors) of every pass that was compared."""
    for record in records:
        if record["step"].startswith("check/") and record["unit"] != "pytorch":
            yield from ((record, line) for line in record.get("found", []) if "errors" in line)


def inexact(records):
    """Units whose errors are within fixed limits and yet more than PyTorch's."""
    theirs, worst = pytorch_errors(records), {}
    for record, line in passes(records):
        known = theirs.get(case_key(line["case"]), {})
        rounding = max(LEAST_ROUNDING, ROUNDING * line["case"]["shape"][4] ** 0.5)
        for name, error in line["errors"].items():
            if name in known and error > max(rounding, TIMES_PYTORCH * known[name]):
                times = error / known[name]
                if times > worst.get(record["unit"], (0,))[0]:
                    worst[record["unit"]] = (times, f"{name} {error:.1e} off in {record['step']}, PyTorch {known[name]:.1e}")
    return [f"{unit} wrong: {text}" for unit, (_, text) in worst.items()]
