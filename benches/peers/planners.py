#!/usr/bin/env python3
"""The same question to `kvsieve plan` and to public planners that install with pip: parameters, and bytes of keys and values.

    python3 -m venv target/planners && target/planners/bin/pip install --no-deps llm-analysis==0.2.2 vramcalc==0.1.2 \
        fitcheck-llm==0.3.1 hf-mem==0.5.6 llm-mem-planner==0.2.2
    target/planners/bin/pip install fire transformers huggingface_hub httpx2 rich click
    cargo build --release && target/planners/bin/python benches/peers/planners.py

Each is handed the same `config.json`, without a hub. A dash: it says itself that it does not know such a model, or it does not
answer this question (hf-mem counts parameters in files only). Left out are those that need a hub or PyTorch for any answer
(`accelerate estimate-memory`, `hf-vram-calc`) and those that need a GPU.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import subprocess
import tempfile
from pathlib import Path

logging.disable(logging.CRITICAL)

import fitcheck.config_parser as fitcheck  # noqa: E402
from fitcheck.memory.inference import estimate_inference_memory  # noqa: E402
from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size  # noqa: E402
from llm_analysis.analysis import LLMAnalysis  # noqa: E402
from llm_analysis.config import ModelConfig, dtype_configs, gpu_configs  # noqa: E402
from llm_mem_planner import cli as planner  # noqa: E402
from vramcalc.estimate import estimate  # noqa: E402

TOKENS = 32_768


def llama(architecture: str, kind: str, sizes: str, **more) -> dict:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    config = dict(zip(names, map(int, sizes.split())))
    return config | {"architectures": [architecture], "model_type": kind, "max_position_embeddings": 131_072,
                     "tie_word_embeddings": False, "torch_dtype": "bfloat16"} | more


MODELS = {
    "Llama-2-7B": llama("LlamaForCausalLM", "llama", "4096 32 32 32 11008 32000"),
    "Llama-3-8B (GQA)": llama("LlamaForCausalLM", "llama", "4096 32 32 8 14336 128256"),
    "Mistral-7B-v0.1 (window)": llama("MistralForCausalLM", "mistral", "4096 32 32 8 14336 32000", sliding_window=4096),
    "Qwen3-4B (wide heads)": llama(
        "Qwen3ForCausalLM", "qwen3", "2560 36 32 8 9728 151936", head_dim=128, tie_word_embeddings=True
    ),
    "Gemma-2-9B (every other)": llama(
        "Gemma2ForCausalLM", "gemma2", "3584 42 16 8 14336 256000", head_dim=256, tie_word_embeddings=True, sliding_window=4096
    ),
    "DeepSeek-V3 (MLA, MoE)": llama(
        "DeepseekV3ForCausalLM", "deepseek_v3", "7168 61 128 128 18432 129280",
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3,
    ),
}


def kvsieve(path: Path, _: dict) -> tuple[float, float]:
    command = ["target/release/kvsieve", "plan", "--model", str(path), "--gpu", "a100-80gb", "--context", str(TOKENS)]
    plan = json.loads(subprocess.run([*command, "--json", "-"], capture_output=True, check=True).stdout)
    return plan["parameters"], next(term["prefill_bytes"] for term in plan["terms"] if term["term"] == "kv")


def llm_analysis(_: Path, config: dict) -> tuple[float, float]:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    model = ModelConfig(
        "model", config["num_hidden_layers"], config["num_attention_heads"], hidden, config["vocab_size"],
        num_key_value_heads=config["num_key_value_heads"], ffn_embed_dim=ffn, expansion_ratio=ffn / hidden,
        model_type=config["model_type"],
    )
    analysis = LLMAnalysis(model, gpu_configs["a100-sxm-80gb"], dtype_configs["w16a16e16"])
    return analysis.get_num_params_total(), analysis.get_memory_kv_cache_per_layer(1, TOKENS) * model.num_layers


def vramcalc(path: Path, _: dict) -> tuple[float, float]:
    answer = estimate(str(path), seq_len=TOKENS).to_dict()
    return answer["weights"] / 2, answer["kv_cache"]


def fitcheck_llm(path: Path, _: dict) -> tuple[float, float]:
    fitcheck.hf_hub_download = lambda **_: str(path)
    fitcheck._reported_param_count = lambda *_: None
    with contextlib.redirect_stderr(io.StringIO()):
        model = fitcheck.fetch_model_config("a/model")
    return model.num_params, estimate_inference_memory(model, "bf16", TOKENS).kv_cache_mib * 2**20


def hf_mem(_: Path, config: dict) -> tuple[None, float]:
    return None, compute_safetensors_kv_cache_size(config, "BF16", TOKENS)


def llm_mem_planner(_: Path, config: dict) -> tuple[float, float]:
    if "kv_lora_rank" not in config:
        raise ValueError("its formulas are those of latent attention")
    dims = planner.load_dims(config)
    total = planner.estimate_params(dims).total
    kv = planner.estimate_kv_cache_gib(dims, batch=1, seq_len=TOKENS, kv_dtype_bytes=2)
    return total() if callable(total) else total, kv * 2**30


OTHERS = {
    "llm-analysis": llm_analysis,
    "vramcalc": vramcalc,
    "fitcheck-llm": fitcheck_llm,
    "hf-mem": hf_mem,
    "llm-mem-planner": llm_mem_planner,
}


def answers(folder: Path, name: str, config: dict) -> dict[str, tuple[float | None, float | None]]:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    given = {"kvsieve": kvsieve(path, config)}
    for other, ask in OTHERS.items():
        try:
            given[other] = ask(path, config)
        except (ValueError, AssertionError, KeyError):
            given[other] = (None, None)
    return given


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = {name: answers(Path(folder), name, config) for name, config in MODELS.items()}
    for place, (what, unit) in enumerate([("parameters, 10^9", 1e9), (f"GiB of keys and values, bf16, {TOKENS:,} tokens", 2**30)]):
        print(f"{what}\n\n{'':25}" + "".join(f"{name:>17}" for name in ["kvsieve", *OTHERS]))
        for name, given in table.items():
            ours = given["kvsieve"][place]
            row = f"{name:25}{ours / unit:>17.3f}"
            for other in OTHERS:
                its = given[other][place]
                row += f"{'-':>17}" if its is None else f"{its / unit:>10.3f}{its / ours:>6.2f}x"
            print(row)
        print()


if __name__ == "__main__":
    main()
