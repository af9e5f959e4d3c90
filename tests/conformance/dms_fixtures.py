#!/usr/bin/env python3
"""Write tests/checkpoints/qwen3-dms: a tiny random checkpoint as NVIDIA's Model-Optimizer leaves DMS models, and what its code says of it.

    git clone https://github.com/NVIDIA/Model-Optimizer && git -C Model-Optimizer checkout a2fbac7
    pip install torch==2.15.0 transformers==4.57.3 datasets accelerate safetensors tqdm
    TORCHDYNAMO_DISABLE=1 python3 tests/conformance/dms_fixtures.py --code Model-Optimizer/experimental/dms

The folder has what `extract_student_model` writes: no `architectures`, but an `auto_map` to code of its own. `expected.safetensors`
holds `tokens` I64 [1, L]; `normed` F32 [layers, L, hidden], the normed inputs of attention in the dense model; `logits_of_gates` F32
[layers, Hkv, L], what decides on the token before each; `logits` F32 [1, L, vocab] and `greedy` I64 [N] of the dense model, as in the other folders; and of the model that evicts,
in its training mode without noise and at a temperature at which decisions are hard, `evicted` F32 [1], the fraction over tokens that some
query leaves behind the window, and `kl` F32 [1], the mean divergence KL(dense, evicting) over the queries behind the first window.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

TO = Path(__file__).parents[1] / "checkpoints" / "qwen3-dms"
TOKENS, GREEDY, WINDOW = 40, 24, 6

parser = argparse.ArgumentParser()
parser.add_argument("--code", type=Path, required=True)
sys.path.insert(0, str(parser.parse_args().code))
from dms.core import DMSTrainingStateAux, prepare_attention_input  # noqa: E402
from models.qwen3.configuration_qwen3_dms import Qwen3ConfigDMS  # noqa: E402
from models.qwen3.modeling_qwen3_dms import Qwen3ForCausalLMDMS  # noqa: E402
from models.qwen3.train import AUTO_MAP_CONFIG  # noqa: E402

torch.manual_seed(5)
config = Qwen3ConfigDMS(
    vocab_size=120, hidden_size=32, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    dms_window_size=WINDOW, dms_paged_attention_block_size=4, dms_separate_alpha=True, dms_tau=1e-4, dms_compile_limit=None,
)  # fmt: skip
model = Qwen3ForCausalLMDMS(config).float()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
        elif "dms_proj_alpha" in name:
            # Some tokens go and some stay.
            parameter.copy_(0.02 * torch.randn_like(parameter))
        else:
            parameter.copy_(parameter + 0.12 * torch.randn_like(parameter))

tokens = torch.randint(3, 120, (1, TOKENS))
seen = {}


def remember(layer):
    def hook(attention, _, kwargs):
        seen[layer] = (kwargs["pre_attn_norm_hidden_states"], kwargs["post_attn_norm_hidden_states"], kwargs["position_embeddings"])

    return hook


for index, layer in enumerate(model.model.layers):
    layer.self_attn.register_forward_pre_hook(remember(index), with_kwargs=True)


def logits(dense):
    for layer in model.model.layers:
        layer.self_attn.dms_disable_eviction = dense
    shape = (config.num_hidden_layers, 1, config.num_key_value_heads, TOKENS)
    state = DMSTrainingStateAux(
        dms_teacher_mode=False, target_frac_to_close=0.5, current_step=0, grad_acc_step=0, process_index=0,
        noise=torch.zeros(shape), right_padding_size=0, kv_cache_shape=shape,
    )  # fmt: skip
    model.train()
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False, dms_state=state).logits


dense, by_layer = logits(True), {}
for index, layer in enumerate(model.model.layers):
    (before, after, (cos, sin)), attention = seen[index], layer.self_attn
    with torch.no_grad():
        *_, decided = prepare_attention_input(
            before, after, attention.q_proj, attention.k_proj, attention.v_proj, attention.q_norm, attention.k_norm, 16, cos, sin,
            attention.dms_proj_alpha_norm, attention.dms_proj_alpha, config.dms_alpha_per, config.dms_alpha_scale,
            config.dms_initial_alpha_offset, False, False, config.dms_tau,
            transformers.models.qwen3.modeling_qwen3.apply_rotary_pos_emb, False, None,
        )  # fmt: skip
    by_layer[index] = (after[0], decided[0])
gates = torch.stack([by_layer[index][1] for index in by_layer])
evicting = logits(False)
p, q = dense.log_softmax(-1).double(), evicting.log_softmax(-1).double()
kl = (p.exp() * (p - q)).sum(-1)[0, WINDOW + 1 :].mean()
# The decision on a token is the one behind it, and the last WINDOW + 1 tokens are left by no query.
decisions = []
for index, layer in enumerate(model.model.layers):
    (before, *_), attention = seen[index], layer.self_attn
    with torch.no_grad():
        a = attention.dms_proj_alpha(attention.dms_proj_alpha_norm(before)) * config.dms_alpha_scale - config.dms_initial_alpha_offset
    decisions.append(a[0, 1 : TOKENS - WINDOW] > 0)
evicted = torch.stack(decisions).float().mean()

model.save_pretrained(TO)
# What follows when always the likeliest token is taken, of the dense model.
plain = transformers.Qwen3ForCausalLM.from_pretrained(TO, attn_implementation="eager").float().eval()
greedy = tokens
with torch.no_grad():
    assert (plain(tokens).logits - dense).abs().max() < 1e-4
    while greedy.shape[1] < TOKENS + GREEDY:
        greedy = torch.cat([greedy, plain(greedy).logits[:, -1:].argmax(-1)], 1)
save_file(
    {
        "tokens": tokens,
        "normed": torch.stack([by_layer[index][0] for index in by_layer]).contiguous(),
        "logits_of_gates": gates.contiguous(),
        "logits": dense.contiguous(),
        "greedy": greedy[0, TOKENS:].clone(),
        "evicted": evicted.reshape(1),
        "kl": kl.float().reshape(1),
    },
    TO / "expected.safetensors",
)
path = TO / "config.json"
written = json.loads(path.read_text())
written.pop("architectures", None)
written["auto_map"] = AUTO_MAP_CONFIG
path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
print(f"kl {kl:.6f}, evicted {evicted:.3f}, nearest decision to 0: {gates.abs().min():.4f}")
