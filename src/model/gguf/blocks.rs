//! Blocks of quantised weights, as ggml keeps them (`ggml-common.h`, `ggml-quants.c`): 32 neighbouring elements of a row
//! share an f16 scale `d`, and in some types an f16 minimum `m`.

use half::{bf16, f16};

/// How elements are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockType {
    F32,
    F16,
    Bf16,
    /// `d (q - 8)`, `q` of 4 bits.
    Q4_0,
    /// `d q + m`, `q` of 4 bits.
    Q4_1,
    /// `d (q - 16)`, `q` of 5 bits.
    Q5_0,
    /// `d q + m`, `q` of 5 bits.
    Q5_1,
    /// `d q`, `q` a signed byte.
    Q8_0,
}

/// Elements of a quantised block.
const BLOCK: usize = 32;

impl BlockType {
    const ALL: [(u32, BlockType, &'static str); 8] = [
        (0, BlockType::F32, "F32"),
        (1, BlockType::F16, "F16"),
        (30, BlockType::Bf16, "BF16"),
        (2, BlockType::Q4_0, "Q4_0"),
        (3, BlockType::Q4_1, "Q4_1"),
        (6, BlockType::Q5_0, "Q5_0"),
        (7, BlockType::Q5_1, "Q5_1"),
        (8, BlockType::Q8_0, "Q8_0"),
    ];

    /// The type that the format numbers so.
    pub fn numbered(number: u32) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|&&(own, ..)| own == number);
        found.map(|&(_, kind, _)| kind).ok_or_else(|| {
            let known: Vec<&str> = Self::ALL.iter().map(|&(.., name)| name).collect();
            format!("type number {number} of ggml; read are {}", known.join(", "))
        })
    }

    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|&&(_, kind, _)| kind == self).map_or("", |&(.., name)| name)
    }

    /// Elements and bytes of a block.
    fn block(self) -> (usize, usize) {
        match self {
            BlockType::F32 => (1, 4),
            BlockType::F16 | BlockType::Bf16 => (1, 2),
            BlockType::Q4_0 => (BLOCK, 18),
            BlockType::Q4_1 => (BLOCK, 20),
            BlockType::Q5_0 => (BLOCK, 22),
            BlockType::Q5_1 => (BLOCK, 24),
            BlockType::Q8_0 => (BLOCK, 34),
        }
    }

    /// Bytes of so many elements in rows of `width`; `None` where rows are not whole blocks.
    pub fn bytes_of(self, width: usize, elements: usize) -> Option<usize> {
        let (per_block, bytes) = self.block();
        width.is_multiple_of(per_block).then(|| (elements / per_block).checked_mul(bytes))?
    }

    /// Widens whole blocks.
    pub fn dequantise(self, bytes: &[u8], to: &mut [f32]) {
        let (elements, block_bytes) = self.block();
        debug_assert_eq!(bytes.len() / block_bytes, to.len() / elements);
        let blocks = bytes.chunks_exact(block_bytes).zip(to.chunks_exact_mut(elements));
        match self {
            BlockType::F32 => {
                blocks.for_each(|(block, to)| to[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]))
            }
            BlockType::F16 => blocks.for_each(|(block, to)| to[0] = half_at(block, 0)),
            BlockType::Bf16 => {
                blocks.for_each(|(block, to)| to[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32())
            }
            BlockType::Q4_0 => {
                blocks.for_each(|(block, to)| nibbles(&block[2..], 0, to, |q| half_at(block, 0) * (q - 8.0)))
            }
            BlockType::Q4_1 => {
                blocks
                    .for_each(|(block, to)| nibbles(&block[4..], 0, to, |q| half_at(block, 0) * q + half_at(block, 2)));
            }
            BlockType::Q5_0 => blocks.for_each(|(block, to)| {
                nibbles(&block[6..], high_bits(&block[2..6]), to, |q| half_at(block, 0) * (q - 16.0));
            }),
            BlockType::Q5_1 => blocks.for_each(|(block, to)| {
                nibbles(&block[8..], high_bits(&block[4..8]), to, |q| half_at(block, 0) * q + half_at(block, 2));
            }),
            BlockType::Q8_0 => blocks.for_each(|(block, to)| {
                let d = half_at(block, 0);
                to.iter_mut().zip(&block[2..]).for_each(|(to, &q)| *to = d * f32::from(q.cast_signed()));
            }),
        }
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn high_bits(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// 16 bytes hold the low four bits of 32 elements: of the first half in their low nibbles, of the second in their high ones.
/// Bit `i` of `high` is the fifth bit of element `i`.
fn nibbles(bytes: &[u8], high: u32, to: &mut [f32], value: impl Fn(f32) -> f32) {
    let (first, second) = to.split_at_mut(BLOCK / 2);
    for (index, (&byte, (first, second))) in bytes.iter().zip(first.iter_mut().zip(second)).enumerate() {
        let fifth = |element: usize| ((high >> element & 1) << 4) as u8;
        *first = value(f32::from(byte & 0xf | fifth(index)));
        *second = value(f32::from(byte >> 4 | fifth(index + BLOCK / 2)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scale 0.5, minimum -2.
    const D: [u8; 2] = [0x00, 0x38];
    const M: [u8; 2] = [0x00, 0xc0];

    #[test]
    fn blocks_widen_as_ggml_defines_them() {
        // Element i has the low bits i % 16, in both halves, and the fifth bit in the second half only.
        let quants: Vec<u8> = (0..16u8).map(|i| i | i << 4).collect();
        let high = [0, 0, 0xff, 0xff];
        let q = |i: usize| (i % 16) as f32;
        let fifth = |i: usize| if i < 16 { 0.0 } else { 16.0 };
        let signed: Vec<u8> = (0..32).map(|i| (i as i8 - 16).cast_unsigned()).collect();
        type Value<'a> = &'a dyn Fn(usize) -> f32;
        let cases: [(BlockType, Vec<u8>, Value<'_>); 5] = [
            (BlockType::Q4_0, [&D[..], &quants].concat(), &|i| 0.5 * (q(i) - 8.0)),
            (BlockType::Q4_1, [&D[..], &M, &quants].concat(), &|i| 0.5 * q(i) - 2.0),
            (BlockType::Q5_0, [&D[..], &high, &quants].concat(), &|i| 0.5 * (q(i) + fifth(i) - 16.0)),
            (BlockType::Q5_1, [&D[..], &M, &high, &quants].concat(), &|i| 0.5 * (q(i) + fifth(i)) - 2.0),
            (BlockType::Q8_0, [&D[..], &signed].concat(), &|i| 0.5 * (i as f32 - 16.0)),
        ];
        for (kind, block, value) in cases {
            let mut widened = [0.0; 64];
            kind.dequantise(&block.repeat(2), &mut widened);
            let wanted: Vec<f32> = (0..64).map(|i| value(i % 32)).collect();
            assert_eq!(widened.to_vec(), wanted, "{}", kind.name());
            assert_eq!(kind.bytes_of(32, 64), Some(2 * block.len()));
            assert_eq!(kind.bytes_of(48, 96), None);
        }
        let mut plain = [0.0; 2];
        BlockType::F16.dequantise(&[D, M].concat(), &mut plain);
        assert_eq!(plain, [0.5, -2.0]);
        BlockType::Bf16.dequantise(&[0x00, 0x3f, 0x00, 0xc0], &mut plain);
        assert_eq!(plain, [0.5, -2.0]);
    }
}
