"""One randomly initialised Llama attention layer and what it makes of seeded hidden states.

kvpress scores tokens of an attention module: it needs hidden states, weights and the cache. kvsieve starts from the
tensors. `Inputs` holds both views of the same numbers.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb

HIDDEN = 64
HEAD_DIM = 16
LAYERS = 8


@dataclasses.dataclass
class Inputs:
    """One input set: `q`, `k`, `v` after RoPE `[B, heads, T, D]`, and the layer that they come from."""

    name: str
    module: LlamaAttention
    hidden: Tensor
    position_embeddings: tuple[Tensor, Tensor]
    q: Tensor
    k: Tensor
    v: Tensor
    q_pre: Tensor
    k_pre: Tensor
    attention: Tensor  # [B, Hq, T, T]
    extra: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.k.shape[2]

    @property
    def kwargs(self) -> dict[str, object]:
        """What a press receives from the layer's forward call."""
        return {"position_embeddings": self.position_embeddings, "hidden_states": self.hidden}

    def tensors(self) -> dict[str, Tensor]:
        """What the input file holds."""
        weight = self.module.o_proj.weight.detach()
        # [hidden, Hq * D] as [1, Hq, D, hidden]: the matrix that takes a head's output to the hidden size.
        w_o = weight.T.reshape(1, self.module.config.num_attention_heads, HEAD_DIM, HIDDEN)
        named = {"q": self.q, "k": self.k, "v": self.v, "q_pre": self.q_pre, "k_pre": self.k_pre, "w_o": w_o}
        return {name: tensor.contiguous() for name, tensor in (named | self.extra).items()}

    def metadata(self) -> dict[str, str]:
        return {"rope_theta": str(float(self.module.config.rope_parameters["rope_theta"]))}


def make_inputs(
    name: str, seed: int, *, batch: int, q_heads: int, kv_heads: int, tokens: int, theta: float
) -> Inputs:
    """Draws a layer and hidden states and runs them once."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        num_hidden_layers=LAYERS,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        attn_implementation="eager",
    )
    module = LlamaAttention(config, layer_idx=0).eval()
    # kvpress hands the model's rotary embedding to each layer in the same way.
    module.rotary_emb = LlamaRotaryEmbedding(config)
    for projection in (module.q_proj, module.k_proj, module.v_proj, module.o_proj):
        torch.nn.init.normal_(projection.weight, std=HIDDEN**-0.5)
    # A common direction and correlated neighbours, as in real hidden states; white noise would make every token alike.
    noise = torch.randn(batch, tokens, HIDDEN)
    hidden = torch.empty_like(noise)
    hidden[:, 0] = noise[:, 0]
    for token in range(1, tokens):
        hidden[:, token] = 0.6 * hidden[:, token - 1] + 0.8 * noise[:, token]
    hidden += 0.7 * torch.randn(HIDDEN)

    position_embeddings = module.rotary_emb(hidden, torch.arange(tokens)[None])
    causal = torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]
    cache = DynamicCache()
    _, attention = module(hidden, position_embeddings, causal, past_key_values=cache)

    def heads(projection: torch.nn.Linear) -> Tensor:
        return projection(hidden).view(batch, tokens, -1, HEAD_DIM).transpose(1, 2)

    q_pre, k_pre = heads(module.q_proj), heads(module.k_proj)
    q, k = apply_rotary_pos_emb(q_pre, k_pre, *position_embeddings)
    keys, values = cache.layers[0].keys, cache.layers[0].values
    assert torch.equal(k, keys), "the keys of the cache are the rotated keys"
    # Some presses refuse eager attention, which was needed above for the attention weights.
    module.config._attn_implementation = "sdpa"
    return Inputs(name, module, hidden, position_embeddings, q, keys, values, q_pre, k_pre, attention)
