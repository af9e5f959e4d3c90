"""Training of DMS gates on a frozen SmolLM2-135M: kvsieve and PyTorch in turn, tokens per second.

    python3 benches/peers/distil.py --kvsieve target/release/kvsieve --length 1024 --window 256 --weights bf16

Needs torch in its Python. PyTorch's side is the same work on a model of the same shape with random weights: a forward pass of
the teacher without gradients, one of the student whose keys have the additive bias of relaxed decisions, the KL divergence over
the queries behind the first window, and the backward pass to the gates alone; bf16 means all of the model in bf16 and gates in f32.
"""

import argparse
import json
import math
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

LAYERS, HIDDEN, Q_HEADS, KV_HEADS, DIM, FFN, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
MODEL = "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "models/text/python-reference.txt"


class Peer:
    """The model of PyTorch, and its gates."""

    def __init__(self, dtype, length, window):
        torch.manual_seed(1)
        matrix = lambda rows, width: (torch.randn(rows, width) / math.sqrt(width)).to(dtype)
        self.embedding = matrix(VOCAB, HIDDEN)
        shapes = [((Q_HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)]
        self.layers = [[matrix(*shape) for shape in shapes] for _ in range(LAYERS)]
        self.norm = torch.ones(HIDDEN, dtype=dtype)
        self.gates = [torch.nn.Linear(HIDDEN, KV_HEADS) for _ in range(LAYERS)]
        for gate in self.gates:
            torch.nn.init.normal_(gate.weight, std=0.002)
        self.optimizer = torch.optim.AdamW([p for gate in self.gates for p in gate.parameters()], lr=1e-4)
        at = torch.arange(length)
        angles = at[:, None] * 1e5 ** (-torch.arange(0, DIM, 2) / DIM)[None, :]
        self.turn = [f(torch.cat([angles, angles], 1)).to(dtype) for f in (torch.cos, torch.sin)]
        causal = torch.full((length, length), -torch.inf).triu(1)
        self.causal, self.behind = causal.to(dtype), (at[:, None] - at[None, :] >= window).to(dtype)
        self.length, self.window = length, window

    def rotate(self, x):
        cos, sin = self.turn
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    def forward(self, tokens, gated):
        x = F.embedding(tokens, self.embedding)[None]
        evicted = []
        for (qkv, out, gate_up, down), gate in zip(self.layers, self.gates):
            n = F.rms_norm(x, (HIDDEN,), self.norm, 1e-5)
            heads = F.linear(n, qkv).view(1, self.length, -1, DIM).transpose(1, 2)
            q, k, v = heads.split([Q_HEADS, KV_HEADS, KV_HEADS], 1)
            q, k = self.rotate(q), self.rotate(k)
            if gated:
                u = torch.rand(1, self.length, KV_HEADS).clamp(1e-6, 1 - 1e-6)
                z = (100 * gate(n.float()) - 5 + torch.log(u / (1 - u))) / 0.1
                evicted.append(torch.sigmoid(z))
                bias = F.logsigmoid(-z).to(x.dtype).transpose(1, 2)[:, :, None, :]
                bias = (self.causal + self.behind * bias).repeat_interleave(Q_HEADS // KV_HEADS, 1)
                o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
            else:
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + F.linear(o.transpose(1, 2).reshape(1, self.length, -1), out)
            gate_part, up = F.linear(F.rms_norm(x, (HIDDEN,), self.norm, 1e-5), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate_part) * up, down)
        n = F.rms_norm(x, (HIDDEN,), self.norm, 1e-5)[0, self.window :]
        return F.log_softmax(F.linear(n, self.embedding).float(), -1), evicted

    def step(self):
        tokens = torch.randint(0, VOCAB, (self.length,))
        with torch.no_grad():
            teacher, _ = self.forward(tokens, False)
        student, evicted = self.forward(tokens, True)
        loss = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        loss = loss + F.relu(0.5 - torch.stack(evicted).mean())
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for gate in self.gates for p in gate.parameters()], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def of_torch(peer, steps):
    began = time.perf_counter()
    for _ in range(steps):
        peer.step()
    return steps * peer.length / (time.perf_counter() - began)


def of_kvsieve(args):
    """Tokens per second of the first steps of a long run, which is stopped then: a whole run of few steps would evict nothing."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "gates"
        command = [args.kvsieve, "train", "--method", "dms", "--model", MODEL, "--text", TEXT, "--steps", 1000]
        command += ["--length", args.length, "--window", args.window, "--weights", args.weights]
        command += ["--threads", args.threads, "--out", out]
        run = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True)
        try:
            while run.poll() is None:
                time.sleep(0.2)
                log = out / "training.jsonl"
                lines = log.read_text().splitlines(keepends=True) if log.exists() else []
                if lines and lines[0].endswith("\n"):
                    return json.loads(lines[0])["tokens_per_second"]
            raise SystemExit(run.stderr.read())
        finally:
            run.kill()
            run.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kvsieve", default="target/release/kvsieve")
    parser.add_argument("--weights", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    peer = Peer(torch.float32 if args.weights == "f32" else torch.bfloat16, args.length, args.window)
    peer.step()
    rounds = []
    for _ in range(args.rounds):
        rounds.append((of_kvsieve(args), of_torch(peer, 3)))
        print("kvsieve {:.1f}, PyTorch {:.1f} tokens/s".format(*rounds[-1]), flush=True)
    ours, theirs = (statistics.median(side) for side in zip(*rounds))
    ratio = statistics.median(a / b for a, b in rounds)
    print(f"{args.weights}, {args.length} tokens, medians: kvsieve {ours:.1f}, PyTorch {theirs:.1f}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
