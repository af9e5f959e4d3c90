//! A `config.json` or a GGUF header as an [`Architecture`].
//!
//! Only what decides bytes is read, so that more models are understood here than can be run; but what decides them must be
//! there: a missing field or an architecture that is not known is an error, never a default of our own. What a file may
//! leave out because its class in `transformers` says it (that Gemma ties its embeddings) is written out here.

use super::PlanError;
use super::architecture::{Architecture, Experts, Linear, Mla, Window};
use crate::model::GgufTensor;
use crate::model::config::Fields;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Architectures that are understood, and whether the embedding is tied where the file does not say.
const KNOWN: [(&str, bool); 16] = [
    ("LlamaForCausalLM", false),
    ("MistralForCausalLM", false),
    ("MixtralForCausalLM", false),
    ("Qwen2ForCausalLM", false),
    ("Qwen3ForCausalLM", false),
    ("Qwen3MoeForCausalLM", false),
    ("Qwen3NextForCausalLM", false),
    ("GemmaForCausalLM", true),
    ("Gemma2ForCausalLM", true),
    ("Gemma3ForCausalLM", true),
    ("Phi3ForCausalLM", false),
    ("DeepseekV2ForCausalLM", false),
    ("DeepseekV3ForCausalLM", false),
    ("GptOssForCausalLM", false),
    ("GPT2LMHeadModel", true),
    ("OPTForCausalLM", true),
];

/// Defaults of `Gemma3TextConfig` that its models' files leave out.
const GEMMA3_TEXT: [(&str, usize); 6] = [
    ("vocab_size", 262_208),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("max_position_embeddings", 131_072),
    ("sliding_window_pattern", 6),
];

/// Reads a `config.json`.
///
/// # Errors
/// When it cannot be read, is not JSON, lacks a field, or names an architecture that is not understood.
pub fn config(path: &Path) -> Result<Architecture, PlanError> {
    let wrong = |reason: String| PlanError::File { path: path.into(), reason };
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let map = match serde_json::from_str(&text) {
        Ok(Value::Object(map)) => map,
        Ok(_) => return Err(wrong("it must be a JSON object".into())),
        Err(error) => return Err(wrong(format!("it is not JSON: {error}"))),
    };
    let folder = path.parent().and_then(Path::file_name).unwrap_or(path.as_os_str());
    shape(&map, &folder.to_string_lossy()).map_err(wrong)
}

/// Keys of a `config.json` that say nothing of its bytes.
const NO_BYTES: [&str; 6] =
    ["hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps", "rope_theta", "rope_scaling"];

/// The shape of a model that is written as `LlamaForCausalLM:hidden_size=4096,...`, with the keys of a `config.json`.
///
/// # Errors
/// In words.
pub fn written(family: &str, keys: &str) -> Result<Architecture, String> {
    let mut map = Map::from_iter([("architectures".to_string(), json!([family]))]);
    for part in keys.split(',') {
        let (key, value) =
            part.split_once('=').ok_or_else(|| format!("'{part}' is no key=value, as hidden_size=4096"))?;
        let value = serde_json::from_str(value).unwrap_or_else(|_| json!(value));
        if map.insert(key.into(), value).is_some() {
            return Err(format!("it gives {key} twice"));
        }
    }
    let fields = Fields::new(&map, "");
    let shape = shape_of(&fields, &map, family)?;
    for key in NO_BYTES {
        fields.value(key);
    }
    fields.finish()?;
    Ok(shape)
}

/// The shape that the keys of a `config.json` describe.
///
/// # Errors
/// In words.
pub fn shape(map: &Map<String, Value>, name: &str) -> Result<Architecture, String> {
    shape_of(&Fields::new(map, ""), map, name)
}

/// The same, of fields that tell which keys were read.
fn shape_of(fields: &Fields<'_>, map: &Map<String, Value>, name: &str) -> Result<Architecture, String> {
    let named = fields.texts("architectures")?.unwrap_or_default();
    let known = || KNOWN.map(|(name, _)| name).join(", ");
    let [family] = named[..] else {
        return Err(fields.refuse("architectures", &format!("it must name one architecture; known: {}", known())));
    };
    if family == "Gemma3ForConditionalGeneration" {
        let text = map.get("text_config").and_then(Value::as_object).ok_or("text_config is missing")?;
        let mut text = text.clone();
        text.insert("architectures".into(), json!(["Gemma3ForCausalLM"]));
        // What the files leave out, as the class has it.
        for (key, value) in GEMMA3_TEXT {
            text.entry(key).or_insert(json!(value));
        }
        return shape(&text, name);
    }
    let Some(&(family, tied)) = KNOWN.iter().find(|(known, _)| *known == family) else {
        return Err(format!("architecture '{family}' is not understood; known: {}", known()));
    };
    let need = |key| fields.needed(key, fields.count(key)?);
    let tied = match fields.has("tie_word_embeddings") {
        true => fields.flag("tie_word_embeddings")?,
        false => tied,
    };
    if family == "GPT2LMHeadModel" {
        let (hidden, heads, positions) = (need("n_embd")?, need("n_head")?, need("n_positions")?);
        let ffn = fields.count("n_inner")?.unwrap_or(4 * hidden);
        let shape = [need("n_layer")?, hidden, heads, heads, divided(hidden, heads)?, ffn, need("vocab_size")?];
        return Ok(Architecture { positions, context: positions, gpt: true, tied, ..plain(name, shape) });
    }
    let [layers, hidden, heads, vocab] = ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
        .map(need)
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?[..]
    else {
        unreachable!("as many as were asked for")
    };
    let context = need("max_position_embeddings")?;
    if family == "OPTForCausalLM" {
        if fields.count("word_embed_proj_dim")?.is_some_and(|width| width != hidden) {
            return Err(fields.refuse("word_embed_proj_dim", "it must be hidden_size"));
        }
        let shape = [layers, hidden, heads, heads, divided(hidden, heads)?, need("ffn_dim")?, vocab];
        return Ok(Architecture { positions: context + 2, context, gpt: true, tied, ..plain(name, shape) });
    }
    let latent = family.starts_with("Deepseek");
    // Classes that were there before grouped queries have as many as query heads where nothing is said.
    let alike = matches!(family, "LlamaForCausalLM" | "Phi3ForCausalLM");
    let kv_heads = match fields.count("num_key_value_heads")? {
        None if alike => heads,
        kv_heads => fields.needed("num_key_value_heads", kv_heads)?,
    };
    let derived = matches!(
        family,
        "LlamaForCausalLM" | "MistralForCausalLM" | "MixtralForCausalLM" | "Qwen2ForCausalLM" | "Phi3ForCausalLM"
    );
    let head_dim = match fields.count("head_dim")? {
        // What transformers writes there is the part that RoPE turns.
        _ if latent => need("qk_nope_head_dim")? + need("qk_rope_head_dim")?,
        Some(head_dim) => head_dim,
        None if derived => divided(hidden, heads)?,
        None => return Err("head_dim is missing".into()),
    };
    let shape = [layers, hidden, heads, kv_heads, head_dim, need("intermediate_size")?, vocab];
    let bias = fields.flag("attention_bias")?;
    if fields.flag("mlp_bias")? {
        return Err(fields.refuse("mlp_bias", "it must be false: biases of MLPs are not counted"));
    }
    Ok(Architecture {
        context,
        tied,
        qkv_bias: bias || family == "Qwen2ForCausalLM",
        o_bias: bias && family != "Qwen2ForCausalLM",
        qk_norm: family.starts_with("Qwen3") || family == "Gemma3ForCausalLM",
        norms: if matches!(family, "Gemma2ForCausalLM" | "Gemma3ForCausalLM") { 4 } else { 2 },
        sinks: family == "GptOssForCausalLM",
        output_gate: family == "Qwen3NextForCausalLM",
        window: window(fields, family, layers)?,
        experts: experts(fields, family)?,
        mla: if latent { Some(mla(fields)?) } else { None },
        linear: if family == "Qwen3NextForCausalLM" { Some(linear(fields, layers)?) } else { None },
        ..plain(name, shape)
    })
}

/// A decoder of the Llama kind: layers, hidden, heads, KV heads, head dim, MLP, vocabulary.
fn plain(name: &str, [layers, hidden, heads, kv_heads, head_dim, ffn, vocab]: [usize; 7]) -> Architecture {
    Architecture {
        name: name.into(),
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        context: 1,
        tied: false,
        qkv_bias: false,
        o_bias: false,
        qk_norm: false,
        sinks: false,
        output_gate: false,
        norms: 2,
        gpt: false,
        positions: 0,
        window: None,
        experts: None,
        mla: None,
        linear: None,
        published: None,
    }
}

fn divided(hidden: usize, heads: usize) -> Result<usize, String> {
    match hidden.is_multiple_of(heads) {
        true => Ok(hidden / heads),
        false => Err(format!("head_dim is missing, and {hidden} is no multiple of {heads} heads")),
    }
}

/// The kinds of the layers, where they are told.
fn kinds<'a>(fields: &Fields<'a>, layers: usize) -> Result<Option<Vec<&'a str>>, String> {
    const KINDS: [&str; 3] = ["full_attention", "sliding_attention", "linear_attention"];
    let Some(kinds) = fields.texts("layer_types")? else { return Ok(None) };
    if kinds.len() != layers {
        return Err(format!("layer_types has {} entries for {layers} layers", kinds.len()));
    }
    match kinds.iter().find(|kind| !KINDS.contains(kind)) {
        Some(kind) => Err(format!("layer_types names '{kind}'; known: {}", KINDS.join(", "))),
        None => Ok(Some(kinds)),
    }
}

/// The layers that see a window. Classes that have none do not look at the keys, and of the others some have one where nothing
/// is said; null is none.
fn window(fields: &Fields<'_>, family: &str, layers: usize) -> Result<Option<Window>, String> {
    let (named, stated) = (kinds(fields, layers)?, fields.count("sliding_window")?);
    let default = match family {
        "MistralForCausalLM" | "Gemma2ForCausalLM" | "Gemma3ForCausalLM" => Some(4096),
        "Qwen2ForCausalLM" | "Qwen3ForCausalLM" | "Qwen3MoeForCausalLM" => Some(4096),
        "GptOssForCausalLM" => Some(128),
        "MixtralForCausalLM" | "Phi3ForCausalLM" | "Qwen3NextForCausalLM" => None,
        _ => return Ok(None),
    };
    let Some(tokens) = stated.or(default.filter(|_| !fields.has("sliding_window"))) else { return Ok(None) };
    let counted = named.map(|types| types.iter().filter(|kind| **kind == "sliding_attention").count());
    let layers = match (family, counted) {
        (_, Some(counted)) => counted,
        ("Qwen2ForCausalLM" | "Qwen3ForCausalLM" | "Qwen3MoeForCausalLM", None) => {
            match fields.flag("use_sliding_window")? {
                true => layers.saturating_sub(fields.place("max_window_layers")?.unwrap_or(28)),
                false => 0,
            }
        }
        ("Gemma2ForCausalLM", None) => layers.div_ceil(2),
        ("Gemma3ForCausalLM", None) => {
            let pattern = fields.count("sliding_window_pattern")?;
            layers - layers / fields.needed("sliding_window_pattern", pattern)?
        }
        ("GptOssForCausalLM" | "Qwen3NextForCausalLM", None) => return Err("layer_types is missing".into()),
        _ => layers,
    };
    Ok((layers > 0).then_some(Window { tokens, layers }))
}

fn experts(fields: &Fields<'_>, family: &str) -> Result<Option<Experts>, String> {
    let (count, ffn) = match family {
        "MixtralForCausalLM" | "GptOssForCausalLM" => ("num_local_experts", "intermediate_size"),
        "Qwen3MoeForCausalLM" | "Qwen3NextForCausalLM" => ("num_experts", "moe_intermediate_size"),
        "DeepseekV2ForCausalLM" | "DeepseekV3ForCausalLM" => ("n_routed_experts", "moe_intermediate_size"),
        _ => return Ok(None),
    };
    let need = |key| fields.needed(key, fields.count(key)?);
    if fields.count("decoder_sparse_step")?.is_some_and(|step| step != 1) {
        return Err(fields.refuse("decoder_sparse_step", "it must be 1: experts in every layer"));
    }
    if fields.value("mlp_only_layers").is_some_and(|layers| layers.as_array().is_none_or(|layers| !layers.is_empty())) {
        return Err(fields.refuse("mlp_only_layers", "it must be []: experts in every layer"));
    }
    let ffn = need(ffn)?;
    let next = family == "Qwen3NextForCausalLM";
    let (shared, dense_layers) = match family {
        "Qwen3NextForCausalLM" => (need("shared_expert_intermediate_size")?.div_ceil(ffn), 0),
        name if name.starts_with("Deepseek") => {
            let dense = fields.place("first_k_dense_replace")?;
            (need("n_shared_experts")?, fields.needed("first_k_dense_replace", dense)?)
        }
        _ => (0, 0),
    };
    let own = family == "GptOssForCausalLM";
    Ok(Some(Experts {
        count: need(count)?,
        active: need("num_experts_per_tok")?,
        ffn,
        shared,
        shared_gate: next,
        dense_layers,
        bias: own,
        router_bias: own || family == "DeepseekV3ForCausalLM",
    }))
}

fn mla(fields: &Fields<'_>) -> Result<Mla, String> {
    let need = |key| fields.needed(key, fields.count(key)?);
    if !fields.has("q_lora_rank") {
        return Err("q_lora_rank is missing; write null where queries are not compressed".into());
    }
    Ok(Mla {
        q_rank: fields.count("q_lora_rank")?,
        kv_rank: need("kv_lora_rank")?,
        nope: need("qk_nope_head_dim")?,
        rope: need("qk_rope_head_dim")?,
        v: need("v_head_dim")?,
    })
}

fn linear(fields: &Fields<'_>, layers: usize) -> Result<Linear, String> {
    let need = |key| fields.needed(key, fields.count(key)?);
    let full = match kinds(fields, layers)? {
        Some(types) => types.iter().filter(|kind| **kind == "full_attention").count(),
        None => layers / need("full_attention_interval")?,
    };
    Ok(Linear {
        layers: layers.saturating_sub(full),
        key_heads: need("linear_num_key_heads")?,
        key_dim: need("linear_key_head_dim")?,
        value_heads: need("linear_num_value_heads")?,
        value_dim: need("linear_value_head_dim")?,
        conv: need("linear_conv_kernel_dim")?,
    })
}

/// `general.architecture`, the class whose keys it is given, and the keys.
const GGUF: [(&str, &str); 9] = [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("qwen3moe", "Qwen3MoeForCausalLM"),
    ("gemma", "GemmaForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("gemma3", "Gemma3ForCausalLM"),
    ("phi3", "Phi3ForCausalLM"),
    ("deepseek2", "DeepseekV2ForCausalLM"),
];

const KEYS: [(&str, &str); 17] = [
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.sliding_window", "sliding_window"),
    ("expert_count", "num_experts"),
    ("expert_count", "n_routed_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_shared_count", "n_shared_experts"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("leading_dense_block_count", "first_k_dense_replace"),
    ("attention.q_lora_rank", "q_lora_rank"),
    ("attention.kv_lora_rank", "kv_lora_rank"),
    ("rope.dimension_count", "qk_rope_head_dim"),
    ("attention.value_length", "v_head_dim"),
];

/// The shape that a GGUF header describes.
///
/// # Errors
/// In words.
pub fn gguf(metadata: &Map<String, Value>, tensors: &[GgufTensor], path: &Path) -> Result<Architecture, String> {
    let named = metadata.get("general.architecture").and_then(Value::as_str).unwrap_or("nothing");
    let Some((name, class)) = GGUF.iter().find(|(name, _)| *name == named) else {
        let known = GGUF.map(|(name, _)| name).join(", ");
        return Err(format!("general.architecture is '{named}'; understood are {known}"));
    };
    let own = |key: &str| metadata.get(&format!("{name}.{key}"));
    let find = |wanted: &str| tensors.iter().find(|tensor| tensor.name == wanted);
    let experts = own("expert_count").and_then(Value::as_u64).unwrap_or(0);
    // Mixtral has no architecture of its own.
    let class = if *name == "llama" && experts > 0 { "MixtralForCausalLM" } else { class };
    let mut map = Map::new();
    map.insert("architectures".into(), json!([class]));
    for (key, config) in KEYS {
        match own(key) {
            Some(Value::Array(_)) => {
                return Err(format!("{name}.{key} differs from layer to layer, which is not understood"));
            }
            Some(value) => drop(map.insert(config.into(), value.clone())),
            None => {}
        }
    }
    if class == "MixtralForCausalLM" {
        map.insert("num_local_experts".into(), experts.into());
    } else if experts > 0 && !map.contains_key("moe_intermediate_size") {
        return Err(format!("{name}.expert_count is {experts}; experts of this architecture are not understood"));
    }
    let embedding = find("token_embd.weight").ok_or("it has no tensor 'token_embd.weight'")?;
    map.insert("vocab_size".into(), embedding.shape[0].into());
    map.insert("tie_word_embeddings".into(), find("output.weight").is_none().into());
    map.insert("attention_bias".into(), find("blk.0.attn_q.bias").is_some().into());
    let latent = *name == "deepseek2";
    // Newer files have the widths of the compressed rows as `key_length` and `value_length`, and those of heads as these.
    let of_heads = |key: &str| own(&format!("{key}_mla")).or(own(key)).and_then(Value::as_u64);
    if let Some(width) = of_heads("attention.key_length") {
        map.insert("head_dim".into(), width.into());
        if let Some(rotated) = own("rope.dimension_count").and_then(Value::as_u64).filter(|_| latent) {
            map.insert("qk_nope_head_dim".into(), width.saturating_sub(rotated).into());
        }
    }
    if latent {
        if let Some(width) = of_heads("attention.value_length") {
            map.insert("v_head_dim".into(), width.into());
        }
        // A file without compressed queries does not say so.
        map.entry("q_lora_rank").or_insert(Value::Null);
    }
    match *name {
        // These files do not say which layers have windows; the architecture does.
        "gemma3" => drop(map.insert("sliding_window_pattern".into(), 6.into())),
        "gemma2" => {}
        // Phi-4's says 0, for none.
        "phi3" if own("attention.sliding_window").is_some_and(|tokens| *tokens != json!(0)) => {}
        // Nor do the others' have windows: null, so that no class has its default.
        _ => drop(map.insert("sliding_window".into(), Value::Null)),
    }
    shape(&map, &path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy())
}

/// Elements and bytes of a block, by the number of its type in ggml.
const GGML_TYPES: [(u32, u64, u64); 28] = [
    (0, 1, 4),      // F32
    (1, 1, 2),      // F16
    (2, 32, 18),    // Q4_0
    (3, 32, 20),    // Q4_1
    (6, 32, 22),    // Q5_0
    (7, 32, 24),    // Q5_1
    (8, 32, 34),    // Q8_0
    (10, 256, 84),  // Q2_K
    (11, 256, 110), // Q3_K
    (12, 256, 144), // Q4_K
    (13, 256, 176), // Q5_K
    (14, 256, 210), // Q6_K
    (15, 256, 292), // Q8_K
    (16, 256, 66),  // IQ2_XXS
    (17, 256, 74),  // IQ2_XS
    (18, 256, 98),  // IQ3_XXS
    (19, 256, 50),  // IQ1_S
    (20, 32, 18),   // IQ4_NL
    (21, 256, 110), // IQ3_S
    (22, 256, 82),  // IQ2_S
    (23, 256, 136), // IQ4_XS
    (26, 1, 4),     // I32
    (28, 1, 8),     // F64
    (29, 256, 56),  // IQ1_M
    (30, 1, 2),     // BF16
    (34, 256, 54),  // TQ1_0
    (35, 256, 66),  // TQ2_0
    (39, 32, 17),   // MXFP4
];

/// Bytes of a tensor.
///
/// # Errors
/// In words, when its type is not known or its rows are no whole blocks.
pub fn ggml_bytes(tensor: &GgufTensor) -> Result<u64, String> {
    let GgufTensor { name, shape, number, .. } = tensor;
    let Some((_, block, bytes)) = GGML_TYPES.iter().find(|(known, ..)| known == number) else {
        return Err(format!("tensor '{name}' is of type {number} of ggml, which is not known"));
    };
    let elements = shape.iter().try_fold(1u64, |all, &extent| all.checked_mul(extent as u64));
    let width = shape.last().map_or(1, |&width| width as u64);
    let whole = elements.filter(|_| width.is_multiple_of(*block));
    whole
        .and_then(|elements| (elements / block).checked_mul(*bytes))
        .ok_or_else(|| format!("tensor '{name}': shape {shape:?} is not whole blocks of {block}"))
}
