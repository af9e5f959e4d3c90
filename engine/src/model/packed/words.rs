//! GPTQ and AWQ: unsigned codes, several to a word of 32 bits, with an f16 scale and a zero point for each group of inputs.
//!
//! Both hold matrices with an input in each row: `scales [groups, outputs]`, `qzeros [groups, outputs / 8]` (of 8 bits, 4). In
//! `qweight` a word of GPTQ has neighbouring inputs of one output, `[inputs / 8, outputs]`, the first in the lowest bits; one of AWQ
//! neighbouring outputs of one input, `[inputs, outputs / 8]`, in the order 0, 2, 4, 6, 1, 3, 5, 7, and its zero points too. What an
//! element stands for is `scale * (code - zero)`. GPTQ's first format stores zero points less one, within their bits, so that 15
//! stored is 0 as AutoGPTQ reads it; `gptq_v2` stores them as they are. With `desc_act` the inputs of a group are anywhere
//! (`g_idx`): columns are sorted by group here, those of a group in their order.

use super::{Module, Repacked};
use crate::format::{RowFormat, Uint, most_within};
use half::f16;

/// Which code of a word is that of each output, in AWQ.
pub(super) const AWQ_PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Inputs of a group and of a block within it.
fn group_and_block(module: &Module<'_>, width: usize, group: Option<usize>) -> Result<[usize; 2], String> {
    let (name, group) = (module.name, group.unwrap_or(width));
    if !width.is_multiple_of(group) {
        return Err(format!("'{name}' has {width} inputs; groups of {group} must divide them"));
    }
    let block = most_within(group);
    let block = block.ok_or_else(|| format!("'{name}' has groups of {group} inputs; they must be a multiple of 32"))?;
    Ok([group, block])
}

/// Refuses scales that an f16 does not hold.
fn check_scales(module: &Module<'_>, scales: super::Numbers<'_>) -> Result<(), String> {
    let wider = (0..scales.len()).map(|at| scales.at(at)).find(|&x| f16::from_f32(x).to_f32() != x);
    wider.map_or(Ok(()), |x| Err(format!("'{}.scales' holds {x}, which is no f16; its scales must be", module.name)))
}

/// A layer of GPTQ.
///
/// # Errors
/// As [`Module::repack`].
pub fn gptq<'a, const BITS: usize>(
    module: &mut Module<'a>,
    [rows, width]: [usize; 2],
    group: Option<usize>,
    less_one: bool,
    ordered: bool,
) -> Result<Repacked<'a>, String>
where
    RowFormat: From<Uint<BITS>>,
{
    let (in_word, mask) = (32 / BITS, (1u32 << BITS) - 1);
    let [group, block] = group_and_block(module, width, group)?;
    check_rows(module, rows, in_word)?;
    let groups = width / group;
    let codes = module.words(".qweight", &[width / in_word, rows])?;
    let zeros = module.words(".qzeros", &[groups, rows / in_word])?;
    let scales = module.numbers(".scales", &[&[groups, rows]])?;
    check_scales(module, scales)?;
    let order = order(module, width, group, ordered)?;
    let inputs = order.clone();
    let put = move |row: usize, to: &mut [u8]| {
        let word_bytes = Uint::<BITS>::block_bytes(block);
        for (index, to) in to.chunks_exact_mut(word_bytes).enumerate() {
            let of = index * block / group;
            let stored = zeros.at(of * (rows / in_word) + row / in_word) >> (BITS * (row % in_word));
            let zero = stored.wrapping_add(u32::from(less_one)) & mask;
            let code = |element: usize| {
                let column = index * block + element;
                let input = inputs.as_ref().map_or(column, |order| order[column] as usize);
                (codes.at(input / in_word * rows + row) >> (BITS * (input % in_word)) & mask) as u8
            };
            Uint::<BITS>::put(f16::from_f32(scales.at(of * rows + row)), zero as u8, code, to);
        }
    };
    Ok(Repacked { format: Uint::<BITS>::new(block).into(), order, input_scale: None, put: Box::new(put) })
}

fn check_rows(module: &Module<'_>, rows: usize, in_word: usize) -> Result<(), String> {
    match rows.is_multiple_of(in_word) {
        true => Ok(()),
        false => Err(format!("'{}' has {rows} outputs; packed zero points need a multiple of {in_word}", module.name)),
    }
}

/// The input of each column where columns are sorted by `g_idx`; `None` where they are sorted as they are.
fn order(module: &mut Module<'_>, width: usize, group: usize, ordered: bool) -> Result<Option<Vec<u32>>, String> {
    let name = module.name;
    if !module.has(".g_idx") {
        return match ordered {
            true => Err(format!("there is no tensor '{name}.g_idx', which desc_act needs")),
            false => Ok(None),
        };
    }
    let indices = module.words(".g_idx", &[width])?;
    let mut columns = vec![Vec::with_capacity(group); width / group];
    for input in 0..width {
        let index = indices.at(input);
        let of = usize::try_from(index).ok().and_then(|index| columns.get_mut(index)).ok_or_else(|| {
            let last = width / group - 1;
            format!("tensor '{name}.g_idx' is {} at {input}; it must be 0 to {last}", index.cast_signed())
        })?;
        of.push(input as u32);
    }
    if let Some(of) = columns.iter().position(|columns| columns.len() != group) {
        let count = columns[of].len();
        return Err(format!("tensor '{name}.g_idx' gives group {of} {count} inputs; it must be {group}"));
    }
    let order: Vec<u32> = columns.into_iter().flatten().collect();
    if order.iter().enumerate().all(|(column, &input)| column == input as usize) {
        return Ok(None);
    }
    match ordered {
        true => Ok(Some(order)),
        false => Err(format!("tensor '{name}.g_idx' mixes groups, but desc_act is false; it must be true")),
    }
}

/// A layer of AWQ.
///
/// # Errors
/// As [`Module::repack`].
pub fn awq<'a>(
    module: &mut Module<'a>,
    [rows, width]: [usize; 2],
    group: Option<usize>,
) -> Result<Repacked<'a>, String> {
    let [group, block] = group_and_block(module, width, group)?;
    check_rows(module, rows, 8)?;
    let (groups, words) = (width / group, rows / 8);
    let codes = module.words(".qweight", &[width, words])?;
    let zeros = module.words(".qzeros", &[groups, words])?;
    let scales = module.numbers(".scales", &[&[groups, rows]])?;
    check_scales(module, scales)?;
    let put = move |row: usize, to: &mut [u8]| {
        let (word, shift) = (row / 8, 4 * AWQ_PLACES[row % 8]);
        for (index, to) in to.chunks_exact_mut(Uint::<4>::block_bytes(block)).enumerate() {
            let of = index * block / group;
            let zero = zeros.at(of * words + word) >> shift & 15;
            let code = |element: usize| (codes.at((index * block + element) * words + word) >> shift & 15) as u8;
            Uint::<4>::put(f16::from_f32(scales.at(of * rows + row)), zero as u8, code, to);
        }
    };
    Ok(Repacked { format: Uint::<4>::new(block).into(), order: None, input_scale: None, put: Box::new(put) })
}
