//! An evicted token's value is merged into that of the retained token whose key is most like its own.
//!
//! kvpress's MergingPress. With `c` the cosine of the two keys, if it reaches the threshold (at least 0), and `|v|` the norms of the
//! values as they were, the evicted token `e` has the weight `w = c |v_e| / (|v_e| + |v_t|)` and the retained token `t`
//! becomes `(v_t + sum w v_e) / (1 + sum w)`. Keys stay as they are. Of equal cosines the earliest retained token takes the
//! evicted token.
//!
//! The search is a product of all evicted tokens with all kept keys, in tiles that fit a core's cache, in parallel over blocks of
//! evicted tokens; nothing grows with the square. Then evicted tokens are sorted by their token, so that each value is written once.

use super::{Action, Fold};
use crate::attention::Shape;
use crate::cache::PagedCache;
use crate::device::cpu::Slots;
use crate::device::gemm::{Matrix, product};
use crate::device::simd::{Isa, loops};
use crate::memory::{Buffer, Label};
use crate::named::Parameter;
use crate::policy::{Part, PartEntry, PolicyError};
use rayon::prelude::*;

/// The registry's line.
pub const ENTRY: PartEntry = PartEntry {
    name: "merge",
    about: "an evicted token's value is averaged into that of the retained token with the most similar key",
    paper: "",
    parameters: &[Parameter {
        name: "threshold",
        default: "0",
        about: "least cosine of the keys; below, it is dropped",
    }],
    build: |named, _| {
        let threshold = named.number("threshold", 0.0, 0.0..=1.0)? as f32;
        Ok(Part::Action(Some(Box::new(Merge { threshold }))))
    },
};

/// Evicted tokens of a block.
const EVICTED: usize = 256;
/// Kept keys of a tile.
const KEPT: usize = 256;
/// Norms below this count as this.
const LEAST_NORM: f32 = 1e-8;

struct Merge {
    threshold: f32,
}

/// An evicted token's token among the retained, its own slot, and the bits of their cosine.
type Match = [u32; 3];

/// Elements of a thread's scratch: a block of evicted tokens, a tile of kept keys, and their cosines.
fn slot(width: usize) -> usize {
    (EVICTED + KEPT) * width + EVICTED * KEPT
}

fn norm(isa: Isa, row: &[f32]) -> f32 {
    loops::dot(isa, row, row).sqrt()
}

/// Keys in some slots, of norm 1.
fn directions(isa: Isa, cache: &PagedCache, list: usize, slots: impl Iterator<Item = usize>, target: &mut [f32]) {
    let width = cache.shape().head_dim;
    for (slot, row) in slots.zip(target.chunks_exact_mut(width)) {
        cache.read_key(list, slot, row);
        let norm = norm(isa, row).max(LEAST_NORM);
        loops::scale(isa, row, 1.0 / norm);
    }
}

/// Finds the retained token for each evicted token of a block.
fn search(isa: Isa, cache: &PagedCache, list: usize, kept: &[u32], block: &mut [Match], slot: &mut [f32]) {
    let width = cache.shape().head_dim;
    let (evicted, rest) = slot.split_at_mut(EVICTED * width);
    let (keys, cosines) = rest.split_at_mut(KEPT * width);
    directions(isa, cache, list, block.iter().map(|found| found[1] as usize), evicted);
    let mut best = [f32::NEG_INFINITY; EVICTED];
    for (tile, kept) in kept.chunks(KEPT).enumerate() {
        directions(isa, cache, list, kept.iter().map(|&slot| slot as usize), keys);
        let (left, right) = (Matrix::new(evicted, block.len(), width), Matrix::new(keys, kept.len(), width));
        product(cosines, KEPT, left, right.transposed(), false, 1);
        for ((found, best), cosines) in block.iter_mut().zip(&mut best).zip(cosines.chunks_exact_mut(KEPT)) {
            let cosines = &mut cosines[..kept.len()];
            // Few tiles bring a better one, so the place is looked for only then.
            let highest = loops::scale_max(isa, cosines, 1.0);
            if highest > *best {
                *best = highest;
                let index = cosines.iter().position(|&cosine| cosine == highest).unwrap_or(0);
                (found[0], found[2]) = ((tile * KEPT + index) as u32, highest.to_bits());
            }
        }
    }
}

impl Merge {
    /// Merges the evicted tokens of one retained token into its value.
    fn write(
        &self,
        isa: Isa,
        cache: &mut PagedCache,
        [list, target]: [usize; 2],
        evicted: &[Match],
    ) -> Result<(), PolicyError> {
        let mut rows = [[0.0; Shape::MAX_HEAD_DIM]; 2];
        let [sum, value] = rows.each_mut().map(|row| &mut row[..cache.shape().head_dim]);
        cache.read_value(list, target, sum);
        let (own, mut total) = (norm(isa, sum), 1.0);
        for &[_, slot, cosine] in evicted {
            let cosine = f32::from_bits(cosine);
            if cosine < self.threshold {
                continue;
            }
            cache.read_value(list, slot as usize, value);
            let size = norm(isa, value);
            let weight = cosine * size / (size + own + LEAST_NORM);
            total += weight;
            sum.iter_mut().zip(&*value).for_each(|(sum, x)| *sum += weight * x);
        }
        if total > 1.0 {
            sum.iter_mut().for_each(|x| *x /= total);
            cache.write_value(list, target, sum)?;
        }
        Ok(())
    }
}

impl Action for Merge {
    fn scratch_bytes(&self, shape: &Shape, threads: usize) -> u64 {
        (size_of::<Match>() * shape.kv_len + 4 * threads * slot(shape.head_dim)) as u64
    }

    fn fold(&self, fold: &Fold<'_>, cache: &mut PagedCache, list: usize, kept: &[u32]) -> Result<(), PolicyError> {
        let (len, threads, isa) = (cache.lens()[list], fold.cpu.threads(), fold.cpu.isa());
        let mut matches: Buffer<Match> = fold.arena.alloc(Label::Workspace, len)?;
        let mut scratch: Buffer<f32> = fold.arena.alloc(Label::Workspace, threads * slot(cache.shape().head_dim))?;
        let mut stays = kept.iter().copied().peekable();
        let evicted = (0..len as u32).filter(|slot| stays.next_if_eq(slot).is_none());
        let matches = &mut matches[..len - kept.len()];
        matches.iter_mut().zip(evicted).for_each(|(found, slot)| found[1] = slot);
        let (slots, whole) = (Slots::new(&mut scratch, threads), &*cache);
        fold.cpu.install(|| {
            let blocks = matches.par_chunks_mut(EVICTED).with_max_len(1);
            blocks.for_each(|block| slots.with(|slot| search(isa, whole, list, kept, block, slot)));
        });
        matches.sort_unstable();
        let groups = matches.chunk_by(|a, b| a[0] == b[0]);
        groups
            .map(|evicted| (kept[evicted[0][0] as usize] as usize, evicted))
            .try_for_each(|(target, evicted)| self.write(isa, cache, [list, target], evicted))
    }
}
