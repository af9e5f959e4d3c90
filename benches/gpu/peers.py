"""PyTorch and Triton on the same GPU: how exact they are, and how fast. Every function answers None without them."""

import importlib.util
import os

import tensors

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    torch = None

SDPA = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


def name():
    """What there is, in words."""
    if torch is None or not torch.cuda.is_available():
        return None
    return f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}"


def _repeated(x, like):
    return x.repeat_interleave(like.shape[1] // x.shape[1], 1)


def _mask(q, k, causal, window):
    """Which keys each query sees, aligned at the bottom right; None for all."""
    if not causal:
        return None
    own = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2], device=q.device)[None]
    return (key <= own) & (key > own - (window or k.shape[2] + q.shape[2]))


def errors(path, dtype, causal, window, softcap):
    """Relative L2 errors of PyTorch's o, dq, dk and dv in `dtype` against f64, over the file's tensors."""
    if name() is None:
        return None
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    stored = {key: value.to("cuda") for key, value in tensors.read(path, torch).items()}

    def attend(kind):
        q, k, v = (stored[key].detach().to(kind).clone().requires_grad_() for key in ("q", "k", "v"))
        mask = _mask(q, k, causal, window)
        keys, values = _repeated(k, q), _repeated(v, q)
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

    torch.backends.cuda.matmul.allow_tf32 = False
    found, true = attend(kind), attend(torch.float64)
    distance = [float((a - b).norm() / b.norm()) for a, b in zip(found, true)]
    return dict(zip(("o", "dq", "dk", "dv"), distance))


def gradient_errors(path, output, causal, window, softcap):
    """Relative L2 errors of the gradients in `output`, of the problem in `path`, against f64."""
    if name() is None:
        return None
    stored = {key: value.to("cuda").double() for key, value in tensors.read(path, torch).items()}
    q, k, v = (stored[key].requires_grad_() for key in ("q", "k", "v"))
    s = q @ _repeated(k, q).transpose(-1, -2) / q.shape[-1] ** 0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    mask = _mask(q, k, causal, window)
    s = s if mask is None else s.masked_fill(~mask, float("-inf"))
    (torch.softmax(s, -1).nan_to_num(0.0) @ _repeated(v, q)).backward(stored["do"])
    found = {key: value.to("cuda").double() for key, value in tensors.read(output, torch).items()}
    pairs = (("dq", q), ("dk", k), ("dv", v))
    return {key: float((found[key] - true.grad).norm() / true.grad.norm()) for key, true in pairs}


def median_ms(work, cold_bytes, rounds=20):
    """Median time of `work` by events, each round after as many bytes were read as the L2 holds twice."""
    cold = torch.zeros(cold_bytes // 4, device="cuda")
    samples = []
    for _ in range(rounds + 5):
        cold.sum()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end))
    return sorted(samples[5:])[rounds // 2]


def attention_ms(cell, l2_bytes):
    """Times of a cell's pass by name of who computes it; an error's first line where one cannot."""
    if name() is None:
        return {}
    length, batch, d = cell["context_tokens"], cell["batch"], cell["head_dim"]
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[cell["dtype"]]
    decode = cell["measure"] == "decode"
    q = torch.randn([batch, cell["q_heads"], 1 if decode else length, d], device="cuda", dtype=kind)
    k, v = (torch.randn([batch, cell["kv_heads"], length, d], device="cuda", dtype=kind) for _ in range(2))
    grouped, causal = cell["q_heads"] != cell["kv_heads"], cell["causal"] and not decode
    backward = cell["measure"] == "backward"
    found = {}

    def timed(label, forward):
        try:
            if backward:
                inputs = [x.detach().requires_grad_() for x in (q, k, v)]
                o = forward(*inputs)
                found[label] = median_ms(lambda: torch.autograd.grad(o, inputs, o, retain_graph=True), 2 * l2_bytes)
            else:
                found[label] = median_ms(lambda: forward(q, k, v), 2 * l2_bytes)
        except Exception as error:  # whatever a peer cannot do is told, not fatal
            found[label] = str(error).splitlines()[0] if str(error) else type(error).__name__

    for label, backend in SDPA.items():
        def sdpa(q, k, v, backend=getattr(SDPBackend, backend)):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        timed(label, sdpa)
    tutorial = os.environ.get("KVSIEVE_TRITON")
    if tutorial and not decode and not grouped:
        module = _load(tutorial)
        timed("triton", lambda q, k, v: module.attention(q, k, v, causal, d**-0.5))
    return found


def _load(path, loaded={}):
    if path not in loaded:
        about = importlib.util.spec_from_file_location("triton_tutorial", path)
        loaded[path] = importlib.util.module_from_spec(about)
        about.loader.exec_module(loaded[path])
    return loaded[path]
