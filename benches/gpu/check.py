"""Are the kernels right? Each against the f64 reference, and PyTorch's error in the same type as the measure."""

import json
import shutil
import subprocess

import peers
import tensors

# Errors that are allowed where PyTorch is not: several times what correct kernels show, far below a mistake.
ALONE = {"f32": 3e-6, "f16": 1e-3, "bf16": 8e-3}
# A result this exact is right whatever PyTorch's is: the rounding of f32 itself.
ROUNDING = 1e-6
SHAPES = {
    "a": (2, 4, 2, 130, 190, 64), "b": (1, 4, 1, 65, 300, 128), "c": (1, 3, 3, 37, 83, 96), "d": (2, 16, 2, 1, 3000, 128),
    "e": (1, 2, 1, 70, 70, 256), "f": (1, 2, 2, 40, 50, 40),
}  # fmt: skip
TINY_SHAPES = {"a": (1, 2, 1, 20, 33, 64), "d": (1, 4, 2, 1, 300, 64)}
MASKS = {"none": (), "causal": (True,), "window": (True, 50), "softcap": (True, None, 5.0)}


def options(causal=False, window=None, softcap=None):
    words = ["--causal"] if causal else []
    words += ["--window", str(window)] if window else []
    return words + (["--softcap", str(softcap)] if softcap else [])


def all(session, folder, tiny):
    """Every kernel, type and mask on every shape; how many are wrong."""
    wrong = compared = 0
    refused, without_gradients = {}, {"decode"}
    kernels = session.kernels
    with open(f"{session.out}/check.jsonl", "w", encoding="utf-8") as kept:
        for name, shape in (TINY_SHAPES if tiny else SHAPES).items():
            path = f"{folder}/{name}.safetensors"
            tensors.write(path, shape)
            # Every process opens the GPU anew: all masks on the first shape, one on the others.
            for mask, words in MASKS.items() if name == "a" else [("causal", MASKS["causal"])]:
                for dtype in ["bf16", "f16", "f32"]:
                    theirs = peers.errors(path, dtype, *padded(words))
                    for kernel in kernels:
                        backward = kernel not in without_gradients and shape[3] > 1
                        one, why = attend(session, folder, path, kernel, dtype, words, backward, refused)
                        if one and backward and "backward_median_ns" not in one:
                            without_gradients.add(kernel)
                        if one is None:
                            if why:
                                wrong += 1
                                session.say(f"WRONG {kernel} {dtype} {mask} {shape}: {why}")
                            continue
                        compared += 1
                        ours = {"o": one["drift"]["rel_l2"]}
                        if "backward_median_ns" in one:
                            ours |= peers.gradient_errors(path, f"{folder}/o.safetensors", *padded(words)) or {}
                        for result, error in ours.items():
                            most = max(ROUNDING, 2 * theirs[result]) if theirs else ALONE[dtype]
                            if not error <= most:
                                wrong += 1
                                session.say(f"WRONG {kernel} {dtype} {mask} {shape} {result}: {error:.1e}, {most:.1e} allowed")
                        kept.write(json.dumps({"shape": shape, "mask": mask, "errors": ours, "peer": theirs, "attend": one}) + "\n")
    for said, count in refused.items():
        session.say(f"refused {count} times: {said}")
    rule = "at most twice PyTorch's error in the same type" if peers.name() else "fixed limits, PyTorch is not here"
    session.say(f"{compared} passes compared ({rule}), {wrong} wrong")
    return wrong + (compared == 0)


def padded(words):
    return (list(words) + [False, None, None][len(words) :])[:3] if words else (False, None, None)


def attend(session, folder, path, kernel, dtype, words, backward, refused):
    """One pass; (its report, None), or (None, why it is wrong), or (None, None) where the kernel has no such pass."""
    arguments = ["attend", "--device", "cuda", "--input", path, "--output", f"{folder}/o.safetensors", "--json", f"{folder}/one.json"]
    arguments += ["--kernel", kernel, "--dtype", dtype, *options(*words)]
    status, _, err = session.kvsieve(*arguments, *(["--backward"] if backward else []))
    if status == 2 and backward:
        refused[err.strip()] = refused.get(err.strip(), 0) + 1
        status, _, err = session.kvsieve(*arguments)
    if status == 2:
        refused[err.strip()] = refused.get(err.strip(), 0) + 1
        return None, None
    if status:
        return None, err.strip()
    with open(f"{folder}/one.json", encoding="utf-8") as file:
        return json.load(file), None


def sanitize(session, folder):
    """compute-sanitizer over each kernel, where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        session.say("compute-sanitizer is not installed: not run")
        return
    tensors.write(f"{folder}/s.safetensors", (1, 4, 1, 65, 130, 128))
    for check in ["memcheck", "racecheck"]:
        for kernel in session.kernels:
            command = [tool, "--tool", check, "--error-exitcode", "9", session.binary, "attend", "--device", "cuda", "--causal"]
            command += ["--input", f"{folder}/s.safetensors", "--output", f"{folder}/o.safetensors", "--kernel", kernel]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, min(60.0, session.left_s())))
                said = "clean" if done.returncode == 0 else (done.stdout + done.stderr).strip().splitlines()[-1]
            except subprocess.TimeoutExpired:
                said = "stopped after a minute"
            session.say(f"compute-sanitizer {check} {kernel}: {said}")
