//! Types of tensors by their numbers in ggml: each is a format of rows, called as in the registry of formats.

use crate::format::RowFormat;

/// Numbers and names of the types that are read.
pub(super) const TYPES: [(u32, &str); 15] = [
    (0, "f32"),
    (1, "f16"),
    (30, "bf16"),
    (2, "q4_0"),
    (3, "q4_1"),
    (6, "q5_0"),
    (7, "q5_1"),
    (8, "q8_0"),
    (10, "q2_k"),
    (11, "q3_k"),
    (12, "q4_k"),
    (13, "q5_k"),
    (14, "q6_k"),
    (20, "iq4_nl"),
    (23, "iq4_xs"),
];

/// The format that ggml numbers so.
///
/// # Errors
/// In words, when it is none that is read.
pub(super) fn numbered(number: u32) -> Result<RowFormat, String> {
    let found = TYPES.iter().find(|(own, _)| *own == number);
    found.map(|(_, name)| name.parse().expect("each is a registered format")).ok_or_else(|| {
        let known: Vec<String> = TYPES.iter().map(|(_, name)| name.to_uppercase()).collect();
        format!("type number {number} of ggml; read are {}", known.join(", "))
    })
}

/// The number of a format in ggml; `None` where it has none.
pub fn number(format: RowFormat) -> Option<u32> {
    let name = format.to_string();
    TYPES.iter().find(|(_, own)| *own == name).map(|(number, _)| *number)
}

/// Bytes of a tensor of these extents; `None` where its rows are not whole blocks, or it is larger than any file.
pub(super) fn bytes_of(format: RowFormat, shape: &[usize]) -> Option<usize> {
    let elements = shape.iter().try_fold(1usize, |all, &extent| all.checked_mul(extent));
    let width = *shape.last()?;
    elements.filter(|&elements| elements <= isize::MAX as usize / 8)?;
    format.check("a row", width).ok()?;
    Some(shape[..shape.len() - 1].iter().product::<usize>() * format.row_bytes(width))
}
