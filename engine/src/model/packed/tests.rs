//! Layouts against what the programs that write them read, and tensors that are not right.

use super::*;
use crate::format::RowFormat;
use crate::model::config::{Fields, Packing};
use crate::tensor::RowCode;
use crate::tensor::file::{Output, write};
use serde_json::{Value, json};
use std::path::Path;

const FIXTURE: &str = "../tests/fixtures/packed.safetensors";
const CASES: [&str; 16] = [
    "gptq-4-128",
    "gptq-4-32-ordered",
    "gptq-4-row",
    "gptq-8-64-ordered",
    "gptq-4-64-v2",
    "gptq-8-128-v2",
    "awq-128",
    "awq-64",
    "nf4-64",
    "nf4-64-nested",
    "nf4-128",
    "int8",
    "fp8-blocks",
    "fp8-128",
    "fp8-row",
    "fp8-one",
];

fn opened(path: &Path) -> (Vec<Arc<TensorFile>>, Tensors) {
    let file = TensorFile::open(path).unwrap();
    let tensors = file.entries().unwrap().into_iter().map(|entry| (entry.name.clone(), (0, entry))).collect();
    (vec![Arc::new(file)], tensors)
}

fn packing(config: &str) -> Packing {
    let config: Value = serde_json::from_str(config).unwrap();
    let map = json!({"quantization_config": config});
    Packing::read(&Fields::new(map.as_object().unwrap(), "")).unwrap().unwrap()
}

/// What a module's rows stand for with inputs in their order, the format, and the names of what it is made of.
fn values(
    files: &[Arc<TensorFile>],
    tensors: &Tensors,
    name: &str,
    packing: Packing,
    [rows, width]: [usize; 2],
) -> Result<(Vec<f32>, RowFormat, Vec<String>), String> {
    let mut module = Module::new(name, files, tensors);
    let Repacked { format, order, put, .. } = module.repack(packing, [rows, width])?;
    let (mut bytes, mut values) = (vec![0xff; format.row_bytes(width)], vec![0.0; rows * width]);
    for (row, to) in values.chunks_exact_mut(width).enumerate() {
        put(row, &mut bytes);
        let mut columns = vec![0.0; width];
        format.decode(&bytes, 0, &mut columns);
        for (column, x) in columns.into_iter().enumerate() {
            to[order.as_ref().map_or(column, |order| order[column] as usize)] = x;
        }
    }
    Ok((values, format, module.taken))
}

#[test]
fn rows_stand_for_what_the_program_that_packed_them_says() {
    let (files, tensors) = opened(Path::new(FIXTURE));
    let mut formats = Vec::new();
    for name in CASES {
        let packing = packing(&files[0].metadata(name).unwrap());
        let (_, expected) = &tensors[&format!("{name}.values")];
        let shape = <[usize; 2]>::try_from(&expected.shape[..]).unwrap();
        let (found, format, mut taken) = values(&files, &tensors, name, packing, shape).unwrap();
        let expected = Numbers { bytes: files[0].bytes(expected.range.clone()), dtype: Dtype::F32 };
        for (at, x) in found.into_iter().enumerate() {
            let expected = expected.at(at);
            // bitsandbytes multiplies by the row's largest magnitude first, and then by 1/127.
            let bound = if name == "int8" { expected.abs() * 2.0 * f32::EPSILON } else { 0.0 };
            assert!((x - expected).abs() <= bound, "{name}: {x} at {at}, not {expected}");
        }
        taken.extend([format!("{name}.values")]);
        let own = |tensor: &&String| tensor.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
        let left = tensors.keys().filter(own).find(|tensor| !taken.contains(tensor));
        assert_eq!(left, None, "{name}");
        formats.push(format.to_string());
    }
    let [four, eight, nf4] = ["uint4:group=", "uint8:group=", "nf4:group="];
    let expected = [
        format!("{four}128"),
        format!("{four}32"),
        format!("{four}32"),
        format!("{eight}64"),
        format!("{four}64"),
        format!("{eight}128"),
        format!("{four}128"),
        format!("{four}64"),
        format!("{nf4}64,scale=f32"),
        format!("{nf4}64,scale=f32"),
        format!("{nf4}128,scale=f32"),
        "int8".into(),
        "fp8-scaled:group=32".into(),
        "fp8-scaled:group=64".into(),
        "fp8-scaled:group=32".into(),
        "fp8-scaled:group=32".into(),
    ];
    assert_eq!(formats, expected);
}

/// Zero points of the first format are stored less one, within four bits: 15 stored is 0, where AutoGPTQ's programs differ.
#[test]
fn the_zero_point_that_is_stored_as_fifteen_is_zero() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("packed.safetensors");
    // Outputs have the zero points 1 to 7 and 0, all codes are 9.
    let words = |all: &[u32]| -> Vec<u8> { all.iter().flat_map(|word| word.to_le_bytes()).collect() };
    let (codes, zeros) = (words(&[0x9999_9999; 32]), words(&[0xf654_3210]));
    let scales: Vec<u8> = [half::f16::from_f32(0.5); 8].iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let of = |name, dtype, shape, bytes| Output { name, dtype, shape, bytes };
    let outputs = [
        of("a.qweight", Dtype::I32, vec![4, 8], &codes[..]),
        of("a.qzeros", Dtype::I32, vec![1, 1], &zeros),
        of("a.scales", Dtype::F16, vec![1, 8], &scales),
    ];
    write(&path, &outputs).unwrap();
    let (files, tensors) = opened(&path);
    for (less_one, zeros) in [(true, [1, 2, 3, 4, 5, 6, 7, 0]), (false, [0, 1, 2, 3, 4, 5, 6, 15])] {
        let packing = Packing::Gptq { bits: 4, group: None, less_one, ordered: false };
        let (found, ..) = values(&files, &tensors, "a", packing, [8, 32]).unwrap();
        for (row, zero) in found.chunks_exact(32).zip(zeros) {
            assert!(row.iter().all(|&x| x == 0.5 * (9.0 - zero as f32)), "{row:?} of zero point {zero}");
        }
    }
}

/// A case of the fixture after a change of its tensors, its configuration or the shape that is wanted.
type Change = fn(&mut Vec<Owned>, &mut Value, &mut [usize; 2]);

/// A tensor that can be changed.
struct Owned {
    end: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn part<'a>(tensors: &'a mut [Owned], end: &str) -> &'a mut Owned {
    tensors.iter_mut().find(|tensor| tensor.end == end).unwrap()
}

fn without(tensors: &mut Vec<Owned>, end: &str) {
    tensors.retain(|tensor| tensor.end != end);
}

#[test]
fn what_is_wrong_is_said_with_its_name_and_value() {
    let (files, tensors) = opened(Path::new(FIXTURE));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed.safetensors");
    let cases: &[(&str, Change, &str)] = &[
        ("gptq-4-128", |all, _, _| without(all, "qweight"), "there is no tensor 'gptq-4-128.qweight'"),
        ("gptq-4-128", |all, _, _| without(all, "qzeros"), "there is no tensor 'gptq-4-128.qzeros'"),
        ("awq-64", |all, _, _| without(all, "scales"), "there is no tensor 'awq-64.scales'"),
        ("gptq-4-32-ordered", |all, _, _| without(all, "g_idx"), "'gptq-4-32-ordered.g_idx', which desc_act needs"),
        ("gptq-4-128", |_, _, shape| shape[0] = 64, "qweight' is I32 [32, 32]; I32 [32, 64] is needed"),
        ("gptq-4-128", |_, _, shape| shape[0] = 36, "has 36 outputs; packed zero points need a multiple of 8"),
        ("awq-64", |_, _, shape| shape[1] = 96, "'awq-64' has 96 inputs; groups of 64 must divide them"),
        ("gptq-4-row", |_, _, shape| shape[1] = 80, "has groups of 80 inputs; they must be a multiple of 32"),
        ("awq-128", |all, _, _| part(all, "qzeros").dtype = Dtype::U32, "is U32 [2, 2]; I32 [2, 2] is needed"),
        (
            "gptq-4-32-ordered",
            |all, _, _| part(all, "g_idx").bytes[20..24].copy_from_slice(&4i32.to_le_bytes()),
            "g_idx' is 4 at 5; it must be 0 to 3",
        ),
        (
            "gptq-4-32-ordered",
            |all, _, _| part(all, "g_idx").bytes[20..24].copy_from_slice(&(-1i32).to_le_bytes()),
            "g_idx' is -1 at 5; it must be 0 to 3",
        ),
        (
            "gptq-4-32-ordered",
            |all, _, _| part(all, "g_idx").bytes.fill(0),
            "g_idx' gives group 0 128 inputs; it must be 32",
        ),
        (
            "gptq-8-64-ordered",
            |_, config, _| config["desc_act"] = json!(false),
            "g_idx' mixes groups, but desc_act is false; it must be true",
        ),
        (
            "gptq-4-128",
            |all, _, _| part(all, "scales").bytes[10..12].copy_from_slice(&half::f16::NAN.to_le_bytes()),
            "scales' holds NaN at 5; every number must be finite",
        ),
        (
            "fp8-blocks",
            |all, _, _| part(all, "weight_scale_inv").bytes[4..8].copy_from_slice(&f32::INFINITY.to_le_bytes()),
            "weight_scale_inv' holds inf at 1; every number must be finite",
        ),
        ("fp8-blocks", |all, _, _| part(all, "weight").bytes[161] = 0x7f, "weight' holds NaN at [1, 1]"),
        ("fp8-blocks", |all, _, _| without(all, "weight_scale_inv"), "no tensor 'fp8-blocks.weight_scale_inv'"),
        ("fp8-row", |all, _, _| part(all, "weight_scale").shape = vec![4, 4], "shape [4, 4]; [16, 1] or [16] or"),
        ("fp8-row", |_, _, shape| shape[1] = 100, "weight' is F8_E4M3 [16, 96]; F8_E4M3 [16, 100] is needed"),
        ("int8", |all, _, _| without(all, "SCB"), "there is no tensor 'int8.SCB'"),
        ("int8", |all, _, _| part(all, "weight_format").bytes[0] = 2, "it must be 0, rows"),
        ("nf4-64", |all, _, _| without(all, "weight.absmax"), "there is no tensor 'nf4-64.weight.absmax'"),
        (
            "nf4-64",
            |all, _, _| without(all, "weight.quant_state.bitsandbytes__nf4"),
            "there is no tensor 'nf4-64.weight.quant_state.bitsandbytes__nf4'",
        ),
        (
            "nf4-64",
            |all, _, _| part(all, "weight.quant_state.bitsandbytes__nf4").bytes[0] = b'?',
            "bitsandbytes__nf4' is not JSON",
        ),
        ("nf4-64", |_, _, shape| shape[1] = 128, "is of shape [8, 256] as its quant_state says; [8, 128] is needed"),
        (
            "nf4-64",
            |all, _, _| part(all, "weight.quant_map").bytes[..4].copy_from_slice(&0f32.to_le_bytes()),
            "quant_map' has 0 at 0; nf4 has -1",
        ),
        ("nf4-64-nested", |all, _, _| without(all, "weight.nested_quant_map"), "weight.nested_quant_map'"),
        ("nf4-64-nested", |all, _, _| without(all, "weight.nested_absmax"), "weight.absmax' is U8; F32, F16 or BF16"),
    ];
    for &(name, change, said) in cases {
        let mut config: Value = serde_json::from_str(&files[0].metadata(name).unwrap()).unwrap();
        let shape = &tensors[&format!("{name}.values")].1.shape;
        let mut shape = <[usize; 2]>::try_from(&shape[..]).unwrap();
        let own = tensors.iter().filter_map(|(tensor, (_, entry))| {
            let end = tensor.strip_prefix(name)?.strip_prefix('.')?.to_string();
            let bytes = files[0].bytes(entry.range.clone()).to_vec();
            (end != "values").then(|| Owned { end, dtype: entry.dtype, shape: entry.shape.clone(), bytes })
        });
        let mut changed: Vec<Owned> = own.collect();
        change(&mut changed, &mut config, &mut shape);
        let names: Vec<String> = changed.iter().map(|tensor| format!("{name}.{}", tensor.end)).collect();
        let output = |(tensor, name)| {
            let Owned { dtype, shape, bytes, .. }: &Owned = tensor;
            Output { name, dtype: *dtype, shape: shape.clone(), bytes }
        };
        let outputs: Vec<Output<'_>> = changed.iter().zip(names.iter().map(String::as_str)).map(output).collect();
        write(&path, &outputs).unwrap();
        let (files, tensors) = opened(&path);
        let error = values(&files, &tensors, name, packing(&config.to_string()), shape).unwrap_err();
        assert!(error.contains(said) && error.contains(name), "{name}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}
