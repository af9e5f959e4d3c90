"""Other attention kernels on the same GPU: how fast they are, and how exact PyTorch is. A step of plan.py.

    peers.py times flash|cudnn|fa3 '{"cells": [..], "samples": .., "l2_bytes": ..}'
    peers.py errors '[{"shape": [..], "causal": .., "window": .., "softcap": ..}, ..]'

Prints one object for each cell as it ends. flash and cudnn are PyTorch's scaled_dot_product_attention with that backend
alone, fa3 is FlashAttention-3 from the package fa3-fwd (forward passes and decode).

A sample is taken as kvsieve takes one, with a cold L2: first a kernel that only waits, so that the host has launched
everything before the GPU comes to it, then a sum over more memory than the L2 holds, then the pass between two events.
"""

import json
import sys
import tempfile
import time

import tensors

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    torch = None

BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
WARMUPS = 5


def ended(how, reason):
    print(json.dumps({"ended": how, "reason": reason}), flush=True)


def attention(peer):
    """(q, k, v, causal) -> o, all [B, H, L, D]; for fa3 [B, L, H, D]."""
    if peer == "fa3":
        from fa3_fwd_interface import flash_attn_func, flash_attn_with_kvcache

        def run(q, k, v, causal):
            if q.shape[1] == 1:
                return flash_attn_with_kvcache(q, k, v)
            return flash_attn_func(q, k, v, causal=causal)

        return run

    def run(q, k, v, causal):
        grouped = q.shape[1] != k.shape[1]
        with sdpa_kernel(getattr(SDPBackend, BACKENDS[peer])):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return run


def inputs(peer, cell):
    decode = cell["measure"] == "decode"
    kind = getattr(torch, DTYPES[cell["dtype"]])

    def drawn(heads, length):
        dims = [cell["batch"], length, heads] if peer == "fa3" else [cell["batch"], heads, length]
        return torch.randn([*dims, cell["head_dim"]], device="cuda", dtype=kind, requires_grad=cell["measure"] == "backward")

    length = cell["context_tokens"]
    return drawn(cell["q_heads"], 1 if decode else length), drawn(cell["kv_heads"], length), drawn(cell["kv_heads"], length)


def samples_ns(work, count, cold, waits):
    """Times of `work`; whether the host was always done before the GPU began."""
    samples, hidden = [], True
    for at in range(WARMUPS + count):
        before, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        before.record()
        launching = time.perf_counter()
        torch.cuda._sleep(waits)
        cold.sum()
        start.record()
        work()
        end.record()
        launched_ms = (time.perf_counter() - launching) * 1e3
        torch.cuda.synchronize()
        if at >= WARMUPS:
            samples.append(round(start.elapsed_time(end) * 1e6))
            hidden &= launched_ms < before.elapsed_time(start)
    return samples, hidden


def time_cells(peer, asked):
    try:
        attend = attention(peer)
    except ImportError as error:
        return ended("absent", f"{peer}: {error}")
    cold = torch.zeros(asked["l2_bytes"] // 2, device="cuda")
    for cell in asked["cells"]:
        q, k, v = inputs(peer, cell)
        causal = cell["causal"] and cell["measure"] != "decode"
        try:
            if cell["measure"] == "backward":
                o = attend(q, k, v, causal)
                gradient = torch.randn_like(o)
                work = lambda: torch.autograd.grad(o, (q, k, v), gradient, retain_graph=True)
            else:
                work = lambda: attend(q, k, v, causal)
            with torch.set_grad_enabled(cell["measure"] == "backward"):
                # About 0.1 ms of waiting, and more where the host needs longer: a GPU that rests between passes has the
                # more power for each.
                for waits in (200_000, 2_000_000, 20_000_000):
                    samples, hidden = samples_ns(work, asked["samples"], cold, waits)
                    if hidden:
                        break
        except RuntimeError as error:
            # What a peer does not offer is told; anything else ends the step.
            if not any(words in str(error) for words in ("No available kernel", "No viable backend")):
                raise
            print(json.dumps({"cell": cell, "refused": str(error).splitlines()[0]}), flush=True)
            continue
        print(json.dumps({"cell": cell, "samples_ns": samples, "hidden": hidden}), flush=True)


def repeated(x, like):
    return x.repeat_interleave(like.shape[1] // x.shape[1], 1)


def seen(q, k, causal=False, window=None, **_):
    """Which keys each query sees, aligned at the bottom right; None for all."""
    if not causal:
        return None
    own = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2], device=q.device)[None]
    return (key <= own) & (key > own - (window or k.shape[2] + q.shape[2]))


def attend(stored, kind, case):
    """o, dq, dk and dv in `kind`: by PyTorch's own attention, in f64 and with a soft-cap by products."""
    q, k, v = (stored[key].detach().to(kind).clone().requires_grad_() for key in ("q", "k", "v"))
    mask, softcap = seen(q, k, **case), case.get("softcap")
    keys, values = repeated(k, q), repeated(v, q)
    if softcap or kind == torch.float64:
        s = q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
        s = softcap * torch.tanh(s / softcap) if softcap else s
        s = s if mask is None else s.masked_fill(~mask, float("-inf"))
        o = torch.softmax(s, -1).nan_to_num(0.0).to(kind) @ values
    else:
        o = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        # A row that sees nothing has no output; PyTorch's backends differ there.
        o = o if mask is None else torch.where(mask.any(-1)[:, None], o, 0)
    o.backward(stored["do"].to(kind))
    return [x.double() for x in (o.detach(), q.grad, k.grad, v.grad)]


def print_errors(cases):
    torch.backends.cuda.matmul.allow_tf32 = False
    for case in cases:
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            tensors.write(file.name, case["shape"])
            stored = {key: value.to("cuda") for key, value in tensors.read(file.name, torch).items()}
        true = attend(stored, torch.float64, case)
        for dtype, kind in DTYPES.items():
            found = attend(stored, getattr(torch, kind), case)
            errors = {name: float((a - b).norm() / b.norm()) for name, a, b in zip(("o", "dq", "dk", "dv"), found, true)}
            print(
                json.dumps({"case": {"shape": case["shape"], "mask": case["mask"], "dtype": dtype}, "errors": errors}), flush=True
            )


if __name__ == "__main__":
    if torch is None or not torch.cuda.is_available():
        ended("absent", "PyTorch is not here, or sees no GPU")
    elif sys.argv[1] == "times":
        print(json.dumps({"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}), flush=True)
        time_cells(sys.argv[2], json.loads(sys.argv[3]))
    else:
        print_errors(json.loads(sys.argv[2]))
