//! Tensors by the names that the Hugging Face folder gives them, with what the conversion to GGUF changed undone.

use super::{Gguf, rope};
use crate::format::RowFormat;
use crate::model::Config;
use crate::model::config::{Family, Norms};
use std::collections::BTreeSet;
use std::ops::Range;

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

/// A GGUF file's name of a tensor that the folder calls `name`.
pub fn own_name(config: &Config, name: &str) -> Option<String> {
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

/// Rows of a head of a tensor of `rows` rows, where a file has them in llama.cpp's order.
pub fn head_rows(config: &Config, name: &str, rows: usize) -> Option<usize> {
    let heads = match name.rsplit('.').nth(1) {
        Some("q_proj") => config.q_heads,
        Some("k_proj") => config.kv_heads,
        _ => 0,
    };
    (config.family == Family::Llama).then(|| rows.checked_div(heads)).flatten()
}

/// The row of the folder that a row of the file is. The rows of a head that RoPE rotates together stand next to each other in
/// llama.cpp's order, and half a head apart in that of `transformers`: row `2 i + p` is row `p D / 2 + i` there.
pub fn row_of_folder(head_rows: usize, row: usize) -> usize {
    let (head, row) = (row / head_rows, row % head_rows);
    head * head_rows + row % 2 * (head_rows / 2) + row / 2
}

/// What the file's factors of a norm have more than the folder's: Gemma's folder has what is added to one, and the file the
/// factors themselves.
pub fn more(config: &Config, name: &str) -> f32 {
    if config.family == Family::Gemma2 && name.ends_with("norm.weight") { 1.0 } else { 0.0 }
}

impl Gguf {
    /// Where a tensor lies that the folder calls `name`; `None` where there is none.
    ///
    /// # Errors
    /// In words, when it has another shape.
    pub fn locate(&self, config: &Config, name: &str, shape: &[usize]) -> Option<Result<Located, String>> {
        let info = self.find(&own_name(config, name)?)?;
        if info.shape != shape {
            return Some(Err(format!("tensor '{name}' has shape {:?}; {shape:?} is needed", info.shape)));
        }
        let head_rows = head_rows(config, name, shape[0]);
        Some(Ok(Located { format: info.format, range: info.range.clone(), head_rows }))
    }

    /// A tensor of the file that is none of those that were taken by their names in the folder, nor of its configuration.
    pub fn unknown(&self, config: &Config, taken: &BTreeSet<String>) -> Option<&str> {
        let taken: BTreeSet<String> = taken.iter().filter_map(|name| own_name(config, name)).collect();
        self.names().find(|name| !taken.contains(*name) && !rope::TENSORS.contains(name))
    }
}

/// A tensor as it lies in the file.
pub(in crate::model) struct Located {
    pub format: RowFormat,
    pub range: Range<usize>,
    /// Rows of a head, where the file has them in llama.cpp's order.
    pub head_rows: Option<usize>,
}

impl Located {
    /// Copies all rows, which are `rows`, to where the folder has them.
    pub fn copy(&self, from: &[u8], rows: usize, to: &mut [u8]) {
        let Some(head_rows) = self.head_rows else { return to.copy_from_slice(from) };
        let row_bytes = from.len() / rows;
        for (row, from) in from.chunks_exact(row_bytes).enumerate() {
            to[row_of_folder(head_rows, row) * row_bytes..][..row_bytes].copy_from_slice(from);
        }
    }
}
