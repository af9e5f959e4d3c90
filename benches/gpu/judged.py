"""Do policies and models on the GPU do what they do on the CPU? Steps of plan.py.

judged.py full|tiny KVSIEVE policy POLICY          scores and kept positions
judged.py full|tiny KVSIEVE codes FORMAT           attention over keys and values in codes
judged.py full|tiny KVSIEVE model FOLDER KERNEL    logits beside those of transformers
judged.py full|tiny KVSIEVE answers FOLDER POLICY  the built-in model's words, and its times
"""

import json
import os
import subprocess
import sys

import tensors

# Of the largest score: sums in another order. Products are exact in f32, and probabilities stay f32.
SCORES_ALLOWED = 1e-4
# Scores that count queries whose attention passes a bar, means over two heads: some pass it in one order of sums alone.
COUNTS_ALLOWED = {"scissorhands": 2.0}
# Of the largest output: tiles of bf16 have what codes stand for rounded, and probabilities, where the CPU may have f32.
OUTPUTS_ALLOWED = {"f32": 1e-4, "bf16": 2e-2}
# Of the logits' standard deviation, by the type of the weights: cuBLAS rounds activations to it, and PyTorch that does so is
# 1.3% off in f16 and 5.3% in bf16.
LOGITS_ALLOWED = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 8e-2}


def kvsieve(binary, *words):
    """Runs it; what it printed. A failure ends this step."""
    done = subprocess.run([binary, *words], capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr)
        how = "crashed" if done.returncode < 0 else "refused" if done.returncode == 2 else "failed"
        said = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        end(how, f"{words[0]} {said[0]}")
    return done.stdout


def end(how, reason):
    print(json.dumps({"ended": how, "reason": reason}))
    sys.exit()


def policy(binary, tiny, name):
    tensors.write("in.safetensors", (1, 2, 1, 9, 40, 64) if tiny else (2, 8, 4, 256, 1500, 128))
    found = []
    for device in ("cpu", "cuda"):
        output = f"{device}.safetensors"
        words = ["--input", "in.safetensors", "--output", output, "--policy", name, "--budget", "0.25", "--device", device]
        kvsieve(binary, "evict", *words)
        found.append(tensors.arrays(output))
    why, same = differs(*found, COUNTS_ALLOWED.get(name))
    print(json.dumps({"policy": name, "same": same}))
    if why:
        end("wrong", why)


def codes(binary, tiny, name):
    for dtype, allowed in OUTPUTS_ALLOWED.items():
        for kernel, q_len in (("tiled", 20 if tiny else 300), ("decode", 1)):
            tensors.write("in.safetensors", (1, 2, 1, q_len, 83, 64) if tiny else (2, 8, 2, q_len, 1999, 128))
            words = ["--input", "in.safetensors", "--causal", "--dtype", dtype, "--kernel", kernel, "--kv-format", name]
            found = []
            for device in ("cpu", "cuda"):
                kvsieve(binary, "attend", *words, "--output", f"{device}.safetensors", "--device", device)
                found.append(tensors.arrays(f"{device}.safetensors")["o"])
            size = max(abs(x) for x in found[0])
            off = furthest(found[1], found[0]) / size
            print(json.dumps({"codes": name, "dtype": dtype, "kernel": kernel, "off_cpu": off, "allowed": allowed}))
            if not off <= allowed:
                end("wrong", f"{kernel} {dtype}: {off:.1e} of the largest output off the CPU's, {allowed:.0e} allowed")


def differs(cpu, gpu, allowed=None):
    """(what is wrong, or None; share of kept positions that are the same)."""
    if list(cpu["kept_len"]) != list(gpu["kept_len"]):
        return f"{list(gpu['kept_len'])} tokens kept, {list(cpu['kept_len'])} on the CPU", 0.0
    scores = cpu["scores"]
    size = max(abs(score) for score in scores)
    off = max(abs(a - b) for a, b in zip(scores, gpu["scores"]))
    allowed = allowed or SCORES_ALLOWED * size
    if not off <= allowed:
        return f"scores off by {off:.1e} of {size:.1e}", 0.0
    lists, same = len(cpu["kept_len"]), 0
    width, kv_len = len(cpu["kept"]) // lists, len(scores) // lists
    for index, count in enumerate(cpu["kept_len"]):
        here, there = (set(kept["kept"][index * width :][:count]) for kept in (cpu, gpu))
        same += len(here & there)
        bar = min(scores[index * kv_len + position] for position in here)
        # Where the two differ, scores are as good as equal.
        for position in there - here:
            if abs(scores[index * kv_len + position] - bar) > 2 * allowed:
                return f"list {index} keeps {position}, whose score is not among the best", 0.0
    return None, same / sum(cpu["kept_len"])


def model(binary, _, folder, kernel):
    expected = tensors.arrays(f"{folder}/expected.safetensors")
    with open("tokens.json", "w", encoding="utf-8") as file:
        json.dump({"tokens": [list(expected["tokens"])]}, file)
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        about = json.load(file)
    words = ["--model", folder, "--tokens", "tokens.json", "--output", "logits.safetensors", "--kernel", kernel]
    # One fixture is of what lies beyond its limit.
    kvsieve(binary, "logits", *words, "--dtype", "f32", "--device", "cuda", "--beyond-limit")
    allowed = LOGITS_ALLOWED[about.get("torch_dtype") or about["dtype"]]
    off = deviations(tensors.arrays("logits.safetensors")["logits"], expected["logits"])
    print(json.dumps({"model": os.path.basename(folder), "kernel": kernel, "off": off, "allowed": allowed}))
    if not off <= allowed:
        end("wrong", f"{off:.1e} deviations off, {allowed:.0e} allowed")


def deviations(found, expected):
    """The largest difference, in standard deviations of `expected`."""
    mean = sum(expected) / len(expected)
    deviation = (sum((x - mean) ** 2 for x in expected) / len(expected)) ** 0.5
    return furthest(found, expected) / deviation


def furthest(found, expected):
    """The largest difference; NaN where one is found, which max() would pass over."""
    return float("nan") if any(x != x for x in found) else max(abs(a - b) for a, b in zip(found, expected))


def answers(binary, tiny, folder, name):
    """16-bit types may part ways, so no difference of words is an error."""
    if not os.path.isdir(folder):
        end("absent", f"{folder} is not there")
    # Lists as the model was trained on, which it goes on with to the last token that it may.
    prompt = " ".join(["oar lamp wolf; bear saw sea; king tree;"] * (2 if tiny else 80)) + " oar"
    words = ["--model", folder, "--prompt", prompt, "--max-new-tokens", "3" if tiny else "64", "--json", "-"]
    words += [] if name == "full" else ["--policy", name, "--budget", "0.25"]
    cpu, gpu = (json.loads(kvsieve(binary, "generate", *words, "--device", device)) for device in ("cpu", "cuda"))
    if len(gpu["tokens"]) < 2:
        end("wrong", f"{len(gpu['tokens'])} tokens were written, and no step was taken")
    parted = (at for at, (a, b) in enumerate(zip(cpu["tokens"], gpu["tokens"])) if a != b)
    found = {
        "policy": name,
        "prompt_tokens": gpu["prompt_tokens"],
        "same_tokens": next(parted, len(cpu["tokens"])),
        "tokens": len(cpu["tokens"]),
    }
    for device, report in (("cpu", cpu), ("cuda", gpu)):
        # One token has no step.
        found[device] = {key: report.get(key) for key in ("first_token_ns", "step_ns")}
    print(json.dumps(found))


if __name__ == "__main__":
    size, binary, what, *words = sys.argv[1:]
    {"policy": policy, "codes": codes, "model": model, "answers": answers}[what](binary, size == "tiny", *words)
