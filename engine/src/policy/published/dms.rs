//! Gates of a checkpoint that NVIDIA's Model-Optimizer trained (`experimental/dms`, Apache-2.0): a Hugging Face folder with DMS
//! adapters among its weights.
//!
//! An adapter has a norm of its own, `a = scale (W rmsnorm(x) g + b) - offset`, where gates here are linear in the input of attention,
//! `n = rmsnorm(x) w`: so `weight = scale W g / w`. The decision on a token is worked out by the token behind it, and keys that lie up to
//! `dms_window_size` behind a query stay, the query's own besides. Checkpoints whose logit is a channel of the queries are other models,
//! for they attend without it; they are refused.

use super::Folder;
use crate::policy::{Learned, PolicyError};
use serde_json::Value;
use std::path::Path;

/// Gates as a policy file would hold them.
pub(in crate::policy) struct CheckpointGates {
    /// `[layers, Hkv, hidden]`.
    pub weight: Learned,
    /// `[layers, Hkv]`.
    pub bias: Learned,
    /// Recent tokens that stay for a query, besides its own.
    pub window: usize,
}

/// Reads the gates of a folder.
///
/// # Errors
/// When it is not a checkpoint with DMS adapters, or its tensors do not fit its configuration.
pub(in crate::policy) fn read(path: &Path) -> Result<CheckpointGates, PolicyError> {
    let folder = Folder::open(path)?;
    let window = folder.count("dms_window_size")?;
    if folder.config["dms_separate_alpha"] != Value::Bool(true) {
        let reason =
            "dms_separate_alpha is not true: its logits are a channel of the queries, which are then read without it";
        return Err(folder.wrong(reason));
    }
    let of_layer = match folder.config["dms_alpha_per"].as_str() {
        None | Some("head") => false,
        Some("layer") => true,
        Some(other) => return Err(folder.wrong(&format!("dms_alpha_per is '{other}'; it must be head or layer"))),
    };
    let scale = folder.number("dms_alpha_scale", 100.0)?;
    let offset = folder.number("dms_initial_alpha_offset", 5.0)?;
    let [layers, heads, hidden] =
        [folder.count("num_hidden_layers")?, folder.count("num_key_value_heads")?, folder.count("hidden_size")?];
    let (mut weight, mut bias) = (Vec::new(), Vec::new());
    for layer in 0..layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let matrix = folder.needed(&name("self_attn.dms_proj_alpha.weight"), &[heads, hidden])?;
        let own = folder.needed(&name("self_attn.dms_proj_alpha_norm.weight"), &[hidden])?;
        let norm = folder.needed(&name("input_layernorm.weight"), &[hidden])?;
        let added = folder.optional(&name("self_attn.dms_proj_alpha.bias"), &[heads])?;
        if let Some(at) = norm.iter().position(|norm| *norm == 0.0) {
            return Err(folder.wrong(&format!(
                "element {at} of '{}' is 0; gates on the input of attention cannot see that element",
                name("input_layernorm.weight")
            )));
        }
        for head in 0..heads {
            let head = if of_layer { 0 } else { head };
            let row = matrix[head * hidden..][..hidden].iter().zip(&own).zip(&norm);
            weight.extend(row.map(|((value, own), norm)| scale * value * own / norm));
            bias.push(scale * added.as_ref().map_or(0.0, |added| added[head]) - offset);
        }
    }
    Ok(CheckpointGates {
        weight: Learned::new(&[layers, heads, hidden], weight),
        bias: Learned::new(&[layers, heads], bias),
        window,
    })
}
