"""What a token of a 32-layer model takes, beside the sum of its kernels. A step of plan.py.

    layers.py full|tiny KVSIEVE

The model is a Llama of random bf16 weights, 3 GB, written here. Its kernels are timed by ncu, each alone, in two runs that
differ by a few tokens: the difference is what these tokens' kernels take.
"""

import array
import collections
import csv
import json
import os
import shutil
import struct
import subprocess
import sys

import tensors

TOKENIZER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "checkpoints", "llama", "tokenizer.json")
METRIC = "gpu__time_duration.sum"
# Tokens of the two runs under ncu.
FEW, MORE = 2, 4


def config(tiny):
    heads, kv_heads, head_dim, intermediate = (2, 1, 32, 128) if tiny else (16, 8, 128, 5632)
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16",
        "num_hidden_layers": 32, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": heads * head_dim,
        "intermediate_size": intermediate, "vocab_size": 120, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": False,
    }  # fmt: skip


def weights(about):
    """Names and shapes, as Hugging Face has them."""
    hidden, wide, vocab = about["hidden_size"], about["intermediate_size"], about["vocab_size"]
    kv = about["num_key_value_heads"] * about["head_dim"]
    yield from (("model.embed_tokens", [vocab, hidden]), ("lm_head", [vocab, hidden]), ("model.norm", [hidden]))
    for layer in range(about["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, shape in [
            ("input_layernorm", [hidden]), ("post_attention_layernorm", [hidden]), ("self_attn.q_proj", [hidden, hidden]),
            ("self_attn.k_proj", [kv, hidden]), ("self_attn.v_proj", [kv, hidden]), ("self_attn.o_proj", [hidden, hidden]),
            ("mlp.gate_proj", [wide, hidden]), ("mlp.up_proj", [wide, hidden]), ("mlp.down_proj", [hidden, wide]),
        ]:  # fmt: skip
            yield f"{at}.{name}", shape


def write(folder, tiny):
    os.makedirs(folder)
    about, header, at = config(tiny), {}, 0
    for name, shape in weights(about):
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
        json.dump(about, file)
    shutil.copy(TOKENIZER, f"{folder}/tokenizer.json")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # Small enough that 32 layers neither vanish nor overflow: exponents are 6 less, so 1/64 of a normal number.
    block = array.array("H", (bits - (6 << 7) for bits in tensors.normal(999_983))).tobytes()
    with open(f"{folder}/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, at, len(block)):
            file.write(block[: at - start])


def generate(binary, tokens, under=()):
    words = [
        "generate",
        "--model",
        "model",
        "--prompt",
        "amber is the key of it",
        "--max-new-tokens",
        str(tokens),
        "--device",
        "cuda",
    ]
    done = subprocess.run([*under, binary, *words, "--json", "report.json"], capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        sys.exit(done.returncode if done.returncode > 0 else 1)
    with open("report.json", encoding="utf-8") as file:
        return json.load(file)


def kernels(ncu, binary, tokens):
    """Times of the kernels of a run in ns, by name."""
    under = [
        ncu,
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--metrics",
        METRIC,
        "--clock-control",
        "none",
        "--cache-control",
        "none",
    ]
    generate(binary, tokens, [*under, "--log-file", "ncu.csv", "--force-overwrite"])
    with open("ncu.csv", encoding="utf-8") as file:
        lines = [line for line in file if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    times = collections.defaultdict(list)
    for row in rows[1:]:  # the first holds the units
        times[row["Kernel Name"].split("(")[0]].append(float(row[METRIC].replace(",", "")))
    return times


def main(tiny, binary):
    write("model", tiny)
    report = generate(binary, MORE if tiny else 64)
    print(json.dumps({"step_ns": report["step_ns"], "tokens": len(report["tokens"])}), flush=True)
    ncu = shutil.which("ncu")
    if ncu is None:
        return
    few, more = (kernels(ncu, binary, tokens) for tokens in (FEW, MORE))
    # [launches, ns] of a token, the longest first.
    each = {
        name: [(f(more[name]) - f(few.get(name, []))) / (MORE - FEW) for f in (len, sum)]
        for name in sorted(more, key=lambda name: -sum(more[name]))
    }
    total = [sum(part) for part in zip(*each.values())]
    print(json.dumps({"kernels": total[0], "kernels_ns": total[1], "by_kernel": each}))


if __name__ == "__main__":
    main(sys.argv[1] == "tiny", sys.argv[2])
