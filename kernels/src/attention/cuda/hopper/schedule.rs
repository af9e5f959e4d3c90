//! How evenly `kernels/hopper.cu` loads a GPU's multiprocessors: its list of items, and who takes which, in a model.
//!
//! An item is a tile of query rows of one head. Under a causal mask the last rows of a head see many times the keys of
//! the first, so it matters who computes which. The list begins with the heaviest; each block begins with the item of its
//! own number, and claims the next one of the list when it sends for the last tile of keys of the one at hand.
//!
//! The list is the same arithmetic as `item_at` of the kernel, in both of which `tests/kernels/emulate/hopper_items.inc`
//! finds the same sums. Times are in tiles of keys. An item costs two more than it has: nothing of a consumer's own runs
//! beside the first tile's scores and softmax, nor beside the last tile's second product and the output's way to memory.

use super::Tiles;
use crate::attention::{Params, Shape};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Multiprocessors of an H100 (SXM) and of an H200.
const BLOCKS: usize = 132;
/// What an item costs beyond its tiles, in tiles.
const BEYOND_TILES: usize = 2;
/// How long before its end a block claims the next item, in tiles: what lies in the rings, and the rest of the item.
const AHEAD_TILES: usize = super::MOST_STAGES + BEYOND_TILES;
/// Of the L2, what heads that run at the same time fill with keys and values, where items differ.
const SECTION_BYTES: usize = 32 << 20;
/// Time of a tile on a multiprocessor of usual speed.
const TILE_TIME: usize = 100;

/// `Item` of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Item {
    row0: usize,
    q_head: usize,
    first_tile: usize,
    end_tile: usize,
}

impl Item {
    fn cost(&self) -> usize {
        self.end_tile.saturating_sub(self.first_tile) + BEYOND_TILES
    }
}

/// All items of a problem in the order of their numbers.
fn items(shape: &Shape, params: &Params) -> Vec<Item> {
    let Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim } = *shape;
    let tiles = Tiles::of(shape, params).unwrap();
    let (group, lists, row_tiles) = (q_heads / kv_heads, batch * kv_heads, q_len.div_ceil(tiles.rows()));
    let differ = params.causal || params.window.is_some();
    let section_lists = if differ { (SECTION_BYTES / (4 * head_dim) / kv_len).max(1).min(lists) } else { 1 };
    let section_items = section_lists * group * row_tiles;
    let item = |number: usize| {
        let (section, rest) = (number / section_items, number % section_items);
        let heads = section_lists.min(lists - section * section_lists) * group;
        let row0 = (row_tiles - 1 - rest / heads) * tiles.rows();
        let last_row = (row0 + tiles.rows()).min(q_len) - 1;
        Item {
            row0,
            q_head: section * section_lists * group + rest % heads,
            first_tile: params.visible(row0, q_len, kv_len).start / tiles.keys,
            end_tile: params.visible(last_row, q_len, kv_len).end.div_ceil(tiles.keys),
        }
    };
    (0..lists * group * row_tiles).map(item).collect()
}

/// The work of all items over what the blocks could do until the last of them is done; `times` are those of a tile.
fn evenness(items: &[Item], times: &[usize], loads: &[usize]) -> f64 {
    let work: usize = items.iter().map(Item::cost).sum();
    let tiles_per_time: f64 = times.iter().map(|&time| 1.0 / time as f64).sum();
    work as f64 / tiles_per_time / *loads.iter().max().unwrap() as f64
}

/// As the kernel deals them out.
fn claimed(items: &[Item], times: &[usize]) -> f64 {
    let mut loads = vec![0; times.len()];
    let mut claims = BinaryHeap::new(); // when each block takes its next item
    for (number, item) in items.iter().enumerate() {
        let block = if number < times.len() { number } else { claims.pop().map(|Reverse((_, block))| block).unwrap() };
        let began = loads[block];
        loads[block] += item.cost() * times[block];
        claims.push(Reverse((began.max(loads[block].saturating_sub(AHEAD_TILES * times[block])), block)));
    }
    evenness(items, times, &loads)
}

/// As the first version did: block after block, there and back.
fn there_and_back(items: &[Item], times: &[usize]) -> f64 {
    let mut loads = vec![0; times.len()];
    for (round, dealt) in items.chunks(times.len()).enumerate() {
        for (at, item) in dealt.iter().enumerate() {
            let block = if round % 2 == 1 { times.len() - 1 - at } else { at };
            loads[block] += item.cost() * times[block];
        }
    }
    evenness(items, times, &loads)
}

/// 16384 tokens of queries in sequences of `len`.
fn shape(len: usize, q_heads: usize, kv_heads: usize, head_dim: usize) -> Shape {
    Shape { batch: 16_384 / len, q_heads, kv_heads, q_len: len, kv_len: len, head_dim }
}

const LENGTHS: [usize; 4] = [2048, 4096, 8192, 16_384];
const USUAL: [usize; BLOCKS] = [TILE_TIME; BLOCKS];

#[test]
fn every_row_of_every_head_is_in_one_item_and_the_heaviest_come_first() {
    let odd = Shape { batch: 3, q_heads: 6, kv_heads: 2, q_len: 1000, kv_len: 50_001, head_dim: 256 };
    for (shape, params) in [
        (shape(4096, 16, 16, 128), Params::new(128, true)),
        (shape(2048, 32, 8, 64), Params::new(64, true)),
        (odd, Params::new(256, true)),
        (Shape { kv_len: 700, ..odd }, Params { window: Some(100), ..Params::new(256, false) }),
    ] {
        let items = items(&shape, &params);
        let mut places: Vec<_> = items.iter().map(|item| (item.q_head, item.row0)).collect();
        places.sort_unstable();
        let rows = if shape.head_dim == 64 { 192 } else { 128 };
        let all = |head| (0..shape.q_len.div_ceil(rows)).map(move |tile| (head, tile * rows));
        assert_eq!(places, (0..shape.batch * shape.q_heads).flat_map(all).collect::<Vec<_>>(), "{shape:?}");
        // Of a head the later rows, which see no fewer keys, come first.
        let mut next = vec![usize::MAX; shape.batch * shape.q_heads];
        for item in &items {
            assert!(item.row0 < next[item.q_head], "{shape:?} {item:?}");
            next[item.q_head] = item.row0;
        }
    }
}

/// What made the counter worth its atomics.
#[test]
fn a_fixed_order_left_multiprocessors_idle() {
    let evenness = |shape: Shape| there_and_back(&items(&shape, &Params::new(shape.head_dim, true)), &USUAL);
    for (len, expected) in LENGTHS.into_iter().zip([0.82, 0.80, 0.79, 0.78]) {
        let found = evenness(shape(len, 16, 16, 128));
        assert!((found - expected).abs() < 0.005, "{len}: {found}");
    }
    let found = evenness(shape(16_384, 8, 8, 256));
    assert!((found - 0.60).abs() < 0.01, "D 256: {found}");
}

#[test]
fn claimed_items_load_multiprocessors_evenly() {
    for len in LENGTHS {
        for shape in [shape(len, 16, 16, 128), shape(len, 32, 8, 128), shape(len, 8, 8, 256), shape(len, 32, 8, 64)] {
            let causal = Params::new(shape.head_dim, true);
            let window = |tokens| Params { window: Some(tokens), ..causal };
            let behind = Shape { kv_len: 32_768, ..shape }; // a part of a prompt, behind what came before
            let capped = Params { softcap: Some(30.0), ..causal };
            let cases =
                [(shape, causal), (shape, capped), (shape, window(1024)), (shape, window(4096)), (behind, causal)];
            for (at, (shape, params)) in cases.into_iter().enumerate() {
                let items = items(&shape, &params);
                let (now, before) = (claimed(&items, &USUAL), there_and_back(&items, &USUAL));
                // At D 256 a block has but 7.8 items. Where these are all nearly alike, eight rounds are what there is.
                let least = if shape.head_dim == 256 && at >= 2 { 0.94 } else { 0.97 };
                assert!(now >= least, "{shape:?} {params:?}: {now}");
                assert!(now >= before - 0.01, "{shape:?} {params:?}: {now}, {before} before");
            }
        }
    }
}

/// Items of a full problem are alike: as many rounds as there must be, and no more than before.
#[test]
fn full_attention_loses_nothing() {
    for shape in [shape(2048, 16, 16, 128), shape(16_384, 32, 8, 128), shape(16_384, 8, 8, 256), shape(4096, 32, 8, 64)]
    {
        let items = items(&shape, &Params::new(shape.head_dim, false));
        let whole_rounds = items.len() as f64 / items.len().next_multiple_of(BLOCKS) as f64;
        for found in [claimed(&items, &USUAL), there_and_back(&items, &USUAL)] {
            assert!((found - whole_rounds).abs() < 1e-9, "{shape:?}: {found}, {whole_rounds}");
        }
    }
}

/// Where some multiprocessors are slower than others, a fixed order waits for them.
#[test]
fn uneven_multiprocessors_are_loaded_evenly() {
    let mut times = USUAL;
    times.iter_mut().step_by(11).for_each(|time| *time += TILE_TIME / 10);
    for len in LENGTHS {
        let shape = shape(len, 16, 16, 128);
        let full = items(&shape, &Params::new(128, false));
        let causal = items(&shape, &Params::new(128, true));
        assert!(there_and_back(&full, &times) < 0.9, "{len}");
        assert!(claimed(&causal, &times) > 0.97, "{len}: {}", claimed(&causal, &times));
    }
}

/// The model's list is the kernel's: the emulated kernel is compared with the same sums.
#[test]
fn the_kernel_has_the_same_list() {
    let table = include_str!("../../../../../tests/kernels/emulate/hopper_items.inc");
    let rows: Vec<_> = table.lines().filter_map(|line| line.strip_prefix("ITEMS(")?.strip_suffix(')')).collect();
    assert!(rows.len() >= 10);
    for row in rows {
        let numbers: Vec<usize> = row.split(", ").map(|number| number.parse().unwrap()).collect();
        let [head_dim, keys, batch, q_heads, kv_heads, q_len, kv_len, causal, window, expected] = numbers[..] else {
            panic!("{row}");
        };
        let shape = Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim };
        let params = Params { window: (window > 0).then_some(window), ..Params::new(head_dim, causal == 1) };
        assert_eq!(Tiles::of(&shape, &params).unwrap().keys, keys, "{row}");
        let sum = items(&shape, &params).iter().fold(0, |sum: u32, item| {
            [item.row0, item.q_head, item.first_tile, item.end_tile]
                .iter()
                .fold(sum, |sum, &number| (sum ^ number as u32).wrapping_mul(16_777_619).rotate_left(7))
        });
        assert_eq!(sum as usize, expected, "{row}");
    }
}
