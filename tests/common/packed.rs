//! Tiny random decoders as folders of packed matrices, and the same models in f32 beside them.
//!
//! Codes, scales and zero points are drawn and packed here, by the layouts' own words; what they stand for is worked out in f32. That
//! other programs read the layouts so is another matter: `tests/fixtures/packed.safetensors` is packed and read by them.

use half::f16;
use kvsieve::tensor::file::{self, Output};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::path::Path;

pub const VOCAB: usize = 258;
pub const HIDDEN: usize = 128;
pub const FFN: usize = 256;
pub const KV_WIDTH: usize = 64;
pub const LAYERS: usize = 2;
/// Of all inputs of a packed layer that has one: some of a norm's outputs are beyond 127 of it.
pub const INPUT_SCALE: f32 = 1.0 / 64.0;

/// Layers of a block: name, rows, width.
pub const MATRICES: [(&str, usize, usize); 7] = [
    ("self_attn.q_proj", HIDDEN, HIDDEN),
    ("self_attn.k_proj", KV_WIDTH, HIDDEN),
    ("self_attn.v_proj", KV_WIDTH, HIDDEN),
    ("self_attn.o_proj", HIDDEN, HIDDEN),
    ("mlp.gate_proj", FFN, HIDDEN),
    ("mlp.up_proj", FFN, HIDDEN),
    ("mlp.down_proj", HIDDEN, FFN),
];

/// How a folder is packed: its name, the format that it is run in, `quantization_config`.
pub fn layouts() -> Vec<(&'static str, &'static str, Value)> {
    let gptq = |bits, group: i64, desc_act, format| {
        json!({"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": false,
            "checkpoint_format": format, "true_sequential": true, "damp_percent": 0.01})
    };
    vec![
        ("gptq", "uint4:group=128", gptq(4, 128, false, "gptq")),
        ("gptq-ordered", "uint4:group=32", gptq(4, 32, true, "gptq")),
        ("gptq-8", "uint8:group=64", gptq(8, 64, false, "gptq")),
        ("gptq-8-ordered", "uint8:group=64", gptq(8, 64, true, "gptq_v2")),
        ("gptq-v2", "uint4:group=64", gptq(4, 64, false, "gptq_v2")),
        // The blocks of a row are as many as fit into it.
        ("gptq-row", "uint4:group=128", gptq(4, -1, false, "gptq")),
        (
            "awq",
            "uint4:group=64",
            json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": true}),
        ),
        (
            "nf4",
            "nf4:group=64,scale=f32",
            json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}),
        ),
        ("int8", "int8", json!({"quant_method": "bitsandbytes", "load_in_8bit": true, "llm_int8_threshold": 6.0})),
        (
            "fp8",
            "fp8-scaled:group=128",
            json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [96, 128]}),
        ),
        (
            "fp8-row",
            "fp8-scaled:group=128",
            json!({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
                "config_groups": {"group_0": {"targets": ["Linear"],
                    "weights": {"type": "float", "num_bits": 8, "symmetric": true, "strategy": "channel"}}}}),
        ),
        (
            "w8a8",
            "int8",
            json!({"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
                "config_groups": {"group_0": {"targets": ["Linear"],
                    "weights": {"type": "int", "num_bits": 8, "symmetric": true, "strategy": "channel"},
                    "input_activations": {"type": "int", "num_bits": 8, "symmetric": true, "dynamic": false}}}}),
        ),
    ]
}

/// Numbers that look random.
pub struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    fn below(&mut self, end: u32) -> u32 {
        self.next() % end
    }

    /// From -1 to 1.
    fn unit(&mut self) -> f32 {
        self.next() as f32 / (1u32 << 30) as f32 - 1.0
    }
}

/// A tensor of a file.
pub struct Stored {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

fn words(all: &[u32]) -> Vec<u8> {
    all.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn floats(all: &[f32]) -> Vec<u8> {
    all.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn halves(all: &[f32]) -> Vec<u8> {
    all.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect()
}

/// The tensors of a packed layer, and what they stand for `[rows, width]`.
fn packed(config: &Value, name: &str, [rows, width]: [usize; 2], draw: &mut Draw) -> (Vec<Stored>, Vec<f32>) {
    let stored = |end: &str, dtype, shape: &[usize], bytes| Stored {
        name: format!("{name}.{end}"),
        dtype,
        shape: shape.to_vec(),
        bytes,
    };
    let method = config["quant_method"].as_str().unwrap();
    if method == "gptq" || method == "awq" {
        let bits = config["bits"].as_u64().unwrap() as usize;
        let group = usize::try_from(config["group_size"].as_i64().unwrap()).unwrap_or(width);
        let (groups, in_word, end) = (width / group, 32 / bits, 1u32 << bits);
        let mut scale = || f16::from_f32((0.2 + 0.1 * draw.unit()) / end as f32).to_f32();
        let scales: Vec<f32> = (0..groups * rows).map(|_| scale()).collect();
        // The first format of GPTQ has no room for 0.
        let zeros: Vec<u32> = (0..groups * rows).map(|_| 1 + draw.below(end - 1)).collect();
        let codes: Vec<u32> = (0..width * rows).map(|_| draw.below(end)).collect();
        let mut of: Vec<usize> = (0..width).map(|input| input / group).collect();
        if config["desc_act"] == json!(true) {
            (1..width).rev().for_each(|at| of.swap(at, draw.below(at as u32 + 1) as usize));
        }
        let values = (0..rows).flat_map(|row| {
            let (of, codes, zeros, scales) = (&of, &codes, &zeros, &scales);
            (0..width).map(move |input| {
                let at = of[input] * rows + row;
                scales[at] * (codes[input * rows + row] as f32 - zeros[at] as f32)
            })
        });
        let values = values.collect();
        let less = u32::from(config["checkpoint_format"] == json!("gptq"));
        // Places in a word of neighbours.
        let places = if method == "awq" { [0, 4, 1, 5, 2, 6, 3, 7] } else { [0, 1, 2, 3, 4, 5, 6, 7] };
        let mut qzeros = vec![0u32; groups * rows / in_word];
        for (at, zero) in zeros.iter().enumerate() {
            let (of, row) = (at / rows, at % rows);
            qzeros[of * (rows / in_word) + row / in_word] |= (zero - less) << (bits * places[row % in_word]);
        }
        let mut qweight = vec![0u32; width * rows / in_word];
        for (at, code) in codes.iter().enumerate() {
            let (input, row) = (at / rows, at % rows);
            match method {
                "awq" => qweight[input * (rows / in_word) + row / in_word] |= code << (bits * places[row % in_word]),
                _ => qweight[input / in_word * rows + row] |= code << (bits * (input % in_word)),
            }
        }
        let of_codes = if method == "awq" { [width, rows / in_word] } else { [width / in_word, rows] };
        let mut all = vec![
            stored("qweight", Dtype::I32, &of_codes, words(&qweight)),
            stored("qzeros", Dtype::I32, &[groups, rows / in_word], words(&qzeros)),
            stored("scales", Dtype::F16, &[groups, rows], halves(&scales)),
        ];
        if method == "gptq" {
            let of: Vec<u32> = of.iter().map(|&of| of as u32).collect();
            all.push(stored("g_idx", Dtype::I32, &[width], words(&of)));
            // Some programs write a bias of zeros for every layer.
            all.push(stored("bias", Dtype::F16, &[rows], vec![0; 2 * rows]));
        }
        return (all, values);
    }
    if config["load_in_4bit"] == json!(true) {
        let (codes, scales): (Vec<u8>, Vec<f32>) = (
            (0..rows * width).map(|_| draw.below(16) as u8).collect(),
            (0..rows * width / 64).map(|_| 0.2 + 0.1 * draw.unit()).collect(),
        );
        let values = codes.iter().enumerate().map(|(at, &code)| NF4[usize::from(code)] * scales[at / 64]).collect();
        let bytes = codes.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
        let state =
            json!({"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [rows, width]}).to_string();
        let all = vec![
            stored("weight", Dtype::U8, &[rows * width / 2, 1], bytes),
            stored("weight.absmax", Dtype::F32, &[scales.len()], floats(&scales)),
            stored("weight.quant_map", Dtype::F32, &[16], floats(&NF4)),
            stored("weight.quant_state.bitsandbytes__nf4", Dtype::U8, &[state.len()], state.into_bytes()),
        ];
        return (all, values);
    }
    if config["load_in_8bit"] == json!(true) || config["format"] == json!("int-quantized") {
        let codes: Vec<i8> = (0..rows * width).map(|_| (draw.below(255) as i32 - 127) as i8).collect();
        let most: Vec<f32> = (0..rows).map(|_| 0.2 + 0.1 * draw.unit()).collect();
        let scales: Vec<f32> = most.iter().map(|most| most / 127.0).collect();
        let values = codes.iter().enumerate().map(|(at, &code)| f32::from(code) * scales[at / width]).collect();
        let weight = stored("weight", Dtype::I8, &[rows, width], codes.iter().map(|&code| code as u8).collect());
        let all = match method {
            "compressed-tensors" => vec![
                weight,
                stored("weight_scale", Dtype::F32, &[rows, 1], floats(&scales)),
                stored("input_scale", Dtype::F32, &[1], floats(&[INPUT_SCALE])),
            ],
            _ => vec![
                weight,
                stored("SCB", Dtype::F32, &[rows], floats(&most)),
                stored("weight_format", Dtype::U8, &[], vec![0]),
            ],
        };
        return (all, values);
    }
    // Codes of fp8 whose magnitude is at most 2^6, without NaN.
    let codes: Vec<u8> = (0..rows * width).map(|_| (draw.below(2) << 7 | draw.below(0x6d)) as u8).collect();
    let (block, end) = match &config["weight_block_size"] {
        Value::Null => ([1, width], "weight_scale"),
        block => ([0, 1].map(|at| block[at].as_u64().unwrap() as usize), "weight_scale_inv"),
    };
    let extents = [rows.div_ceil(block[0]), width.div_ceil(block[1])];
    let scales: Vec<f32> = (0..extents[0] * extents[1]).map(|_| (0.3 + 0.1 * draw.unit()) / 32.0).collect();
    let values = codes.iter().enumerate().map(|(at, &code)| {
        let magnitude = match (code >> 3 & 15, code & 7) {
            (0, mantissa) => f32::from(mantissa) / 512.0,
            (exponent, mantissa) => (1.0 + f32::from(mantissa) / 8.0) * 2f32.powi(i32::from(exponent) - 7),
        };
        let scale = scales[at / width / block[0] * extents[1] + at % width / block[1]];
        if code & 0x80 == 0 { magnitude * scale } else { -magnitude * scale }
    });
    let values = values.collect();
    let all = vec![
        stored("weight", Dtype::F8_E4M3, &[rows, width], codes),
        stored(end, Dtype::F32, &extents, floats(&scales)),
    ];
    (all, values)
}

/// The levels of NF4, as bitsandbytes writes them.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Writes tensors.
pub fn save(path: &Path, all: &[Stored]) {
    fn output(Stored { name, dtype, shape, bytes }: &Stored) -> Output<'_> {
        Output { name, dtype: *dtype, shape: shape.clone(), bytes }
    }
    file::write(path, &all.iter().map(output).collect::<Vec<_>>()).unwrap();
}

/// The tensors of a packed model, and of the same in f32.
pub fn model(config: &Value) -> [Vec<Stored>; 2] {
    let mut draw = Draw(7);
    let mut both = [Vec::new(), Vec::new()];
    let plain = |all: &mut [Vec<Stored>; 2], name: String, shape: &[usize], values: Vec<f32>| {
        let [packed, wide] = all;
        let values: Vec<f32> = values.into_iter().map(|x| f16::from_f32(x).to_f32()).collect();
        packed.push(Stored { name: name.clone(), dtype: Dtype::F16, shape: shape.to_vec(), bytes: halves(&values) });
        wide.push(Stored { name, dtype: Dtype::F32, shape: shape.to_vec(), bytes: floats(&values) });
    };
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let values = (0..VOCAB * HIDDEN).map(|_| 0.3 * draw.unit()).collect();
        plain(&mut both, name.into(), &[VOCAB, HIDDEN], values);
    }
    let layers = (0..LAYERS).map(|layer| format!("model.layers.{layer}."));
    let norms =
        layers.clone().flat_map(|layer| ["input", "post_attention"].map(|name| format!("{layer}{name}_layernorm")));
    for name in norms.chain(["model.norm".to_string()]) {
        let values = (0..HIDDEN).map(|_| 1.0 + 0.1 * draw.unit()).collect();
        plain(&mut both, format!("{name}.weight"), &[HIDDEN], values);
    }
    for layer in layers {
        for (name, rows, width) in MATRICES {
            let name = format!("{layer}{name}");
            let (all, values) = packed(config, &name, [rows, width], &mut draw);
            both[0].extend(all);
            let name = format!("{name}.weight");
            both[1].push(Stored { name, dtype: Dtype::F32, shape: vec![rows, width], bytes: floats(&values) });
        }
    }
    both
}

/// The `config.json` of such a model.
pub fn config(quantization: &Value) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": FFN, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": false,
        "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float16", "quantization_config": quantization,
    })
}

/// Writes the folder of a packed model.
pub fn write(folder: &Path, quantization: &Value) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), config(quantization).to_string()).unwrap();
    save(&folder.join("model.safetensors"), &model(quantization)[0]);
}

/// Writes the folder of the same model in f32.
pub fn write_wide(folder: &Path, quantization: &Value) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), config(&Value::Null).to_string()).unwrap();
    save(&folder.join("model.safetensors"), &model(quantization)[1]);
}
