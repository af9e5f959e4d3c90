//! Tensors by the names that the Hugging Face folder gives them, with what the conversion to GGUF changed undone.

use super::Gguf;
use crate::model::Config;
use crate::model::config::{Family, Norms};
use std::collections::BTreeSet;

/// Parts of a block's names: in the folder, and in the file.
const PARTS: [(&str, &str); 15] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

impl Gguf {
    /// The file's name of a tensor that the folder calls `name`.
    fn own_name(&self, config: &Config, name: &str) -> Option<String> {
        match name {
            "model.embed_tokens.weight" => return Some("token_embd.weight".into()),
            "model.norm.weight" => return Some("output_norm.weight".into()),
            "lm_head.weight" => return Some("output.weight".into()),
            _ => {}
        }
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (part, kind) = rest.rsplit_once('.')?;
        let own = match part {
            // Where there are norms after attention too, this is one.
            "post_attention_layernorm" if config.norms == Norms::BeforeAndAfter => "post_attention_norm",
            part => PARTS.iter().find(|(folder, _)| *folder == part)?.1,
        };
        Some(format!("blk.{layer}.{own}.{kind}"))
    }

    /// A tensor that the folder calls `name`, widened to f32; `None` where there is none.
    ///
    /// # Errors
    /// In words, when it has another shape.
    pub fn widened(&self, config: &Config, name: &str, shape: &[usize], to: &mut [f32]) -> Option<Result<(), String>> {
        let (info, bytes) = self.find(&self.own_name(config, name)?)?;
        if info.shape != shape {
            return Some(Err(format!("tensor '{name}' has shape {:?}; {shape:?} is needed", info.shape)));
        }
        info.kind.dequantise(bytes, to);
        let heads = match name.rsplit('.').nth(1) {
            Some("q_proj") => config.q_heads,
            Some("k_proj") => config.kv_heads,
            _ => 0,
        };
        if config.family == Family::Llama && heads > 0 {
            let width = shape.get(1).copied().unwrap_or(1);
            to.chunks_exact_mut(shape[0] / heads * width).for_each(|head| separate_pairs(head, width));
        }
        if config.family == Family::Gemma2 && name.ends_with("norm.weight") {
            // The file has the factors themselves, the folder what is added to one.
            to.iter_mut().for_each(|factor| *factor -= 1.0);
        }
        Some(Ok(()))
    }

    /// A tensor of the file that is none of those that were taken by their names in the folder.
    pub fn unknown(&self, config: &Config, taken: &BTreeSet<String>) -> Option<&str> {
        let taken: BTreeSet<String> = taken.iter().filter_map(|name| self.own_name(config, name)).collect();
        self.names().find(|name| !taken.contains(*name))
    }
}

/// The rows of a head that RoPE rotates together stand next to each other in llama.cpp's order, and half a head apart in that
/// of `transformers`: row `2 i + p` goes to `p D / 2 + i`.
fn separate_pairs(head: &mut [f32], width: usize) {
    let rows = head.to_vec();
    let half = head.len() / width / 2;
    for (row, from) in rows.chunks_exact(width).enumerate() {
        let to = row % 2 * half + row / 2;
        head[to * width..][..width].copy_from_slice(from);
    }
}
