//! `quantization_config`: how a folder's matrices are packed, as the programs that write such folders name it.
//!
//! Options that change what a number stands for are read or refused by name. Which matrices are packed is not read here: the files
//! say it by the tensors that they hold, so that lists of modules that were left out change nothing.

use super::fields::Fields;
use std::fmt;

/// How packed matrices of a folder are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Codes of GPTQ, several to a word along the inputs, with a scale and a zero point for each group of inputs.
    Gptq {
        /// Of a code: 4 or 8.
        bits: u32,
        /// Inputs of a group; `None` is all of them.
        group: Option<usize>,
        /// Whether a zero point is stored less one.
        less_one: bool,
        /// Whether a group's inputs lie anywhere, as `g_idx` says.
        ordered: bool,
    },
    /// Codes of AWQ, eight to a word along the outputs.
    Awq {
        /// Inputs of a group; `None` is all of them.
        group: Option<usize>,
    },
    /// Levels of NF4 with a scale for each block, by bitsandbytes.
    Nf4,
    /// Signed bytes with a scale for each row, by bitsandbytes.
    Int8,
    /// 8-bit floats with a scale for each block of rows and inputs.
    Fp8Blocks([usize; 2]),
    /// 8-bit floats with a scale for each row, or one for all.
    Fp8,
    /// Signed bytes with a scale for each row, or one for all: weights of W8A8.
    Int8Rows,
}

impl fmt::Display for Packing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Packing::Gptq { .. } => "gptq",
            Packing::Awq { .. } => "awq",
            Packing::Nf4 | Packing::Int8 => "bitsandbytes",
            Packing::Fp8Blocks(_) | Packing::Fp8 => "fp8",
            Packing::Int8Rows => "w8a8",
        })
    }
}

/// How a folder was made, which modules were left as they were, and how other programs compute with it.
const NOTES: [&str; 44] = [
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "global_compression_ratio",
    "ignore",
    "ignored_layers",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
    "llm_int8_skip_modules",
    "llm_int8_threshold",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "modules_to_convert",
    "modules_to_fuse",
    "modules_to_not_convert",
    "mse",
    "pad_token_id",
    "quantization_status",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "version",
];

const KNOWN: &str = "known: gptq, awq, bitsandbytes, fp8, compressed-tensors";

impl Packing {
    /// What a configuration says of its weights; `None` is plain elements.
    ///
    /// # Errors
    /// In words, with the first option that is not understood.
    pub(in crate::model) fn read(fields: &Fields<'_>) -> Result<Option<Self>, String> {
        // The names that MLX and older llm-compressor use.
        for key in ["quantization", "compression_config"] {
            if fields.value(key).is_some() {
                return Err(format!(
                    "it has a {key}; of packed weights those that a quantization_config names are read"
                ));
            }
        }
        let Some(inner) = fields.object("quantization_config", "quantization_config.")? else { return Ok(None) };
        let (four, eight) = (inner.flag("load_in_4bit")?, inner.flag("load_in_8bit")?);
        let (_, _) = (inner.value("_load_in_4bit"), inner.value("_load_in_8bit"));
        let usual = (four || eight).then_some("bitsandbytes");
        let method = inner.text("quant_method")?.or(usual);
        let packing = match inner.needed("quant_method", method)? {
            "gptq" => gptq(&inner)?,
            "awq" => awq(&inner)?,
            "bitsandbytes" => bitsandbytes(&inner, four, eight)?,
            "fp8" => fp8(&inner)?,
            "compressed-tensors" => compressed(&inner)?,
            _ => return Err(inner.refuse("quant_method", KNOWN)),
        };
        NOTES.iter().for_each(|note| _ = inner.value(note));
        inner.finish()?;
        Ok(Some(packing))
    }
}

/// Inputs that share a scale, of which there are whole blocks.
fn group(inner: &Fields<'_>) -> Result<Option<usize>, String> {
    if inner.is("group_size", -1) {
        return Ok(None);
    }
    let group = inner.count("group_size").map_err(|error| format!("{error}, or -1"))?.unwrap_or(128);
    match group.is_multiple_of(32) {
        true => Ok(Some(group)),
        false => Err(inner.refuse("group_size", "it must be -1 or a multiple of 32")),
    }
}

fn gptq(inner: &Fields<'_>) -> Result<Packing, String> {
    let bits = inner.needed("bits", inner.count("bits")?)?;
    if bits != 4 && bits != 8 {
        return Err(inner.refuse("bits", "of gptq 4 and 8 are read"));
    }
    if inner.text("pack_dtype")?.is_some_and(|name| name != "int32") {
        return Err(inner.refuse("pack_dtype", "it must be int32"));
    }
    let (newer, older) = (inner.text("checkpoint_format")?, inner.text("format")?);
    let less_one = match newer.or(older).unwrap_or("gptq") {
        "gptq" => true,
        "gptq_v2" => false,
        _ => {
            let key = if newer.is_some() { "checkpoint_format" } else { "format" };
            return Err(inner.refuse(key, "of gptq the formats gptq and gptq_v2 are read"));
        }
    };
    if inner.flag("is_marlin_format")? {
        return Err(inner.refuse("is_marlin_format", "of gptq the formats gptq and gptq_v2 are read"));
    }
    Ok(Packing::Gptq { bits: bits as u32, group: group(inner)?, less_one, ordered: inner.flag("desc_act")? })
}

fn awq(inner: &Fields<'_>) -> Result<Packing, String> {
    if inner.needed("bits", inner.count("bits")?)? != 4 {
        return Err(inner.refuse("bits", "of awq 4 are read"));
    }
    for key in ["version", "format"] {
        if inner.text(key)?.is_some_and(|name| !name.eq_ignore_ascii_case("gemm")) {
            return Err(inner.refuse(key, "of awq gemm is read"));
        }
    }
    if inner.value("zero_point").is_some() && !inner.flag("zero_point")? {
        return Err(inner.refuse("zero_point", "of awq folders with zero points are read"));
    }
    Ok(Packing::Awq { group: group(inner)? })
}

fn bitsandbytes(inner: &Fields<'_>, four: bool, eight: bool) -> Result<Packing, String> {
    match (four, eight) {
        (true, false) => {}
        (false, true) => return Ok(Packing::Int8),
        _ => return Err("quantization_config of bitsandbytes must have one of load_in_4bit and load_in_8bit".into()),
    }
    if inner.text("bnb_4bit_quant_type")? != Some("nf4") {
        return Err(inner.refuse("bnb_4bit_quant_type", "of four bits nf4 is read"));
    }
    if inner.text("bnb_4bit_quant_storage")?.is_some_and(|name| name != "uint8") {
        return Err(inner.refuse("bnb_4bit_quant_storage", "it must be uint8"));
    }
    Ok(Packing::Nf4)
}

fn fp8(inner: &Fields<'_>) -> Result<Packing, String> {
    if inner.text("activation_scheme")?.is_some_and(|name| !["dynamic", "static"].contains(&name)) {
        return Err(inner.refuse("activation_scheme", "it must be dynamic or static"));
    }
    for (key, known) in [("fmt", "e4m3"), ("scale_fmt", "float")] {
        if inner.text(key)?.is_some_and(|name| name != known) {
            return Err(inner.refuse(key, &format!("it must be {known}")));
        }
    }
    // AutoFP8 has one scale for a matrix, and one for the inputs of a layer where these are static.
    let Some(size) = inner.value("weight_block_size") else { return Ok(Packing::Fp8) };
    let of = |at: usize| size.get(at)?.as_u64().filter(|&n| (1..=1 << 20).contains(&n)).map(|n| n as usize);
    match size.as_array().filter(|size| size.len() == 2).and_then(|_| Some([of(0)?, of(1)?])) {
        Some(block) if block[1].is_multiple_of(32) => Ok(Packing::Fp8Blocks(block)),
        _ => {
            Err(inner.refuse("weight_block_size", "it must be two numbers, the second a multiple of 32, as [128, 128]"))
        }
    }
}

fn compressed(inner: &Fields<'_>) -> Result<Packing, String> {
    let (packing, kind) = match inner.text("format")? {
        Some("float-quantized") => (Packing::Fp8, "float"),
        Some("int-quantized") => (Packing::Int8Rows, "int"),
        _ => return Err(inner.refuse("format", "of compressed-tensors float-quantized and int-quantized are read")),
    };
    // Current versions write an empty object where nothing is sparse.
    let is_empty =
        inner.value("sparsity_config").and_then(serde_json::Value::as_object).is_some_and(|map| map.is_empty());
    if let Some(sparsity) = inner.object("sparsity_config", "quantization_config.sparsity_config.")?
        && !is_empty
        && sparsity.text("format")? != Some("dense")
    {
        return Err(sparsity.refuse("format", "it must be dense"));
    }
    let wanted = format!(
        "its groups must have weights of type {kind}, 8 num_bits, symmetric, strategy tensor or channel, and activations \
         that are symmetric too"
    );
    let groups = inner.value("config_groups").and_then(serde_json::Value::as_object);
    for group in groups.ok_or_else(|| inner.refuse("config_groups", &wanted))?.values() {
        let has = |key: &str, values: &[serde_json::Value]| {
            group.pointer(&format!("/weights/{key}")).is_some_and(|found| values.contains(found))
        };
        let is_read = has("type", &[kind.into()])
            && has("num_bits", &[8.into()])
            && has("symmetric", &[true.into()])
            && has("strategy", &["tensor".into(), "channel".into()])
            && group.pointer("/input_activations/symmetric") != Some(&false.into());
        if !is_read {
            return Err(inner.refuse("config_groups", &wanted));
        }
    }
    Ok(packing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(value: Value) -> Result<Option<Packing>, String> {
        let map = json!({"quantization_config": value});
        Packing::read(&Fields::new(map.as_object().unwrap(), ""))
    }

    #[test]
    fn published_configurations_are_understood() {
        let gptq = |bits, group, less_one, ordered| Packing::Gptq { bits, group, less_one, ordered };
        for (value, expected) in [
            (
                json!({"bits": 4, "damp_percent": 0.01, "desc_act": true, "group_size": 128, "is_marlin_format": false,
                    "model_file_base_name": "model", "model_name_or_path": null, "quant_method": "gptq",
                    "static_groups": false, "sym": true, "true_sequential": true}),
                gptq(4, Some(128), true, true),
            ),
            (
                json!({"bits": 8, "checkpoint_format": "gptq_v2", "desc_act": false, "group_size": -1, "lm_head": false,
                    "meta": {"quantizer": ["gptqmodel:1.0"]}, "pack_dtype": "int32", "quant_method": "gptq"}),
                gptq(8, None, false, false),
            ),
            (
                json!({"backend": "autoawq", "bits": 4, "do_fuse": false, "group_size": 128,
                    "modules_to_not_convert": ["lm_head"], "quant_method": "awq", "version": "gemm", "zero_point": true}),
                Packing::Awq { group: Some(128) },
            ),
            (
                json!({"_load_in_4bit": true, "_load_in_8bit": false, "bnb_4bit_compute_dtype": "bfloat16",
                    "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true,
                    "llm_int8_enable_fp32_cpu_offload": false, "llm_int8_has_fp16_weight": false,
                    "llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0, "load_in_4bit": true,
                    "load_in_8bit": false, "quant_method": "bitsandbytes"}),
                Packing::Nf4,
            ),
            (json!({"load_in_8bit": true, "bnb_4bit_quant_type": "fp4"}), Packing::Int8),
            (
                json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                    "modules_to_not_convert": ["lm_head"], "weight_block_size": [128, 128]}),
                Packing::Fp8Blocks([128, 128]),
            ),
            (
                json!({"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}),
                Packing::Fp8,
            ),
            (
                json!({"config_groups": {"group_0": {"input_activations": {"dynamic": true, "num_bits": 8, "type": "float"},
                    "weights": {"dynamic": false, "num_bits": 8, "strategy": "channel", "symmetric": true, "type": "float"},
                    "targets": ["Linear"]}}, "format": "float-quantized", "ignore": ["lm_head"], "kv_cache_scheme": null,
                    "global_compression_ratio": 1.2, "quant_method": "compressed-tensors", "quantization_status": "frozen"}),
                Packing::Fp8,
            ),
            (
                json!({"config_groups": {"group_0": {"input_activations": {"actorder": null, "block_structure": null,
                    "dynamic": true, "group_size": null, "num_bits": 8, "observer": null, "strategy": "token",
                    "symmetric": true, "type": "int"}, "output_activations": null,
                    "weights": {"dynamic": false, "num_bits": 8, "strategy": "channel", "symmetric": true, "type": "int"},
                    "targets": ["Linear"]}}, "format": "int-quantized", "ignore": ["lm_head"], "kv_cache_scheme": null,
                    "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {}}),
                Packing::Int8Rows,
            ),
        ] {
            assert_eq!(read(value.clone()), Ok(Some(expected)), "{value}");
        }
        assert_eq!(read(Value::Null), Ok(None));
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        for (value, said) in [
            (json!({"bits": 4}), "quantization_config.quant_method is missing"),
            (json!({"quant_method": "aqlm"}), "quantization_config.quant_method is \"aqlm\"; known: gptq"),
            (json!({"quant_method": "gptq"}), "quantization_config.bits is missing"),
            (json!({"quant_method": "gptq", "bits": 3}), "quantization_config.bits is 3; of gptq 4 and 8"),
            (json!({"quant_method": "gptq", "bits": 4, "group_size": 0}), "2^28, or -1"),
            (json!({"quant_method": "gptq", "bits": 4, "group_size": 48}), "it must be -1 or a multiple of 32"),
            (
                json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
                "checkpoint_format is \"marlin\"",
            ),
            (
                json!({"quant_method": "gptq", "bits": 4, "dynamic": {"-:mlp": {}}}),
                "dynamic is {\"-:mlp\":{}}; this option",
            ),
            (json!({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}), "it must be int32"),
            (json!({"quant_method": "awq", "bits": 8}), "of awq 4 are read"),
            (json!({"quant_method": "awq", "bits": 4, "version": "gemv"}), "version is \"gemv\"; of awq gemm"),
            (json!({"quant_method": "awq", "bits": 4, "zero_point": false}), "folders with zero points"),
            (json!({"quant_method": "bitsandbytes"}), "one of load_in_4bit and load_in_8bit"),
            (json!({"load_in_4bit": true}), "bnb_4bit_quant_type is missing; of four bits nf4"),
            (json!({"quant_method": "fp8", "weight_block_size": [1, 2, 3]}), "as [128, 128]"),
            (
                json!({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "block"}),
                "it must be dynamic or static",
            ),
            (
                json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
                "float-quantized and int-quantized",
            ),
            (
                json!({"quant_method": "compressed-tensors", "format": "int-quantized",
                    "config_groups": {"a": {"input_activations": {"symmetric": false},
                        "weights": {"type": "int", "num_bits": 8, "symmetric": true, "strategy": "channel"}}}}),
                "and activations that are symmetric too",
            ),
            (json!({"quant_method": "compressed-tensors", "format": "float-quantized"}), "config_groups is missing"),
            (
                json!({"quant_method": "compressed-tensors", "format": "float-quantized",
                    "config_groups": {"a": {"weights": {"type": "int"}}}}),
                "its groups must have weights of type float",
            ),
        ] {
            let error = read(value.clone()).unwrap_err();
            assert!(error.contains(said), "{value}: {error}");
        }
    }
}
