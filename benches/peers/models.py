#!/usr/bin/env python3
"""Compare whole models on one CPU: kvsieve and Hugging Face's transformers with PyTorch SDPA, taking turns in one run.

    python3 benches/peers/models.py                      # the built-in model, SmolLM2 if it is there, and the shape of Llama 3.2 1B
    python3 benches/peers/models.py --only builtin --out results/models

README.md beside this file says what is timed and how to read the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the source tree stays as it is

import compare  # noqa: E402
from compare import ROOT, Report, Worker, shown  # noqa: E402

compare.PACKAGES += ["transformers", "gguf", "accelerate"]
ROUNDS = 5
SMOLLM2 = ROOT / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"  # by scripts/fetch-smollm2
LARGE = dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
             intermediate_size=8192, vocab_size=128256, max_position_embeddings=4096, rms_norm_eps=1e-5,
             tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None)


@dataclasses.dataclass
class Case:
    model: str  # "builtin", "smollm2", or "1B": random weights in the shape of Llama 3.2 1B
    dtype: str
    prompt_tokens: int
    new_tokens: int


# How many times as fast a prompt is to be, where that is more than as fast.
PROMPT_GOALS = {("smollm2", "f32"): 1.3, ("smollm2", "bf16"): 2}

CASES = [Case("builtin", dtype, 2048, 128) for dtype in ("f32", "bf16")]
CASES += [Case("smollm2", dtype, 1500, 64) for dtype in ("f32", "bf16") if SMOLLM2.exists()]
CASES += [Case("1B", dtype, 512, 16) for dtype in ("f32", "bf16")]


class Transformers:
    """The model as transformers runs it: SDPA, its own growing cache, the logits of the last token alone."""

    def __init__(self, threads: int) -> None:
        import torch
        import transformers

        self.torch, self.transformers = torch, transformers
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        transformers.utils.logging.disable_progress_bar()

    def folder(self, case: Case, scratch: Path) -> Path:
        """A folder with the model in the type of the case."""
        folder, dtype = scratch / f"{case.model}-{case.dtype}", self.dtype(case)
        load = self.transformers.AutoModelForCausalLM.from_pretrained
        if case.model == "builtin":
            model = load(ROOT / "models" / "builtin", dtype=dtype)
        elif case.model == "smollm2":
            widened = load(SMOLLM2.parent, gguf_file=SMOLLM2.name, dtype=dtype)
            del widened.config.quantization_config  # with it transformers does not save what it widened
            model = type(widened)(widened.config).to(dtype)
            model.load_state_dict(widened.state_dict())
        else:
            model = self.transformers.LlamaForCausalLM(self.transformers.LlamaConfig(**LARGE)).to(dtype)
        model.save_pretrained(folder)
        return folder

    def dtype(self, case: Case) -> Any:
        return {"f32": self.torch.float32, "bf16": self.torch.bfloat16}[case.dtype]

    def open(self, case: Case, folder: Path) -> None:
        self.model = self.transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=self.dtype(case), attn_implementation="sdpa").eval()

    def run(self, case: Case, prompt: list[int]) -> tuple[float, float, list[int]]:
        """Nanoseconds of the prompt and of a step (median), and the likeliest tokens."""
        with self.torch.inference_mode():
            tokens, times, chosen = self.torch.tensor([prompt]), [], []
            cache = self.transformers.DynamicCache(config=self.model.config)
            for _ in range(case.new_tokens):
                start = time.perf_counter_ns()
                logits = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                tokens = logits[:, -1].argmax(-1, keepdim=True)
                chosen.append(int(tokens))
                times.append(time.perf_counter_ns() - start)
        return times[0], statistics.median(times[1:]), chosen


def measure(case: Case, worker: Worker, peer: Transformers, folder: Path, threads: int) -> dict[str, Any]:
    """Samples of both sides, in turn; the first of each warms up and is not counted."""
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompt = [int(token) for token in peer.torch.randint(2, vocab, (case.prompt_tokens,))]
    peer.open(case, folder)
    samples: dict[str, Any] = {name: [] for name in ("prefill", "peer_prefill", "step", "peer_step")}
    for turn in range(ROUNDS + 1):
        own = worker.ask("generate", model=str(folder), threads=threads, prompt=prompt, new_tokens=case.new_tokens)
        times = peer.run(case, prompt)
        if turn:
            for name, value in zip(samples, (own["prefill_ns"], times[0], own["step_ns"], times[1])):
                samples[name].append(value)
    same = next((at for at, (a, b) in enumerate(zip(own["tokens"], times[2])) if a != b), case.new_tokens)
    return {**dataclasses.asdict(case), **samples, "same_tokens": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["builtin", "smollm2", "1B"], help="this model alone")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of both sides (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write table.md and samples.json there")
    parser.add_argument("--env", type=Path, metavar="DIR", default=ROOT / "target" / "peers-env",
                        help="Python environment to use, made if it is not there (default: target/peers-env)")
    args = parser.parse_args()
    compare.enter_environment(args.env, Path(__file__))

    worker, peer, report = Worker(), Transformers(args.threads), Report()
    facts = {**worker.ask("info"), "torch": peer.torch.__version__, "transformers": peer.transformers.__version__,
             "threads": args.threads, "load_before": os.getloadavg()[0]}
    for text in (
        "# kvsieve and transformers on one CPU\n",
        f"- CPU: {facts['model']}, {facts['cores']} cores, {args.threads} threads; load {facts['load_before']:.1f}",
        f"- transformers {facts['transformers']}, PyTorch {facts['torch']}, SDPA",
        "- Milliseconds, medians with 95 % bootstrap intervals. A ratio above 1 means that kvsieve is faster.",
    ):
        report.line(text)
    heads = ["model", "what", "kvsieve, ms", "transformers, ms", "ratio", "goal", "met"]
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in [case for case in CASES if args.only in (None, case.model)]:
            result = measure(case, worker, peer, peer.folder(case, Path(scratch)), args.threads)
            results.append(result)
            for what, goal, own, theirs in (
                (f"prompt of {case.prompt_tokens} tokens", PROMPT_GOALS.get((case.model, case.dtype), 1),
                 result["prefill"], result["peer_prefill"]),
                (f"a token after {case.prompt_tokens}", 2, result["step"], result["peer_step"]),
            ):
                ratios = [b / a for a, b in zip(own, theirs)]
                met = "yes" if statistics.median(ratios) >= goal else "no"
                report.row("Whole models", heads, [f"{case.model}, {case.dtype}", what, shown([a / 1e6 for a in own]),
                                                   shown([b / 1e6 for b in theirs]), shown(ratios), f"≥ {goal}x", met])
    report.line("\nGreedy tokens that both gave alike before the first other one: "
                + ", ".join(f"{r['model']} {r['dtype']} {r['same_tokens']} of {r['new_tokens']}" for r in results) + ".")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "table.md").write_text("\n".join(report.lines) + "\n")
        (args.out / "samples.json").write_text(json.dumps({**facts, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
