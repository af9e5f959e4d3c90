//! Tokens in full, and keys that share scales, against a list of tokens that come one by one and are coded by the definition.

use super::*;
use crate::attention::KvRows;
use crate::format::{Full, RowFormat};
use crate::memory::{Arena, Label};
use crate::tensor::{DType, RowCode, Tensor};
use half::{bf16, f16};
use proptest::prelude::*;
use std::collections::BTreeSet;

const WIDTH: usize = 32;
const HEADS: usize = 2;
const SEQUENCES: usize = 2;
const TOKENS: usize = 1500;
const COLUMNS: &[Column] = &[Column::Attention, Column::Weight];

const FORMATS: [&str; 7] = [
    "int8:recent=20",
    "q4_0:recent=7,first=4",
    "k=f32,v=int8:first=20",
    "kivi:bits=4,group=32,recent=20",
    "kivi:bits=2,group=64,recent=1,first=5",
    "k=int8-channel,v=f16",
    "k=int4-channel:group=64,v=int8:first=3",
];

/// Where a token is kept; a coded one with the number of its group.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
enum Kept {
    First,
    Coded(usize),
    Recent,
}

#[derive(Debug, Clone)]
struct Token {
    rows: [Vec<f32>; 2],
    position: usize,
    attention: f32,
    kept: Kept,
}

/// A list by its definition.
#[derive(Debug, Clone, Default)]
struct Slow {
    tokens: Vec<Token>,
    groups: usize,
}

fn rounded(format: RowFormat, row: &[f32]) -> Vec<f32> {
    let mut bytes = vec![0u32; WIDTH];
    let bytes = &mut bytemuck::cast_slice_mut::<u32, u8>(&mut bytes)[..format.row_bytes(WIDTH)];
    format.encode(row, WIDTH, bytes);
    let mut back = vec![0.0; WIDTH];
    format.decode(bytes, 0, &mut back);
    back
}

/// Keys of a group in codes from 0 to `steps`, channel by channel, and back.
fn by_channel(keys: &mut [&mut Vec<f32>], steps: f32) {
    for channel in 0..WIDTH {
        let least = keys.iter().map(|key| key[channel]).fold(f32::INFINITY, f32::min);
        let most = keys.iter().map(|key| key[channel]).fold(f32::NEG_INFINITY, f32::max);
        let least = f16::from_f32(least).to_f32();
        let scale = f16::from_f32((most - least) / steps).to_f32();
        for key in keys.iter_mut() {
            let code = ((key[channel] - least) / scale).round_ties_even().clamp(0.0, steps);
            key[channel] = scale * if code.is_nan() { 0.0 } else { code } + least;
        }
    }
}

impl Slow {
    fn count(&self, kept: impl Fn(Kept) -> bool) -> usize {
        self.tokens.iter().filter(|token| kept(token.kept)).count()
    }

    fn push(&mut self, format: KvFormat, rows: [Vec<f32>; 2], position: usize) {
        let Full { first, recent, dtype } = format.full;
        let rows = rows.map(|row| rounded(RowFormat::plain(dtype), &row));
        let others = self.count(|kept| kept != Kept::First);
        let is_first = others == 0 && position < first && self.tokens.len() < first;
        let kept = if is_first { Kept::First } else { Kept::Recent };
        self.tokens.push(Token { rows, position, attention: 0.0, kept });
        let group = format.group_tokens();
        if self.count(|kept| kept == Kept::Recent) == recent + group {
            self.groups += 1;
            let number = self.groups;
            let mut leaving: Vec<&mut Token> =
                self.tokens.iter_mut().filter(|token| token.kept == Kept::Recent).take(group).collect();
            let steps = match format.k.to_string() {
                text if text.starts_with("int2") => 3.0,
                text if text.starts_with("int4") => 15.0,
                _ => 255.0,
            };
            match format.k.group_tokens() {
                Some(_) => {
                    let mut keys: Vec<_> = leaving.iter_mut().map(|token| &mut token.rows[0]).collect();
                    by_channel(&mut keys, steps);
                }
                None => leaving.iter_mut().for_each(|token| token.rows[0] = rounded(format.k, &token.rows[0])),
            }
            for token in leaving {
                token.rows[1] = rounded(format.v, &token.rows[1]);
                token.kept = Kept::Coded(number);
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Append { sequence: usize, count: usize },
    Evict { list: usize, seed: usize },
    EvictRange { list: usize, from: usize, count: usize },
    Attend(usize),
    Fork(usize),
    Free(usize),
    Release,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (sequence, list) = (0..SEQUENCES, 0..SEQUENCES * HEADS);
    let step = prop_oneof![
        4 => (sequence.clone(), prop_oneof![1usize..4, 1usize..200]).prop_map(|(sequence, count)| Step::Append { sequence, count }),
        2 => (list.clone(), 0usize..1 << 20).prop_map(|(list, seed)| Step::Evict { list, seed }),
        2 => (list.clone(), 0usize..1 << 20, 1usize..60).prop_map(|(list, from, count)| Step::EvictRange { list, from, count }),
        1 => list.prop_map(Step::Attend),
        1 => sequence.clone().prop_map(Step::Fork),
        1 => sequence.prop_map(Step::Free),
        1 => Just(Step::Release),
    ];
    prop::collection::vec(step, 1..30)
}

fn element(part: usize, head: usize, position: usize, channel: usize) -> f32 {
    let noise = (position * 7919 + channel * 104_729 + part * 31 + head * 17) % 1009;
    let outlier = if part == 0 && channel % 11 == 3 { 30.0 } else { 0.0 };
    bf16::from_f32(noise as f32 / 101.0 - 5.0 + outlier).to_f32()
}

struct Pair {
    arena: Arena,
    sources: [Tensor; 2],
    cache: PagedCache,
    slow: Vec<Slow>,
    next: [usize; SEQUENCES],
    shares: bool,
}

impl Pair {
    fn new(format: &str, dtype: DType, page_tokens: usize) -> Self {
        let arena = Arena::unlimited();
        let format = format.parse::<KvFormat>().unwrap().in_pass(dtype);
        let (batch, kv_heads, head_dim) = (SEQUENCES, HEADS, WIDTH);
        let shape = CacheShape { batch, kv_heads, head_dim, format, max_tokens: TOKENS, page_tokens, columns: COLUMNS };
        let sources = [0, 1].map(|part| {
            let heads = (0..HEADS).flat_map(|head| (0..TOKENS).map(move |position| (head, position)));
            let values: Vec<f32> = heads
                .flat_map(|(head, position)| (0..WIDTH).map(move |channel| element(part, head, position, channel)))
                .collect();
            Tensor::from_f32(&arena, Label::Input, DType::F32, [1, HEADS, TOKENS, WIDTH], &values).unwrap()
        });
        let cache = PagedCache::new(&arena, shape).unwrap();
        let slow = vec![Slow::default(); shape.lists()];
        Pair { arena, sources, cache, slow, next: [0; SEQUENCES], shares: false }
    }

    fn take(&mut self, step: Step) {
        let Pair { sources: [k, v], cache, slow, next, shares, .. } = self;
        let format = cache.shape().format;
        match step {
            Step::Append { sequence, count } => {
                let range = next[sequence]..(next[sequence] + count).min(TOKENS);
                cache.append_sequence(sequence, k.view(), v.view(), 0, range.clone()).unwrap();
                for head in 0..HEADS {
                    for position in range.clone() {
                        let rows = [0, 1]
                            .map(|part| (0..WIDTH).map(|channel| element(part, head, position, channel)).collect());
                        slow[sequence * HEADS + head].push(format, rows, position);
                    }
                }
                next[sequence] = range.end;
            }
            Step::Evict { list, seed } => {
                let keep = |slot: &usize| (slot * 0x9E37_79B9 + seed) % 7 < seed % 8;
                let kept: Vec<usize> = (0..slow[list].tokens.len()).filter(keep).collect();
                cache.retain(list, kept.iter().copied()).unwrap();
                slow[list].tokens = kept.into_iter().map(|slot| slow[list].tokens[slot].clone()).collect();
            }
            Step::EvictRange { list, from, count } => {
                let len = slow[list].tokens.len();
                let from = from % len.max(1);
                let end = (from + count).min(len);
                cache.retain_ranges(list, [0..from, end..len]).unwrap();
                slow[list].tokens.drain(from..end);
            }
            Step::Attend(list) => {
                let received: Vec<f32> = (0..slow[list].tokens.len() + 3).map(|slot| slot as f32).collect();
                cache.add_attention(list, &received).unwrap();
                slow[list].tokens.iter_mut().zip(received).for_each(|(token, more)| token.attention += more);
            }
            Step::Fork(from) => {
                let to = (from + 1) % SEQUENCES;
                cache.free(to);
                cache.fork(from, to);
                (0..HEADS).for_each(|head| slow[to * HEADS + head] = slow[from * HEADS + head].clone());
                next[to] = next[from];
                *shares = true;
            }
            Step::Free(sequence) => {
                cache.free(sequence);
                (0..HEADS).for_each(|head| slow[sequence * HEADS + head] = Slow::default());
                (next[sequence], *shares) = (0, false);
            }
            Step::Release => cache.release(),
        }
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let Pair { cache, slow, .. } = self;
        for (list, slow) in slow.iter().enumerate() {
            let count = slow.tokens.len();
            prop_assert_eq!(cache.lens()[list], count);
            let (mut scratch, mut row) = (vec![0.0; count * WIDTH], vec![0.0; WIDTH]);
            for part in (0..2).filter(|_| count > 0) {
                let read = if part == 0 { PagedCache::keys } else { PagedCache::values };
                let rows = read(cache, list / HEADS, list % HEADS, 0, count, &mut scratch);
                for (slot, (row, token)) in rows.chunks_exact(WIDTH).zip(&slow.tokens).enumerate() {
                    prop_assert_eq!(row, &token.rows[part][..], "part {} of slot {} of list {}", part, slot, list);
                }
            }
            for (slot, token) in slow.tokens.iter().enumerate() {
                cache.read_key(list, slot, &mut row);
                prop_assert_eq!(&row, &token.rows[0]);
                let read = (cache.position(list, slot), cache.attention(list, slot));
                prop_assert_eq!(read, (token.position, token.attention), "slot {} of list {}", slot, list);
            }
        }
        if !self.shares {
            self.check_bytes()?;
        }
        Ok(())
    }

    /// Without forks every token and every group is there once.
    fn check_bytes(&self) -> Result<(), TestCaseError> {
        let CacheShape { format, .. } = *self.cache.shape();
        let row_bytes = |format: KvFormat| (format.k.row_bytes(WIDTH) + format.v.row_bytes(WIDTH)) as u64;
        let (mut bytes, full) = (0, row_bytes(KvFormat::plain(format.full.dtype)));
        for (list, slow) in self.slow.iter().enumerate() {
            let groups: BTreeSet<usize> = slow
                .tokens
                .iter()
                .filter_map(|token| if let Kept::Coded(group) = token.kept { Some(group) } else { None })
                .collect();
            let coded = slow.count(|kept| matches!(kept, Kept::Coded(_)));
            let shared = if format.k.group_tokens().is_some() { 4 * WIDTH * groups.len() } else { 0 };
            let of_list = coded as u64 * row_bytes(format) + (slow.tokens.len() - coded) as u64 * full + shared as u64;
            prop_assert_eq!(self.cache.held_bytes(list), of_list);
            bytes += of_list;
        }
        let live = |label| self.arena.live_bytes(label);
        prop_assert_eq!(live(Label::Kv), bytes);
        prop_assert_eq!(live(Label::Kv) + live(Label::KvFragmentation), self.cache.kv_bytes());
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_cache_keeps_what_the_definition_says(
        steps in steps(),
        format in prop::sample::select(FORMATS.to_vec()),
        dtype in prop::sample::select(DType::ALL.to_vec()),
        page_tokens in prop::sample::select(vec![1usize, 3, 16, 64]),
    ) {
        let mut pair = Pair::new(format, dtype, page_tokens);
        for step in steps {
            pair.take(step);
            pair.check()?;
        }
        (0..SEQUENCES).for_each(|sequence| pair.take(Step::Free(sequence)));
        pair.take(Step::Release);
        prop_assert_eq!(pair.arena.live_bytes(Label::Kv) + pair.arena.live_bytes(Label::KvSlack), 0);
        let Pair { arena, cache, .. } = pair;
        drop(cache);
        prop_assert_eq!(arena.usage().live.keys().copied().collect::<Vec<_>>(), [Label::Input]);
    }

    /// Bytes are those of the formula, however many tokens come at once.
    #[test]
    fn the_formula_is_what_the_arena_shows(
        chunks in prop::collection::vec(1usize..150, 1..8),
        format in prop::sample::select(FORMATS.to_vec()),
        page_tokens in prop::sample::select(vec![1usize, 5, 16, 64]),
    ) {
        let mut pair = Pair::new(format, DType::Bf16, page_tokens);
        for count in chunks {
            (0..SEQUENCES).for_each(|sequence| pair.take(Step::Append { sequence, count }));
            let (lens, shape) = (pair.cache.lens().to_vec(), *pair.cache.shape());
            let mut predicted = shape.bytes(lens.iter().copied(), 0);
            predicted.retain(|_, bytes| *bytes > 0);
            let mut live = pair.arena.usage().live;
            live.remove(&Label::Input);
            prop_assert_eq!(live, predicted);
            prop_assert_eq!(pair.cache.kv_bytes(), shape.kv_bytes(lens.iter().copied()));
            let held: u64 = (0..shape.lists()).map(|list| pair.cache.held_bytes(list)).sum();
            prop_assert_eq!(held, lens.iter().map(|&len| shape.format.list_bytes(WIDTH, len)).sum::<u64>());
        }
    }
}

#[test]
fn a_written_key_stays_within_what_its_group_spans() {
    let mut pair = Pair::new("k=int4-channel,v=f32", DType::F32, 16);
    pair.take(Step::Append { sequence: 0, count: 64 });
    let (mut before, mut row) = (vec![0.0; WIDTH], vec![0.0; WIDTH]);
    pair.cache.read_key(0, 33, &mut before);
    pair.cache.write_key(0, 33, &[1e6; WIDTH]).unwrap();
    pair.cache.read_key(0, 33, &mut row);
    assert!(row.iter().all(|x| *x < 40.0) && row.iter().zip(&before).all(|(x, before)| x >= before), "{row:?}");
    pair.cache.write_key(0, 33, &before).unwrap();
    pair.cache.read_key(0, 33, &mut row);
    assert_eq!(row, before, "what is read of a key can be written");
}
