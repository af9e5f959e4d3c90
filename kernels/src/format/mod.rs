//! Formats: how a row of numbers is kept, of a key or a value in the cache, and of a weight matrix.
//!
//! A format turns a row of f32 into bytes and back, and reads a vector of the row in registers, so that neither `decode`
//! nor a product of few rows with weights makes a widened copy. The type in which attention is computed is another matter:
//! rows of any format are widened to f32 as they are read, and a pass in bf16 over many queries rounds what codes stand for
//! to bf16. Keys and values may have different formats ([`KvFormat`]), and weights one of their own. Adding a format is one
//! file with a `RowCodec` and one line in `formats!`.

mod blocks;
mod by_channel;
mod dynamic_map;
mod fit;
mod fp8;
mod fp8_scaled;
mod gpu;
mod hadamard;
mod int8;
mod ints;
mod iq4_nl;
mod iq4_xs;
mod kv;
mod nf4;
mod plain;
mod products;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod six_bits;
mod turboquant;
mod uint;

pub use blocks::most_within;
pub use dynamic_map::{DynamicMap, SIGNED, UNSIGNED};
pub use fp8_scaled::Fp8Scaled;
pub use gpu::{GPU_PAGE_TOKENS, GpuRows};
pub(crate) use hadamard::rotate;
pub use int8::Int8;
pub use kv::{FULL_PARAMETERS, Full, KIVI, KvFormat};
pub use nf4::{LEVELS as NF4_LEVELS, Nf4};
pub use uint::{Grid, Step, Uint};

use crate::device::simd::Isa;
use crate::device::simd::integers::Codes;
use crate::device::simd::nibbles::{FourBits, Nibbles};
use crate::device::simd::reader::{Plain, RowReader};
use crate::device::simd::widen::Widen;
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::{ChannelScales, Coded, DType, RowCode, Rows};
use half::f16;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Bytes of the widest row of a cache in a format of eight bits or fewer, and how many more are read behind keys by channel.
const ROW_BYTES: usize = 256;
const BEHIND: usize = 2;

/// A format of rows.
pub(crate) trait RowCodec: RowReader {
    /// Name on the command line and in records.
    const NAME: &'static str;
    /// One line for `kvsieve list formats`.
    const ABOUT: &'static str;
    /// Its parameters.
    const PARAMETERS: &'static [Parameter] = &[];

    /// The format that these parameters, checked to be known ones, make.
    ///
    /// # Errors
    /// When the value of a parameter is wrong.
    fn build(named: &Named) -> Result<Self, NamedError>;

    /// The format as it is written, with its parameters.
    fn spell(self, to: &mut dyn fmt::Write) -> fmt::Result {
        to.write_str(Self::NAME)
    }

    /// What the width of a row must be, in words, if it cannot be this one.
    fn wants(self, _width: usize) -> Option<String> {
        None
    }

    /// Whether the bytes of a row are those of the rotated row ([`rotate`]); `encode` and `decode` see to it, a reader
    /// of the bytes has to.
    fn rotated(self) -> bool {
        false
    }

    /// Tokens that share what is multiplied with a row and added to it, for each channel: rows are whole numbers then. Only keys are
    /// kept so.
    fn group_tokens(self) -> Option<usize> {
        None
    }

    /// The largest of these whole numbers.
    fn steps(self) -> f32 {
        0.0
    }

    /// How codes lie, where products of whole numbers read them.
    fn codes(self) -> Option<Codes> {
        None
    }

    /// How a row lies that is blocks of four-bit codes with an f16 scale each, and nothing else.
    fn four_bits(self) -> Option<FourBits> {
        None
    }

    /// Writes the row `[D]` into the bytes of a row, all of them.
    fn encode(self, row: &[f32], to: &mut [u8]);

    /// Writes the row `[D]` of a weight matrix so that its errors, each by its weight, are least, where scales are searched for; where
    /// they are not, as [`RowCodec::encode`] does.
    fn encode_weighted(self, row: &[f32], _weights: &[f32], to: &mut [u8]) {
        self.encode(row, to);
    }

    /// Reads the elements from `first` on, as many as `to` holds, from the bytes of a row.
    fn decode(self, from: &[u8], first: usize, to: &mut [f32]);
}

/// The registry: an enum with a variant for each format, and what depends on the format by a `match` over them.
macro_rules! formats {
    ($($(#[$about:meta])* $variant:ident($codec:ty)),+ $(,)?) => {
        /// How rows are kept: one of the registered formats, with its parameters.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(into = "String", try_from = "String")]
        pub enum RowFormat {
            $($(#[$about])* $variant($codec)),+
        }

        /// Evaluates an expression with the format's [`RowCodec`].
        macro_rules! with_codec {
            ($format:expr, $name:ident => $result:expr) => {
                match $format {
                    $($crate::format::RowFormat::$variant($name) => $result),+
                }
            };
        }
        pub(crate) use with_codec;

        /// Every format, in the order in which they are listed.
        pub const FORMATS: &[FormatEntry] = &[$(FormatEntry {
            name: <$codec as RowCodec>::NAME,
            about: <$codec as RowCodec>::ABOUT,
            parameters: <$codec as RowCodec>::PARAMETERS,
            build: |named| Ok(RowFormat::$variant(<$codec as RowCodec>::build(named)?)),
        }),+];

    };
}

formats! {
    /// 32-bit IEEE.
    F32(Plain<f32>),
    /// 16-bit brain float.
    Bf16(Plain<half::bf16>),
    /// 16-bit IEEE.
    F16(Plain<half::f16>),
    /// A signed byte for each element, and a scale for each row.
    Int8(int8::Int8),
    /// 8-bit floats with three bits of mantissa.
    Fp8E4m3(fp8::Fp8<3>),
    /// 8-bit floats with two bits of mantissa.
    Fp8E5m2(fp8::Fp8<2>),
    /// Four bits for each element, and a scale for each group.
    Int4(ints::Ints<4>),
    /// Three.
    Int3(ints::Ints<3>),
    /// Two.
    Int2(ints::Ints<2>),
    /// Bytes, with scales for each channel of a group of tokens.
    Int8Channel(by_channel::ByChannel<8>),
    /// Four bits.
    Int4Channel(by_channel::ByChannel<4>),
    /// Two.
    Int2Channel(by_channel::ByChannel<2>),
    /// Levels of a normal distribution, and a scale for each group.
    Nf4(nf4::Nf4),
    /// Levels of a normal distribution for rotated rows, and their lengths.
    TurboQuant(turboquant::TurboQuant),
    /// Bytes, and a scale for each block.
    Q8_0(q8_0::Q8_0),
    /// Five bits, a scale and a minimum for each block.
    Q5_1(q5_1::Q5_1),
    /// Five bits, and a scale for each block.
    Q5_0(q5_0::Q5_0),
    /// Four bits, a scale and a minimum for each block.
    Q4_1(q4_1::Q4_1),
    /// Four bits, and a scale for each block.
    Q4_0(q4_0::Q4_0),
    /// Super-blocks of six bits.
    Q6K(q6_k::Q6K),
    /// Super-blocks of five bits.
    Q5K(q5_k::Q5K),
    /// Super-blocks of four bits.
    Q4K(q4_k::Q4K),
    /// Super-blocks of three bits.
    Q3K(q3_k::Q3K),
    /// Super-blocks of two bits.
    Q2K(q2_k::Q2K),
    /// Levels, and a scale for each block.
    Iq4Nl(iq4_nl::Iq4Nl),
    /// Super-blocks of levels.
    Iq4Xs(iq4_xs::Iq4Xs),
    /// Four bits, a scale and a zero point for each group.
    Uint4(uint::Uint<4>),
    /// Bytes, a scale and a zero point for each group.
    Uint8(uint::Uint<8>),
    /// 8-bit floats with a scale for each group.
    Fp8Scaled(fp8_scaled::Fp8Scaled),
}

#[cfg(test)]
#[path = "../../../docs/examples/format.rs"]
mod example;

/// A format as the registry knows it.
pub struct FormatEntry {
    /// Name on the command line and in records.
    pub name: &'static str,
    /// One line for `kvsieve list formats`.
    pub about: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
    build: fn(&Named) -> Result<RowFormat, NamedError>,
}

impl FormatEntry {
    /// Its parameters, with those of keys and values together where some of these may stay in full.
    pub fn all_parameters(&self) -> Vec<Parameter> {
        let format = self.default();
        let full: &[Parameter] = if format.dtype().is_some() || format.is_of_weights() { &[] } else { FULL_PARAMETERS };
        [self.parameters, full].concat()
    }

    /// The format with its defaults.
    fn default(&self) -> RowFormat {
        let named = Named::from_str(self.name).expect("names of formats are names");
        (self.build)(&named).expect("formats have defaults")
    }
}

/// Rows that a format cannot keep.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Of this width.
    #[error("{what} is {width}; {format} keeps rows whose width is {wanted}")]
    Width {
        /// The format.
        format: String,
        /// What the rows are.
        what: String,
        /// Their width.
        width: usize,
        /// What it must be.
        wanted: String,
    },
    /// Values or weights.
    #[error(
        "{format} is a format of keys: its scales run along a channel over tokens; for values and weights there are int8, int4 and others"
    )]
    OfKeys {
        /// The format.
        format: String,
    },
    /// More tokens in full than leave one to be coded.
    #[error(
        "{format} codes no token before there are {least}, and there are {tokens}; take a smaller group, or leave fewer in full by recent and first"
    )]
    InFull {
        /// The format of keys and values.
        format: String,
        /// Tokens that are in full when the first are coded, and these.
        least: usize,
        /// Tokens that there are.
        tokens: usize,
    },
    /// Keys or values.
    #[error(
        "{format} is a format of weights; for keys and values there are int8, int4 and others, see kvsieve list formats"
    )]
    OfWeights {
        /// The format.
        format: String,
    },
}

impl RowFormat {
    /// The format of plain elements.
    pub fn plain(dtype: DType) -> Self {
        match dtype {
            DType::F32 => RowFormat::F32(Plain::NEW),
            DType::Bf16 => RowFormat::Bf16(Plain::NEW),
            DType::F16 => RowFormat::F16(Plain::NEW),
        }
    }

    /// The type of its elements, if it keeps nothing but these.
    pub fn dtype(self) -> Option<DType> {
        DType::ALL.into_iter().find(|&dtype| RowFormat::plain(dtype) == self)
    }

    /// Refuses rows of a width that the format cannot keep; `what` they are is part of the message.
    ///
    /// # Errors
    /// When `width` is not a multiple of the elements that share a scale, or is not one that can be rotated.
    pub fn check(self, what: &str, width: usize) -> Result<(), FormatError> {
        match with_codec!(self, codec => codec.wants(width)) {
            None => Ok(()),
            Some(wanted) => Err(FormatError::Width { format: self.to_string(), what: what.into(), width, wanted }),
        }
    }

    /// Whether nothing but weights is kept so.
    pub fn is_of_weights(self) -> bool {
        fn of<R: RowReader>(_: R) -> bool {
            R::OF_WEIGHTS
        }
        with_codec!(self, codec => of(codec))
    }

    /// Tokens that share scales, for each channel, where that is how keys are kept.
    pub fn group_tokens(self) -> Option<usize> {
        with_codec!(self, codec => codec.group_tokens())
    }

    /// Scales and minimums of a group of keys `[tokens, D]`, and the keys as whole numbers in their place.
    pub(crate) fn normalise(self, keys: &mut [f32], scales: &mut [f16], minimums: &mut [f16]) {
        by_channel::measure(keys, with_codec!(self, codec => codec.steps()), scales, minimums);
        self.to_codes(keys, ChannelScales { scales: &*scales, minimums: &*minimums });
    }

    /// Keys `[tokens, D]` as whole numbers within what a group spans.
    pub(crate) fn to_codes(self, keys: &mut [f32], channels: ChannelScales<'_>) {
        by_channel::to_codes(keys, with_codec!(self, codec => codec.steps()), channels);
    }

    /// Whether a row's bytes, read as they lie, are those of the rotated row.
    pub fn is_rotated(self) -> bool {
        with_codec!(self, codec => codec.rotated())
    }

    /// What rows of f32 are rounded to: to nothing where this is how they are.
    pub fn rounding(self) -> Option<Self> {
        Some(self).filter(|&format| format != RowFormat::plain(DType::F32))
    }

    /// What multiplies cached rows of `width` four-bit codes fastest on a path, if that is not [`RowFormat::dots`].
    pub fn nibbles(self, isa: Isa, width: usize) -> Option<Nibbles> {
        Nibbles::new(isa, width, with_codec!(self, codec => codec.four_bits())?)
    }

    /// How codes lie, where products of whole numbers read them.
    pub fn codes(self) -> Option<Codes> {
        with_codec!(self, codec => codec.codes())
    }

    /// Bytes of a row of `width` elements, with all that belongs to it.
    pub fn row_bytes(self, width: usize) -> usize {
        with_codec!(self, codec => codec.row_bytes(width))
    }

    /// Rows `[count, width]` that are kept in these bytes, one behind another.
    ///
    /// # Panics
    /// When `bytes` is of another length, or not aligned to plain elements.
    #[inline]
    pub fn rows<'a>(&'a self, bytes: &'a [u8], [count, width]: [usize; 2]) -> Rows<'a> {
        match self.dtype() {
            Some(dtype) => Rows::contiguous(dtype, bytes, [count, width]),
            None => Rows::Coded(Coded::new(self, bytes, self.row_bytes(width), width)),
        }
    }

    /// Writes rows `[_, width]` into the bytes of as many rows.
    ///
    /// # Panics
    /// When there are not as many bytes.
    pub fn encode(self, rows: &[f32], width: usize, to: &mut [u8]) {
        let row_bytes = self.row_bytes(width);
        assert_eq!(rows.len() / width * row_bytes, to.len(), "rows and the bytes for them differ in number");
        with_codec!(self, codec => {
            rows.chunks_exact(width).zip(to.chunks_exact_mut(row_bytes)).for_each(|(row, to)| codec.encode(row, to));
        });
    }

    /// Writes a row `[width]` of a weight matrix so that the squares of its errors, each by its weight, are least, in formats whose scales
    /// are searched for; in others as [`RowFormat::encode`] does.
    pub fn encode_weighted(self, row: &[f32], weights: &[f32], to: &mut [u8]) {
        with_codec!(self, codec => codec.encode_weighted(row, weights, to));
    }
}

impl RowCode for RowFormat {
    fn decode(&self, from: &[u8], first: usize, to: &mut [f32]) {
        with_codec!(*self, codec => read(codec, self, from, first, to));
    }
}

/// As [`RowCodec::decode`], by vectors where it can be: these give the same bits on every path.
fn read<C: RowCodec>(codec: C, format: &RowFormat, from: &[u8], first: usize, to: &mut [f32]) {
    let end = first + to.len();
    let is_whole = || first == 0 && codec.row_bytes(end) == from.len() && codec.wants(end).is_none();
    // A rotated row is turned back whole.
    if !first.is_multiple_of(Widen::<C>::STEP) || (codec.rotated() && !is_whole()) {
        return codec.decode(from, first, to);
    }
    // Behind a row of the cache more of it follows; nothing need follow these bytes.
    let mut copy = [0; ROW_BYTES + BEHIND];
    let bytes = match codec.group_tokens() {
        Some(_) => {
            copy[..from.len()].copy_from_slice(from);
            &copy[..from.len()]
        }
        None => from,
    };
    let rows = Rows::Coded(Coded::new(format, bytes, from.len(), end));
    let widened = bytemuck::cast_slice_mut(to);
    Isa::current().run(Widen { rows, reader: codec, columns: first..end, dtype: DType::F32, to: widened });
    if codec.rotated() {
        rotate(to);
    }
}

impl fmt::Display for RowFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        with_codec!(*self, codec => codec.spell(&mut text))?;
        formatter.pad(&text)
    }
}

impl FromStr for RowFormat {
    type Err = NamedError;

    fn from_str(text: &str) -> Result<Self, NamedError> {
        RowFormat::of(&text.parse()?)
    }
}

impl RowFormat {
    /// The format of this name with these parameters.
    ///
    /// # Errors
    /// When there is no such format, or its parameters are wrong.
    pub fn of(named: &Named) -> Result<Self, NamedError> {
        let entry = named.find("format", FORMATS, |entry| entry.name)?;
        named.check(entry.parameters)?;
        (entry.build)(named)
    }
}

impl From<RowFormat> for String {
    fn from(format: RowFormat) -> String {
        format.to_string()
    }
}

impl TryFrom<String> for RowFormat {
    type Error = NamedError;

    fn try_from(text: String) -> Result<Self, NamedError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::example::E5m2;
    use super::*;
    use crate::device::Cpu;
    use crate::device::simd::{Simd, SimdOp};

    /// Reads all elements of a row by vectors, the last in part.
    struct Load<'a>(&'a [u8], &'a mut [f32]);

    impl SimdOp for Load<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let Load(row, to) = self;
            for (block, to) in to.chunks_mut(S::LANES).enumerate() {
                let mut lanes = vec![0.0; S::LANES];
                // SAFETY: the row has as many elements as `to`, and a chunk is at most a vector.
                let vector = unsafe { E5m2.load_part(simd, row.as_ptr(), block * S::LANES, to.len()) };
                simd.write(&mut lanes, vector);
                to.copy_from_slice(&lanes[..to.len()]);
            }
        }
    }

    #[test]
    fn the_example_of_the_guide_keeps_three_bits() {
        let row: Vec<f32> = (0..37).map(|i| (i as f32 - 18.0) * 0.37).collect();
        let mut bytes = vec![0; E5m2.row_bytes(row.len())];
        E5m2.encode(&row, &mut bytes);
        let (mut decoded, mut loaded) = (vec![0.0; row.len()], vec![0.0; row.len()]);
        E5m2.decode(&bytes, 0, &mut decoded);
        Cpu::new(Some(1)).unwrap().isa().run(Load(&bytes, &mut loaded));
        assert_eq!(decoded, loaded);
        assert!(row.iter().zip(&decoded).all(|(x, back)| (x - back).abs() <= x.abs() / 8.0), "{row:?} {decoded:?}");
        assert_eq!((E5m2::NAME, E5m2::build(&"e5m2".parse().unwrap()).unwrap()), ("e5m2", E5m2));
    }
}
