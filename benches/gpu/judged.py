"""Do policies and models on the GPU do what they do on the CPU? Scores and kept positions of each kind of policy; logits
of the tiny checkpoints beside those of `transformers`; the built-in model's answers, with a full and an evicted cache."""

import glob
import json
import os

import tensors

# Every kernel of kernels/score.cu, export.cu, select.cu and compact.cu is behind one of them.
POLICIES = [
    "streaming-llm", "knorm", "keydiff", "h2o", "h2o:age=true", "snapkv:window=16", "tova", "max-attention", "scissorhands",
    "snapkv:window=16+vnorm", "ada-snapkv:window=16", "pyramidkv:window=4", "knorm+global",
]  # fmt: skip
TINY_POLICIES = ["knorm", "h2o", "ada-snapkv:window=4"]
# Of the largest score: sums in another order. Products are exact in f32, and probabilities stay f32.
SCORES_ALLOWED = 1e-4
# Of the logits' standard deviation, by the type of the weights: cuBLAS rounds activations to it, and PyTorch that does so is
# 1.3% off in f16 and 5.3% in bf16.
LOGITS_ALLOWED = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 8e-2}
MODELS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "models")


def policies(session, folder, tiny):
    """How many policies judge otherwise than on the CPU."""
    wrong, least = 0, 1.0
    path = f"{folder}/judged.safetensors"
    tensors.write(path, (1, 2, 1, 9, 40, 64) if tiny else (2, 8, 4, 256, 1500, 128))
    names = TINY_POLICIES if tiny else POLICIES
    for policy in names:
        found = []
        for device in ["cpu", "cuda"]:
            output = f"{folder}/{device}.safetensors"
            arguments = ["--input", path, "--output", output, "--policy", policy, "--budget", "0.25", "--device", device]
            status, _, err = session.kvsieve("evict", *arguments)
            if status:
                wrong += 1
                session.say(f"WRONG {policy} on {device}: {err.strip()}")
                break
            found.append(tensors.arrays(output))
        else:
            why, same = differs(*found)
            least = min(least, same)
            if why:
                wrong += 1
                session.say(f"WRONG {policy}: {why}")
    session.say(f"{len(names)} policies compared with the CPU, {wrong} wrong; at least {100 * least:.2f}% of what is kept is the same")
    return wrong


def differs(cpu, gpu):
    """(what is wrong, or None; share of kept positions that are the same)."""
    if list(cpu["kept_len"]) != list(gpu["kept_len"]):
        return f"{list(gpu['kept_len'])} tokens kept, {list(cpu['kept_len'])} on the CPU", 0.0
    scores = cpu["scores"]
    size = max(abs(score) for score in scores)
    off = max(abs(a - b) for a, b in zip(scores, gpu["scores"]))
    if not off <= SCORES_ALLOWED * size:
        return f"scores off by {off:.1e} of {size:.1e}", 0.0
    lists, at, same = len(cpu["kept_len"]), 0, 0
    width, kv_len = len(cpu["kept"]) // lists, len(scores) // lists
    for index, count in enumerate(cpu["kept_len"]):
        here, there = (set(kept["kept"][index * width :][:count]) for kept in (cpu, gpu))
        same += len(here & there)
        bar = min(scores[index * kv_len + position] for position in here)
        # Where the two differ, scores are as good as equal.
        for position in there - here:
            if abs(scores[index * kv_len + position] - bar) > 2 * SCORES_ALLOWED * size:
                return f"list {index} keeps {position}, whose score is not among the best", 0.0
    return None, same / sum(cpu["kept_len"])


def models(session, folder, tiny):
    """How many models say something else than they should."""
    wrong = compared = 0
    for config in sorted(glob.glob(f"{MODELS}/*/config.json")):
        model = os.path.dirname(config)
        name = os.path.basename(model)
        if tiny and name not in ("llama", "qwen3-bf16"):
            continue
        expected = tensors.arrays(f"{model}/expected.safetensors")
        with open(f"{folder}/tokens.json", "w", encoding="utf-8") as file:
            json.dump({"tokens": [list(expected["tokens"])]}, file)
        with open(config, encoding="utf-8") as file:
            about = json.load(file)
        allowed = LOGITS_ALLOWED[about.get("torch_dtype") or about["dtype"]]
        for kernel in ["tiled", "naive"] if name == "llama" else ["tiled"]:
            arguments = ["--tokens", f"{folder}/tokens.json", "--output", f"{folder}/logits.safetensors", "--kernel", kernel]
            status, _, err = session.kvsieve("logits", "--model", model, *arguments, "--dtype", "f32", "--device", "cuda")
            compared += 1
            off = float("nan") if status else deviations(tensors.arrays(f"{folder}/logits.safetensors")["logits"], expected["logits"])
            if not off <= allowed:
                wrong += 1
                session.say(f"WRONG model {name}, {kernel}: {err.strip() or f'{off:.1e} deviations off, {allowed:.0e} allowed'}")
    session.say(f"{compared} passes of models compared with transformers, {wrong} wrong")
    answers(session, 40 if tiny else 1500, 3 if tiny else 64)
    return wrong


def deviations(found, expected):
    """The largest difference, in standard deviations of `expected`."""
    mean = sum(expected) / len(expected)
    deviation = (sum((x - mean) ** 2 for x in expected) / len(expected)) ** 0.5
    return max(abs(a - b) for a, b in zip(found, expected)) / deviation


def answers(session, words, new_tokens):
    """The built-in model's words on both devices, and its times; 16-bit types may part ways, so no difference is an error."""
    prompt = " ".join(["the key of amber is"] * (words // 5))
    for more in [[], ["--policy", "snapkv", "--budget", "0.25"], ["--policy", "h2o", "--budget", "0.25"]]:
        arguments = ["--model", "builtin", "--prompt", prompt, "--max-new-tokens", str(new_tokens), *more, "--json", "-"]
        reports = []
        for device in ["cpu", "cuda"]:
            status, out, err = session.kvsieve("generate", *arguments, "--device", device)
            if status:
                session.say(f"built-in model on {device} {' '.join(more)}: {err.strip()}")
                break
            reports.append(json.loads(out))
        else:
            cpu, gpu = reports
            same = next((at for at, (a, b) in enumerate(zip(cpu["tokens"], gpu["tokens"])) if a != b), len(cpu["tokens"]))
            session.say(
                f"built-in model, {gpu['prompt_tokens']} tokens {' '.join(more)}: first token {gpu['first_token_ns'] / 1e6:.2f} ms "
                f"(CPU {cpu['first_token_ns'] / 1e6:.2f}), then {(gpu['step_ns'] or 0) / 1e6:.3f} ms each (CPU {(cpu['step_ns'] or 0) / 1e6:.3f}); "
                f"the first {same} of {len(cpu['tokens'])} words are the same"
            )
