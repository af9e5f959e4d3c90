//! How queries, keys and values lie in a GPU's memory: what `kernels/formats.cuh` is compiled with.
//!
//! Queries and outputs are elements of the pass's type. Keys and values are such elements too, or codes of the formats that
//! kernels there widen on their way to a product: the same bytes as on the CPU. A format of the registry that has no number here
//! is for the CPU alone.

use super::{KvFormat, RowFormat};
use crate::tensor::{DType, Tensor};

/// The element type of a pass, and how its keys and values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuRows {
    dtype: DType,
    kv: KvFormat,
}

/// A format as kernels are told of it: its number in `kernels/formats.cuh`, and for int4 the elements of a group and whether
/// they have a minimum.
type Told = (usize, Option<(usize, bool)>);

/// Tokens of a page of codes are a multiple of this: every so many rows begin at a multiple of the 16 bytes that are copied
/// at once, whatever the bytes of one are.
pub const GPU_PAGE_TOKENS: usize = 8;

fn told(format: RowFormat, dtype: DType) -> Option<Told> {
    match format {
        RowFormat::Int8(_) => Some((1, None)),
        RowFormat::Fp8E4m3(_) => Some((2, None)),
        RowFormat::Fp8E5m2(_) => Some((3, None)),
        RowFormat::Int4(ints) => ints.groups().map(|groups| (4, Some(groups))),
        plain => (plain == RowFormat::plain(dtype)).then_some((0, None)),
    }
}

impl GpuRows {
    /// Rows of a pass in `dtype` over keys and values in `kv`.
    ///
    /// # Errors
    /// In words, when no kernel reads these.
    pub fn new(dtype: DType, kv: KvFormat) -> Result<Self, String> {
        let is_read = |format| told(format, dtype).is_some();
        match is_read(kv.k) && is_read(kv.v) && !kv.keeps_full() {
            true => Ok(GpuRows { dtype, kv }),
            false => Err(format!(
                "no kernel for GPUs reads keys and values in {kv} in a pass of {dtype}; there are {dtype}, int8, fp8-e4m3, \
                 fp8-e5m2 and int4, all tokens alike and not rotated; or use --device cpu"
            )),
        }
    }

    /// Element type of queries and outputs.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether keys, and whether values, are codes.
    pub fn coded(&self) -> [bool; 2] {
        [self.kv.k, self.kv.v].map(|format| format.dtype().is_none())
    }

    /// Whether any are.
    pub fn is_coded(&self) -> bool {
        self.coded().contains(&true)
    }

    /// Whether `decode` takes the codes of keys, and of values, as they lie: `IN_PLACE` of `kernels/formats.cuh`.
    pub fn in_place(&self, head_dim: usize) -> [bool; 2] {
        let takes = |format: RowFormat| match self.dtype {
            DType::F32 => false,
            DType::F16 => !matches!(format, RowFormat::Int8(_)),
            DType::Bf16 => true,
        };
        [self.kv.k, self.kv.v].map(|format| format.dtype().is_none() && takes(format) && head_dim.is_multiple_of(64))
    }

    /// Bytes of a key, and of a value.
    pub fn row_bytes(&self, head_dim: usize) -> [usize; 2] {
        [self.kv.k, self.kv.v].map(|format| format.row_bytes(head_dim))
    }

    /// Bytes of `lists` lists of so many keys, and of as many values, behind one another; each list of codes begins at a
    /// multiple of 16 bytes.
    pub fn lists_bytes(&self, lists: usize, tokens: usize, head_dim: usize) -> [usize; 2] {
        let [key, value] = self.row_bytes(head_dim);
        let list = |row: usize, coded| if coded { (tokens * row).next_multiple_of(16) } else { tokens * row };
        let [keys, values] = self.coded();
        [lists * list(key, keys), lists * list(value, values)]
    }

    /// Keys (`part` 0) or values (`part` 1) `[B, Hkv, Lk, D]` as lists of codes, as [`GpuRows::lists_bytes`] has them; `None` where
    /// these are elements.
    pub fn encode(&self, part: usize, tensor: &Tensor) -> Option<Vec<u8>> {
        let ([.., tokens, head_dim], dtype) = (tensor.dims(), tensor.dtype());
        let (format, row_bytes) = ([self.kv.k, self.kv.v][part], self.row_bytes(head_dim)[part]);
        let list_bytes = self.lists_bytes(1, tokens, head_dim)[part];
        let mut row = vec![0.0; head_dim];
        let mut list_of = |list: &[u8]| {
            let mut bytes = vec![0; list_bytes];
            for (from, to) in list.chunks_exact(head_dim * dtype.bytes()).zip(bytes.chunks_exact_mut(row_bytes)) {
                dtype.decode(from, &mut row);
                format.encode(&row, head_dim, to);
            }
            bytes
        };
        let lists = tensor.bytes().chunks_exact(tokens * head_dim * dtype.bytes());
        self.coded()[part].then(|| lists.flat_map(&mut list_of).collect())
    }

    /// Macros that say so, where anything is coded.
    pub fn macros(&self) -> Vec<(&'static str, usize)> {
        if !self.is_coded() {
            return Vec::new();
        }
        let names = [("K_FORMAT", "K_GROUP", "K_ZERO"), ("V_FORMAT", "V_GROUP", "V_ZERO")];
        let mut macros = Vec::new();
        for (format, (name, group, zero)) in [self.kv.k, self.kv.v].into_iter().zip(names) {
            let (number, groups) = told(format, self.dtype).expect("checked as this was made");
            macros.push((name, number));
            macros.extend(groups.into_iter().flat_map(|(of, with)| [(group, of), (zero, usize::from(with))]));
        }
        macros
    }
}

impl From<DType> for GpuRows {
    fn from(dtype: DType) -> Self {
        GpuRows { dtype, kv: dtype.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(kv: &str) -> Result<GpuRows, String> {
        GpuRows::new(DType::Bf16, kv.parse().unwrap())
    }

    #[test]
    fn formats_have_their_numbers_and_bytes() {
        let cases = [
            ("bf16", vec![], [256, 256]),
            ("int8", vec![("K_FORMAT", 1), ("V_FORMAT", 1)], [132, 132]),
            ("k=bf16,v=fp8-e5m2", vec![("K_FORMAT", 0), ("V_FORMAT", 3)], [256, 128]),
            (
                "k=int4:group=64,zero=true,v=fp8-e4m3",
                vec![("K_FORMAT", 4), ("K_GROUP", 64), ("K_ZERO", 1), ("V_FORMAT", 2)],
                [72, 128],
            ),
        ];
        for (kv, macros, bytes) in cases {
            let rows = rows(kv).unwrap();
            assert_eq!((rows.macros(), rows.row_bytes(128)), (macros, bytes), "{kv}");
        }
        // 5 keys of 36 bytes are 180, and a list of codes takes whole 16 bytes.
        assert_eq!(rows("k=int4,v=bf16").unwrap().lists_bytes(3, 5, 64), [3 * 192, 3 * 5 * 128]);
    }

    #[test]
    fn the_numbers_are_those_of_the_kernels() {
        let text = include_str!("../../formats.cuh");
        for (name, format) in [("INT8", "int8"), ("E4M3", "fp8-e4m3"), ("E5M2", "fp8-e5m2"), ("INT4", "int4")] {
            let (number, _) = told(format.parse().unwrap(), DType::F32).unwrap();
            assert!(text.contains(&format!("#define {name} {number}\n")), "{name}");
        }
    }

    #[test]
    fn what_kernels_do_not_read_is_refused() {
        for kv in ["f32", "k=bf16,v=f16", "q8_0", "int4:hadamard=true", "kivi", "int8:recent=64", "int8:first=4"] {
            let error = rows(kv).unwrap_err();
            assert!(error.contains("there are bf16, int8, fp8-e4m3"), "{kv}: {error}");
        }
    }
}
