"""Makes the tiny random checkpoints of this folder and what they must give.

    pip install torch transformers safetensors
    python tests/checkpoints/make.py            # or only some, by their names

Each folder is a Hugging Face checkpoint with random weights, and `expected.safetensors`: `tokens` I64 [1, L], `logits`
F32 [1, L, vocab] of `transformers` in f32 with eager attention, and `greedy` I64 [N], what follows when always the
likeliest token is taken. Some have `evicted` F32 [1, L, vocab] too: logits where the tokens from EVICT_AFTER on do not
see what StreamingLLM (4 sinks, 12 tokens in all) evicts after so many tokens. Weights are larger than a fresh model's, so that attention is not flat.
"""

import json
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
TOKENS, GREEDY = 40, 24
EVICT_AFTER, SINKS, KEPT = 24, 4, 12
EVICTED = ["llama", "mistral", "gemma2", "qwen3"]

SMALL = dict(
    vocab_size=120,
    hidden_size=32,
    intermediate_size=72,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    attention_dropout=0.0,
)


def rope(kind, **values):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **values))


def longrope(original):
    short, long = [1.0, 1.1, 1.3, 2.0], [1.2, 2.5, 3.9, 4.3]
    return dict(original_max_position_embeddings=original, **rope("longrope", short_factor=short, long_factor=long))


CASES = {
    "llama": ("Llama", {}),
    "llama-bias-tied": ("Llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "llama-odd": ("Llama", dict(hidden_size=40, num_attention_heads=5, num_key_value_heads=1, intermediate_size=50)),
    "llama3": (
        "Llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "linear": ("Llama", rope("linear", factor=4.0)),
    # The prompt is longer than the 16 tokens from which on the base grows.
    "dynamic": ("Llama", dict(max_position_embeddings=16, **rope("dynamic", factor=2.0))),
    "yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    # The prompt and what follows it are longer than the original context, and shorter.
    "longrope": ("Phi3", longrope(32)),
    "longrope-short": ("Phi3", longrope(96)),
    "mistral": ("Mistral", dict(sliding_window=15)),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=16, num_hidden_layers=3)),
    "phi3": ("Phi3", dict(sliding_window=30)),
    # Phi 4 mini's: three quarters of each head are rotated, by half as many factors as that has channels.
    "phi4-mini": (
        "Phi3",
        dict(
            original_max_position_embeddings=96,
            tie_word_embeddings=True,
            **rope(
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.2, 1.5],
                long_factor=[1.2, 2.5, 3.9],
            ),
        ),
    ),
    "gemma2": (
        "Gemma2",
        dict(head_dim=16, sliding_window=8, query_pre_attn_scalar=24, num_hidden_layers=4, tie_word_embeddings=True),
    ),
    "llama-f16": ("Llama", {}),
    "qwen3-bf16": ("Qwen3", dict(head_dim=16)),
    "llama-sharded": ("Llama", dict(num_hidden_layers=3)),
}


def greedy(model, tokens):
    """Token by token, with the cache."""
    out, cache, following = [], None, tokens
    with torch.no_grad():
        for _ in range(GREEDY):
            result = model(following, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            following = result.logits[:, -1:].argmax(-1)
            out.append(int(following))
    return out


def evicted(model, tokens):
    """The mask of an eviction, in every layer together with the layer's window."""
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None, :]
    stays = (j < SINKS) | (j >= EVICT_AFTER - (KEPT - SINKS))
    seen = (j <= i) & ((i < EVICT_AFTER) | stays)

    def additive(seen):
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]

    window = getattr(model.config, "sliding_window", None)
    near = additive(seen & (i - j < window)) if window else additive(seen)
    family = model.config.model_type
    mask = dict(full_attention=additive(seen), sliding_attention=near) if family == "gemma2" else near
    if family.startswith("qwen"):
        mask = dict(full_attention=additive(seen))
    with torch.no_grad():
        return model(tokens, attention_mask=mask, use_cache=False).logits.contiguous()


def tokenizer(folder, vocab_size):
    """A word for each token: w4, w5, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def make(name, family, changes):
    seed = sum(map(ord, name))
    torch.manual_seed(seed)
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**{**SMALL, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        scale = 0.3 if parameter.dim() > 1 else 0.2
        noise = torch.randn_like(parameter) * scale
        parameter.data = noise + (1.0 if "norm" in parameter_name and family != "Gemma2" else 0.0)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}.get(name.split("-")[-1], torch.float32)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size="60KB" if name.endswith("sharded") else "5GB")
    # In f32, from the weights as they were rounded (and RoPE's frequencies as they were not).
    model = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.randint(3, config.vocab_size, (1, TOKENS))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
    expected = dict(tokens=tokens, logits=logits.contiguous(), greedy=torch.tensor(greedy(model, tokens)))
    if name in EVICTED:
        expected["evicted"] = evicted(model, tokens)
    if name == "llama":
        tokenizer(folder, config.vocab_size)
    save_file(expected, folder / "expected.safetensors")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: std of logits {logits.std():.3f}, {size / 1024:.0f} KiB")


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        make(name, *CASES[name])
    record = dict(torch=torch.__version__, transformers=transformers.__version__)
    (HERE / "made-with.json").write_text(json.dumps(record, indent=2) + "\n")
