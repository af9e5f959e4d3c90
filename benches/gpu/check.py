"""One pass of a kernel against the same in f32 on the CPU: o, lse and gradients of every query. A step of plan.py.

    check.py '{"binary": .., "kernel": .., "shape": [B, Hq, Hkv, Lq, Lk, D], "dtype": .., "backward": .., "causal": ..}'

With `twice` the outputs of a second pass must have the same bits; with `tool` the pass runs under compute-sanitizer, whose
findings are counted, and nothing else is looked at. Prints an object; its `ended` says what was wrong.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import tensors

# Relative L2 errors that are allowed: several times what correct kernels show, far below a mistake.
ALLOWED = {"f32": 3e-6, "f16": 1e-3, "bf16": 8e-3}
# A single number may be so many times further off, relative to itself and to the root mean square of all.
FARTHEST = 5
# Of log-sum-exps, which are f32 whatever the inputs are: products of 16-bit types are exact.
LSE_ALLOWED = 1e-5
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def options(asked):
    words = ["--causal"] if asked.get("causal") else []
    for name in ("window", "softcap"):
        words += [f"--{name}", str(asked[name])] if asked.get(name) else []
    return words + (["--backward"] if asked["backward"] else [])


def attend(asked, output, *words, under=()):
    command = [*under, asked["binary"], "attend", "--input", "in.safetensors", "--output", output, *options(asked), *words]
    return subprocess.run(command, capture_output=True, text=True)


def how(done):
    """What an attend that failed says: (how it ended, why)."""
    said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit status {done.returncode}")
    if done.returncode < 0:
        return "crashed", f"killed by signal {-done.returncode}"
    if done.returncode == 2:
        return ("absent" if "has no backward pass" in said else "refused"), said
    return "failed", said


def distance(found, true):
    """Relative L2 distance; NaN when only one of them is infinite somewhere."""
    pairs = [(a, b) for a, b in zip(found, true) if a != b]
    apart = sum((a - b) ** 2 for a, b in pairs)
    return (apart / sum(b * b for b in true if b * b < float("inf"))) ** 0.5 if pairs else 0.0


def farthest(found, true):
    """The largest distance of a number, relative to itself and to the root mean square of all."""
    size = (sum(b * b for b in true) / len(true)) ** 0.5
    return max(abs(a - b) / (abs(b) + size) for a, b in zip(found, true)) if size else 0.0


def compare(asked):
    on_gpu = ["--device", "cuda", "--kernel", asked["kernel"], "--dtype", asked["dtype"]]
    done = attend(asked, "gpu.safetensors", *on_gpu)
    if done.returncode:
        return dict(zip(("ended", "reason"), how(done)))
    cpu = attend(asked, "cpu.safetensors", "--kernel", "tiled", "--dtype", "f32", "--threads", "1")
    if cpu.returncode:
        return {"ended": "failed", "reason": f"on the CPU: {how(cpu)[1]}"}
    ours, true = (tensors.arrays(f"{device}.safetensors") for device in ("gpu", "cpu"))
    # The input is bf16, which f16 and f32 hold.
    errors = {name: distance(ours[name], true[name]) for name in true}
    about = {"errors": errors, "allowed": ALLOWED[asked["dtype"]]}
    allowed = {name: LSE_ALLOWED if name == "lse" else about["allowed"] for name in errors}
    wrong = [
        f"{name} {error:.1e} off, {allowed[name]:.0e} allowed" for name, error in errors.items() if not error <= allowed[name]
    ]
    single = {name: farthest(ours[name], true[name]) for name in errors if name != "lse" and not wrong}
    most = FARTHEST * about["allowed"]
    wrong += [f"a number of {name} {error:.1e} off, {most:.0e} allowed" for name, error in single.items() if not error <= most]
    about["farthest"] = single
    if asked.get("twice") and not wrong:
        attend(asked, "again.safetensors", *on_gpu)
        again = tensors.arrays("again.safetensors")
        # dq may be summed in any order (kernels/README.md).
        wrong = [f"{name} differs in a second pass" for name in errors if name != "dq" and again[name] != ours[name]]
    return about | ({"ended": "wrong", "reason": "; ".join(wrong)} if wrong else {})


def sanitize(asked):
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"
    )
    if tool is None:
        return {"ended": "absent", "reason": "compute-sanitizer is not installed"}
    on_gpu = ["--device", "cuda", "--kernel", asked["kernel"], "--dtype", asked["dtype"]]
    done = attend(asked, "gpu.safetensors", *on_gpu, under=[tool, "--tool", asked["tool"]])
    said = done.stdout + done.stderr
    sys.stderr.write(said)
    summary = SUMMARY.findall(said)
    if not summary:
        ended, reason = how(done)
        return {"ended": ended if ended in ("refused", "absent") else "unfinished", "reason": reason}
    findings = sum(map(int, summary))
    return {"findings": findings} | ({"ended": "wrong", "reason": f"{asked['tool']}: {findings} findings"} if findings else {})


def main(asked):
    tensors.write("in.safetensors", asked["shape"])
    print(
        json.dumps(
            {
                "case": {key: asked[key] for key in ("kernel", "shape", "mask", "dtype", "backward")},
                **(sanitize if "tool" in asked else compare)(asked),
            }
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
