#!/usr/bin/env python3
"""The same question to `kvsieve plan` and to public planners that install with pip: bytes of weights, and of keys and values.

    python3 -m venv target/planners && target/planners/bin/pip install llm-analysis==0.2.2
    cargo build --release && target/planners/bin/python benches/peers/planners.py

llm-analysis counts parameters from its own model files. Others are left out because they need a hub (`hf-mem`,
`accelerate estimate-memory`) or a GPU (`llmem`).
"""

from __future__ import annotations

import json
import logging
import subprocess

logging.disable(logging.CRITICAL)

from llm_analysis.analysis import LLMAnalysis  # noqa: E402
from llm_analysis.config import dtype_configs, gpu_configs, model_configs  # noqa: E402

MODELS = [
    ("llama-2-7b", "NousResearch_Llama-2-7b-hf"),
    ("llama-2-70b", "upstage_Llama-2-70b-instruct-v2"),
    ("opt-13b", "facebook_opt-13b"),
    ("opt-66b", "facebook_opt-66b"),
    ("opt-175b", "facebook_opt-175b"),
]
TOKENS = 2048


def ours(model: str) -> tuple[float, float, float]:
    command = ["target/release/kvsieve", "plan", "--model", model, "--gpu", "a100-80gb", "--context", str(TOKENS)]
    plan = json.loads(subprocess.run([*command, "--json", "-"], capture_output=True, check=True).stdout)
    weights = next(term["load_bytes"] for term in plan["terms"] if term["term"] == "weights")
    return plan["parameters"], weights, plan["kv_bytes_per_token"] * TOKENS


def theirs(model: str) -> tuple[float, float, float]:
    config = model_configs[model]
    analysis = LLMAnalysis(config, gpu_configs["a100-sxm-80gb"], dtype_configs["w16a16e16"])
    parameters = analysis.get_num_params_total()
    kv = analysis.get_memory_kv_cache_per_layer(1, TOKENS) * config.num_layers
    return parameters, 2 * parameters, kv


def main() -> None:
    print(f"bf16, {TOKENS:,} tokens, one sequence\n")
    print(f"{'':12}{'parameters':>29}{'weights':>29}{'keys and values':>29}")
    print(f"{'':12}" + f"{'kvsieve':>10}{'llm-analysis':>13}{'':6}" * 3)
    for name, other in MODELS:
        row = f"{name:12}"
        for unit, mine, its in zip([1e9, 2**30, 2**30], ours(name), theirs(other)):
            row += f"{mine / unit:>10.3f}{its / unit:>13.3f}{its / mine:>5.2f}x"
        print(row)


if __name__ == "__main__":
    main()
