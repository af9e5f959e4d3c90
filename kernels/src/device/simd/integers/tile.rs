//! The product itself, for every instruction set that has [`Lanes`].

use super::super::Simd;
use super::super::linear::{AHEAD_BYTES, TILE};
use super::super::row_list::LINE_BYTES;
use super::super::vector::each;
use super::lanes::Lanes;
use super::unpack::{Bytes, Levels, Nibbles, Q6K, SixBits, Unpack, Unpacked};
use super::{Codes, GROUP, Integers, QUAD, Quad};

impl Integers<'_> {
    /// Computes them with the instructions of `lanes`.
    #[inline(always)]
    pub(super) fn with<L: Lanes>(self, lanes: L) {
        // SAFETY: how codes lie is what the format of `w` says, and `over` checks that rows are long enough for it.
        unsafe {
            match self.codes {
                Codes::Row => self.over(lanes, Bytes::<true>),
                Codes::Bytes => self.over(lanes, Bytes::<false>),
                Codes::Nibbles { minimum: false, fifth: false } => self.over(lanes, Nibbles::<false, false>),
                Codes::Nibbles { minimum: true, fifth: false } => self.over(lanes, Nibbles::<true, false>),
                Codes::Nibbles { minimum: false, fifth: true } => self.over(lanes, Nibbles::<false, true>),
                Codes::Nibbles { minimum: true, fifth: true } => self.over(lanes, Nibbles::<true, true>),
                Codes::Levels(levels) => self.over(lanes, Levels(levels)),
                Codes::SixBits { fifth: false } => self.over(lanes, SixBits::<false>),
                Codes::SixBits { fifth: true } => self.over(lanes, SixBits::<true>),
                Codes::Q6K => self.over(lanes, Q6K),
            }
        }
    }

    /// # Safety
    /// The rows of `w` are what is unpacked.
    #[inline(always)]
    unsafe fn over<L: Lanes, U: Unpack>(self, lanes: L, unpack: U) {
        let Integers { columns: part, y, .. } = self;
        let (width, count) = (part.w.width(), part.w.count());
        assert!(Quad::count(width) <= part.stride && part.rows * part.stride <= part.x.len(), "whole quads of x");
        let groups = width.div_ceil(GROUP);
        let scale_bytes = if U::ROW { size_of::<f32>() } else { 0 };
        let unpacked = scale_bytes + groups * U::BYTES / (QUAD / GROUP);
        assert!(unpacked <= part.w.row_bytes(), "rows of w hold what is unpacked");
        let (span, stride_bytes) = part.w.span().expect("rows of a matrix lie along it");
        let row = |index: usize| span[index * stride_bytes..][..part.w.row_bytes()].as_ptr();
        let simd = lanes.simd();
        for first in (0..count).step_by(TILE) {
            // Rows that are not there are the last one again.
            let rows: [*const u8; TILE] = each(std::ptr::null(), |offset| row((first + offset).min(count - 1)));
            let scales = U::ROW.then(|| {
                // SAFETY: such a row begins with its scale.
                rows.map(|row| unsafe { row.cast::<f32>().read_unaligned() })
            });
            let mut query = 0;
            while query < part.rows {
                // SAFETY: the caller's promise; rows of `w` are whole by `row`, rows of `x` by the assertion.
                query += unsafe {
                    let (x, stride) = (part.x.as_ptr().add(query * part.stride), part.stride);
                    let at = [query, first];
                    match part.rows - query {
                        1 => part.put(simd, y, tile::<L, U, 1>(lanes, unpack, rows, groups, x, stride), scales, at),
                        2 | 3 => part.put(simd, y, tile::<L, U, 2>(lanes, unpack, rows, groups, x, stride), scales, at),
                        4..8 => part.put(simd, y, tile::<L, U, 4>(lanes, unpack, rows, groups, x, stride), scales, at),
                        _ => part.put(simd, y, tile::<L, U, 8>(lanes, unpack, rows, groups, x, stride), scales, at),
                    }
                };
            }
        }
    }
}

/// Products of four rows of `w` and of `QUERIES` rows of `x`, to be summed over the lanes.
///
/// # Safety
/// Rows of `w` hold so many groups, those of `x`, `stride` apart, as many quads as these take.
#[inline(always)]
unsafe fn tile<L: Lanes, U: Unpack, const QUERIES: usize>(
    lanes: L,
    unpack: U,
    rows: [*const u8; TILE],
    groups: usize,
    x: *const Quad,
    stride: usize,
) -> [[<L::Simd as Simd>::Vector; TILE]; QUERIES] {
    let simd = lanes.simd();
    let mut tile = [[simd.splat(0.0); TILE]; QUERIES];
    for (index, row) in rows.into_iter().enumerate() {
        let (mut sums, mut least) = ([lanes.splat(0.0); QUERIES], [lanes.splat(0.0); QUERIES]);
        for quad in 0..groups.div_ceil(QUAD / GROUP) {
            // Pieces of 16 bytes out of order are no stream that processors notice by themselves. Their work takes
            // longer than reading them.
            for line in (0..U::BYTES).step_by(LINE_BYTES) {
                simd.prefetch_for_work(row.wrapping_add(quad * U::BYTES + AHEAD_BYTES + line));
            }
            // SAFETY: the caller's promise.
            let w = unsafe { unpack.quad(lanes, row, quad, groups - 1) };
            for query in 0..QUERIES {
                // SAFETY: the caller's promise.
                let x = unsafe { &*x.add(query * stride + quad) };
                sums[query] = add::<L, U>(lanes, &w, x, sums[query]);
                least[query] = lanes.mul_add(w.least, lanes.numbers(&x.sums), least[query]);
            }
        }
        for (query, tile) in tile.iter_mut().enumerate() {
            tile[index] = lanes.fold(sums[query], least[query]);
        }
    }
    tile
}

/// Adds the products of a quad's codes, each group's under its scales.
#[inline(always)]
fn add<L: Lanes, U: Unpack>(lanes: L, w: &Unpacked<L>, x: &Quad, sums: L::Numbers) -> L::Numbers {
    let codes = [lanes.codes(&x.codes[0]), lanes.codes(&x.codes[1])];
    let scales = lanes.numbers(&x.scales);
    let [first, second] = w.scales;
    if U::HALVES {
        let dot = lanes.dot::<false, 1>([w.codes[0]], [codes[0]]);
        let sums = lanes.mul_add(dot, lanes.mul(first, scales), sums);
        let dot = lanes.dot::<false, 1>([w.codes[1]], [codes[1]]);
        return lanes.mul_add(dot, lanes.mul(second, scales), sums);
    }
    let dot = match U::SIGNED {
        true => lanes.dot::<true, 2>(w.codes, codes),
        false => lanes.dot::<false, 2>(w.codes, codes),
    };
    lanes.mul_add(dot, lanes.mul(first, scales), sums)
}
