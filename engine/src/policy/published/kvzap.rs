//! KVzap's surrogates as its authors publish them (`KVzapModel` of kvpress, Apache-2.0): for each layer a linear function of the normed
//! input of attention, or an MLP with one inner layer and GELU, that gives a score for each KV head.

use super::Folder;
use crate::policy::network::{Inner, Network};
use crate::policy::{Learned, PolicyError};
use std::path::Path;

/// Reads the surrogate of a folder.
///
/// # Errors
/// When it is none, or its tensors do not fit its configuration.
pub(in crate::policy) fn read(path: &Path) -> Result<Network, PolicyError> {
    let folder = Folder::open(path)?;
    if folder.config["model_type"] != "kvzap" {
        return Err(folder.wrong(&format!("model_type is {}; it must be \"kvzap\"", folder.config["model_type"])));
    }
    let [layers, heads, hidden] = [folder.count("n_modules")?, folder.count("output_dim")?, folder.count("input_dim")?];
    let all = |part: &str, shape: &[usize]| -> Result<Learned, PolicyError> {
        let mut values = Vec::new();
        for layer in 0..layers {
            values.extend(folder.needed(&format!("layers.{layer}.{part}"), shape)?);
        }
        Ok(Learned::new(&[&[layers], shape].concat(), values))
    };
    if folder.config["hidden_dim"].is_null() {
        let (weight, bias) = (all("weight", &[heads, hidden])?, all("bias", &[heads])?);
        return Ok(Network { inner: None, weight, bias });
    }
    let width = folder.count("hidden_dim")?;
    let inner = Inner { weight: all("0.weight", &[width, hidden])?, bias: all("0.bias", &[width])? };
    Ok(Network { inner: Some(inner), weight: all("2.weight", &[heads, width])?, bias: all("2.bias", &[heads])? })
}
