//! The cache against a plain list of tokens, under random operations; what the arena shows; and kernels over pages.

use super::*;
use crate::attention::rope::{Frequencies, Rotation};
use crate::attention::{DenseKv, Forward, KvRows, Outputs, Params, Shape, kernel};
use crate::device::Cpu;
use crate::format::RowFormat;
use crate::memory::{Arena, Label};
use crate::tensor::{RowCode, Tensor};
use proptest::prelude::*;
use std::collections::BTreeMap;

const WIDTH: usize = 4;
const HEADS: usize = 2;
const SEQUENCES: usize = 3;
const TOKENS: usize = 4000;
const BOTH: &[Column] = &[Column::Attention, Column::Weight];

fn shape(page_tokens: usize, format: impl Into<KvFormat>, columns: &'static [Column]) -> CacheShape {
    CacheShape {
        batch: SEQUENCES,
        kv_heads: HEADS,
        head_dim: WIDTH,
        format: format.into(),
        max_tokens: 2 * TOKENS,
        page_tokens,
        columns,
    }
}

/// What a row becomes in the cache.
fn rounded(format: RowFormat, row: [f32; WIDTH]) -> [f32; WIDTH] {
    let (mut bytes, mut back) = ([0; 4 * WIDTH], row);
    let bytes = bytemuck::cast_slice_mut::<u32, u8>(&mut bytes);
    let bytes = &mut bytes[..format.row_bytes(WIDTH)];
    format.encode(&row, WIDTH, bytes);
    format.decode(bytes, 0, &mut back);
    back
}

/// Key or value of a token, different for every list, position and part.
fn row(list: usize, position: usize, part: usize) -> [f32; WIDTH] {
    [0, 1, 2, 3].map(|d| ((list * 2 + part) * TOKENS + position) as f32 + d as f32 / 4.0)
}

fn tensor(arena: &Arena, dtype: DType, part: usize) -> Tensor {
    let lists = SEQUENCES * HEADS;
    let values: Vec<f32> = (0..lists).flat_map(|list| (0..TOKENS).flat_map(move |at| row(list, at, part))).collect();
    Tensor::from_f32(arena, Label::Input, dtype, [SEQUENCES, HEADS, TOKENS, WIDTH], &values).unwrap()
}

#[derive(Clone, PartialEq, Debug)]
struct Token {
    key: [f32; WIDTH],
    value: [f32; WIDTH],
    position: usize,
    attention: f32,
    weight: f32,
}

#[derive(Clone, Debug)]
enum Step {
    Append(usize),
    AppendTo { sequence: usize, source: usize, count: usize },
    Evict { list: usize, seed: usize },
    EvictRange { list: usize, from: usize, count: usize },
    Merge { list: usize, evicted: usize, survivor: usize },
    Attend { list: usize },
    Fork { from: usize, to: usize },
    Free(usize),
    Rerotate(usize),
    Release,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (sequence, list, any) = (0..SEQUENCES, 0..SEQUENCES * HEADS, 0usize..1 << 20);
    let step = prop_oneof![
        2 => (1usize..300).prop_map(Step::Append),
        2 => (sequence.clone(), sequence.clone(), 1usize..700)
            .prop_map(|(sequence, source, count)| Step::AppendTo { sequence, source, count }),
        2 => (list.clone(), any.clone()).prop_map(|(list, seed)| Step::Evict { list, seed }),
        2 => (list.clone(), any.clone(), 1usize..40)
            .prop_map(|(list, from, count)| Step::EvictRange { list, from, count }),
        2 => (list.clone(), any.clone(), any).prop_map(|(list, evicted, survivor)| Step::Merge { list, evicted, survivor }),
        1 => list.clone().prop_map(|list| Step::Attend { list }),
        2 => (sequence.clone(), sequence.clone()).prop_map(|(from, to)| Step::Fork { from, to }),
        1 => sequence.prop_map(Step::Free),
        1 => list.prop_map(Step::Rerotate),
        1 => Just(Step::Release),
    ];
    prop::collection::vec(step, 1..25)
}

/// The cache and the model beside it.
struct Pair {
    arena: Arena,
    k: Tensor,
    v: Tensor,
    cache: PagedCache,
    model: Vec<Vec<Token>>,
    next: usize,
}

impl Pair {
    fn new(shape: CacheShape) -> Self {
        let arena = Arena::unlimited();
        let (k, v) = (tensor(&arena, shape.dtype(), 0), tensor(&arena, shape.dtype(), 1));
        let cache = PagedCache::new(&arena, shape).unwrap();
        Pair { arena, k, v, cache, model: vec![Vec::new(); shape.lists()], next: 0 }
    }

    /// Takes a step, if it fits into the lists.
    fn take(&mut self, step: Step) {
        let Pair { k, v, cache, model, .. } = self;
        let (shape, KvFormat { k: of_keys, v: of_values, .. }) = (*cache.shape(), cache.shape().format);
        let lists = |sequence: usize| sequence * HEADS..(sequence + 1) * HEADS;
        let token = |list, position| Token {
            key: rounded(of_keys, row(list, position, 0)),
            value: rounded(of_values, row(list, position, 1)),
            position,
            attention: 0.0,
            weight: 1.0,
        };
        match step {
            Step::Append(count) if self.next + count <= TOKENS && cache.max_len() + count <= shape.max_tokens => {
                let range = self.next..self.next + count;
                cache.append(k.view(), v.view(), range.clone()).unwrap();
                let lists = model.iter_mut().enumerate();
                lists.for_each(|(list, tokens)| tokens.extend(range.clone().map(|position| token(list, position))));
                self.next += count;
            }
            Step::AppendTo { sequence, source, count }
                if self.next + count <= TOKENS && cache.max_len() + count <= shape.max_tokens =>
            {
                let range = self.next..self.next + count;
                cache.append_sequence(sequence, k.view(), v.view(), source, range.clone()).unwrap();
                for (list, from) in lists(sequence).zip(lists(source)) {
                    model[list].extend(range.clone().map(|position| token(from, position)));
                }
            }
            Step::Append(_) | Step::AppendTo { .. } => {}
            Step::Evict { list, seed } => {
                let keep = |slot: &usize| (slot * 0x9E37_79B9 + seed) % 7 < seed % 8;
                cache.retain(list, (0..model[list].len()).filter(keep)).unwrap();
                model[list] = (0..model[list].len()).filter(keep).map(|slot| model[list][slot].clone()).collect();
            }
            Step::EvictRange { list, from, count } => {
                let len = model[list].len();
                let from = from % len.max(1);
                let end = (from + count).min(len);
                cache.retain_ranges(list, [0..from, end..len]).unwrap();
                model[list].drain(from..end);
            }
            Step::Merge { list, evicted, survivor } if model[list].len() > 1 => {
                let len = model[list].len();
                let (evicted, survivor) = (evicted % len, survivor % len);
                let lost = model[list][evicted].clone();
                let merged = &mut model[list][survivor];
                for (mine, other) in merged.key.iter_mut().zip(lost.key).chain(merged.value.iter_mut().zip(lost.value))
                {
                    *mine = (*mine + other) / 2.0;
                }
                merged.weight += lost.weight;
                cache.write_key(list, survivor, &merged.key).unwrap();
                cache.write_value(list, survivor, &merged.value).unwrap();
                cache.set_column(list, survivor, Column::Weight, merged.weight).unwrap();
                (merged.key, merged.value) = (rounded(of_keys, merged.key), rounded(of_values, merged.value));
                if evicted != survivor {
                    cache.retain_ranges(list, [0..evicted, evicted + 1..len]).unwrap();
                    model[list].remove(evicted);
                }
            }
            Step::Merge { .. } => {}
            Step::Attend { list } => {
                let received: Vec<f32> = (0..model[list].len() + 5).map(|slot| slot as f32).collect();
                cache.add_attention(list, &received).unwrap();
                model[list].iter_mut().zip(received).for_each(|(token, received)| token.attention += received);
            }
            Step::Fork { from, to } if from != to => {
                cache.free(to);
                let before = cache.pages();
                cache.fork(from, to);
                assert_eq!(cache.pages(), before, "a fork takes no page");
                lists(from).zip(lists(to)).for_each(|(from, to)| model[to] = model[from].clone());
            }
            Step::Fork { .. } => {}
            Step::Free(sequence) => {
                cache.free(sequence);
                lists(sequence).for_each(|list| model[list].clear());
            }
            Step::Rerotate(list) => {
                let rope = Frequencies::new(WIDTH, 10_000.0);
                cache.rerotate(list, &rope).unwrap();
                for (slot, token) in model[list].iter_mut().enumerate().filter(|(slot, token)| *slot != token.position)
                {
                    Rotation::new(&rope, slot as i64 - token.position as i64).rotate(&mut token.key);
                    token.key = rounded(of_keys, token.key);
                    token.position = slot;
                }
            }
            Step::Release => cache.release(),
        }
    }

    fn check_contents(&self) -> Result<(), TestCaseError> {
        let Pair { cache, model, .. } = self;
        for (list, tokens) in model.iter().enumerate() {
            prop_assert_eq!(cache.lens()[list], tokens.len());
            let mut scratch = vec![0.0; tokens.len() * WIDTH];
            let (sequence, head) = (list / HEADS, list % HEADS);
            for (part, what) in ["keys", "values"].into_iter().enumerate().filter(|_| !tokens.is_empty()) {
                let read = if part == 0 { PagedCache::keys } else { PagedCache::values };
                let rows = read(cache, sequence, head, 0, tokens.len(), &mut scratch);
                let expected = tokens.iter().flat_map(|token| if part == 0 { token.key } else { token.value });
                prop_assert!(rows.iter().copied().eq(expected), "{what} of list {list}");
            }
            for (slot, token) in tokens.iter().enumerate() {
                let (mut key, mut value) = ([0.0; WIDTH], [0.0; WIDTH]);
                cache.read_key(list, slot, &mut key);
                cache.read_value(list, slot, &mut value);
                let (attention, weight) = (cache.attention(list, slot), cache.column(list, slot, Column::Weight));
                let read = Token { key, value, position: cache.position(list, slot), attention, weight };
                prop_assert_eq!(&read, token, "list {} slot {}", list, slot);
            }
            type Of = fn(&Token) -> f32;
            let [attention, weight]: [Of; 2] = [|token| token.attention, |token| token.weight];
            for (column, of) in [(Column::Attention, attention), (Column::Weight, weight)] {
                let mut read = vec![f32::NAN; tokens.len()];
                cache.read_column(list, column, &mut read);
                prop_assert!(
                    read.iter().copied().eq(tokens.iter().map(of)),
                    "{:?} of list {}: {:?}",
                    column,
                    list,
                    read
                );
            }
        }
        Ok(())
    }

    /// No page is lost, or in a list twice; those that hold a page agree how much is in it; the arena's labels follow.
    fn check_pages(&self) -> Result<(), TestCaseError> {
        let (cache, shape) = (&self.cache, self.cache.shape());
        // For each page: lists that hold it, and tokens in it.
        let mut pages: BTreeMap<u32, (u32, usize)> = BTreeMap::new();
        for (list, &len) in cache.lens().iter().enumerate() {
            let mut own = Vec::new();
            for index in 0..shape.pages(len) {
                let page = cache.coded.page(list, index);
                prop_assert!(!own.contains(&page), "page {page} is in list {list} twice");
                own.push(page);
                let tokens = (len - index * shape.page_tokens).min(shape.page_tokens);
                let entry = pages.entry(page).or_insert((0, tokens));
                prop_assert_eq!(entry.1, tokens, "tokens in page {}", page);
                entry.0 += 1;
            }
        }
        prop_assert_eq!(cache.pages(), pages.len());
        for (&page, &(refs, _)) in &pages {
            prop_assert_eq!(cache.coded.pool.refs(page), refs, "lists that hold page {}", page);
        }
        let live = |label| self.arena.live_bytes(label);
        let tokens: usize = pages.values().map(|(_, tokens)| tokens).sum();
        let (kv, used) = (tokens as u64 * shape.token_bytes(), pages.len() as u64 * shape.page_bytes());
        prop_assert_eq!((live(Label::Kv), live(Label::KvFragmentation)), (kv, used - kv));
        let slab_bytes = shape.slab_pages() as u64 * shape.page_bytes();
        let slabs = (used + live(Label::KvSlack)) / slab_bytes;
        prop_assert_eq!(used + live(Label::KvSlack), slabs * slab_bytes, "whole slabs");
        let held = slabs * shape.slab_pages() as u64;
        prop_assert_eq!(live(Label::PageTable), 4 * (held + (shape.lists() * shape.pages(shape.max_tokens)) as u64));
        prop_assert_eq!(live(Label::Metadata), 4 * held * shape.page_tokens as u64);
        prop_assert_eq!(live(Label::Policy), 8 * held * shape.page_tokens as u64);
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_cache_agrees_with_a_plain_model(
        steps in steps(),
        page_tokens in prop::sample::select(vec![1usize, 3, 8, 16, 64, 1024]),
        format in prop::sample::select(vec!["f32", "bf16", "int8", "k=int8,v=f16"]),
    ) {
        let mut pair = Pair::new(shape(page_tokens, format.parse::<KvFormat>().unwrap(), BOTH));
        for step in steps {
            let released = matches!(step, Step::Release);
            pair.take(step);
            pair.check_pages()?;
            pair.check_contents()?;
            if released {
                let (slack, shape) = (pair.arena.live_bytes(Label::KvSlack), *pair.cache.shape());
                prop_assert!(slack < shape.slab_pages() as u64 * shape.page_bytes(), "{slack} bytes of slack");
            }
        }
        (0..SEQUENCES).for_each(|sequence| pair.take(Step::Free(sequence)));
        pair.take(Step::Release);
        prop_assert_eq!(pair.arena.live_bytes(Label::KvSlack), 0);
        let Pair { arena, cache, .. } = pair;
        drop(cache);
        prop_assert_eq!(arena.usage().live.keys().copied().collect::<Vec<_>>(), [Label::Input]);
    }

    /// Kernels read pages as they read tensors: the same bits.
    #[test]
    fn kernels_give_the_same_bits_over_pages(
        page_tokens in prop::sample::select(vec![1usize, 5, 8, 16, 32, 64, 700]),
        (len, kept) in (1usize..900).prop_flat_map(|len| (Just(len), 1..=len)),
        stride in 1usize..50,
        dtype in prop::sample::select(DType::ALL.to_vec()),
    ) {
        let Pair { arena, k, v, mut cache, .. } = Pair::new(shape(page_tokens, dtype, &[]));
        // Token by token, so that the pages of the lists alternate.
        (0..len).for_each(|at| cache.append(k.view(), v.view(), at..at + 1).unwrap());
        let mut slots: Vec<usize> = (0..len).map(|slot| slot * stride % len).collect();
        slots.truncate(kept);
        slots.sort_unstable();
        slots.dedup();
        let dims = [SEQUENCES, HEADS, slots.len(), WIDTH];
        let dense = [&k, &v].map(|tensor| {
            let mut values = vec![0.0; dims.iter().product()];
            for (row, values) in values.chunks_exact_mut(WIDTH).enumerate() {
                let (list, slot) = (row / slots.len(), slots[row % slots.len()]);
                tensor.view().read_rows(list / HEADS, list % HEADS, slot, values);
            }
            Tensor::from_f32(&arena, Label::Input, dtype, dims, &values).unwrap()
        });
        (0..SEQUENCES * HEADS).for_each(|list| cache.retain(list, slots.iter().copied()).unwrap());
        cache.release();

        let shape =
            Shape { batch: SEQUENCES, q_heads: 2 * HEADS, kv_heads: HEADS, q_len: 1, kv_len: slots.len(), head_dim: WIDTH };
        let values: Vec<f32> = (0..shape.q_dims().iter().product()).map(|at: usize| at as f32 / 1e5).collect();
        let q = Tensor::from_f32(&arena, Label::Input, dtype, shape.q_dims(), &values).unwrap();
        let (params, cpu) = (Params::new(WIDTH, true), Cpu::new(Some(1)).unwrap());
        let dense = DenseKv::new(dense[0].view(), dense[1].view()).unwrap();
        for name in ["decode", "tiled"] {
            let kernel = kernel(name).unwrap();
            let run = |kv: &dyn KvRows| {
                let mut outputs = Outputs::allocate(&arena, &shape, dtype).unwrap();
                let mut workspace = kernel.workspace(&shape, &params, dtype, 1).allocate(&arena).unwrap();
                let call = Forward { shape, params, q: q.view(), kv, cpu: &cpu };
                kernel.forward(&call, &mut outputs, &mut workspace).unwrap();
                (outputs.o.bytes().to_vec(), outputs.lse.to_vec())
            };
            prop_assert_eq!(run(&cache), run(&dense), "{}", name);
        }
    }
}

#[test]
fn the_predicted_bytes_are_what_the_arena_shows() {
    for page_tokens in [1, 8, 16, 100, 1024] {
        for (tokens, format, columns) in [
            (1, "f32", &[][..]),
            (1500, "bf16", BOTH),
            (3000, "f16", &[Column::Attention][..]),
            (2000, "k=int8,v=bf16", BOTH),
        ] {
            let arena = Arena::unlimited();
            let shape = shape(page_tokens, format.parse::<KvFormat>().unwrap(), columns);
            let (k, v) = (tensor(&arena, shape.dtype(), 0), tensor(&arena, shape.dtype(), 1));
            let mut cache = PagedCache::new(&arena, shape).unwrap();
            cache.append(k.view(), v.view(), 0..tokens).unwrap();
            cache.append_sequence(1, k.view(), v.view(), 0, 0..tokens / 3).unwrap();
            let most = cache.pages();
            let check = |cache: &PagedCache| {
                let mut predicted = shape.bytes(cache.lens().iter().copied(), most);
                predicted.retain(|_, bytes| *bytes > 0);
                let mut live = arena.usage().live;
                live.remove(&Label::Input);
                assert_eq!(live, predicted, "pages of {page_tokens}, {tokens} tokens");
            };
            check(&cache);
            (0..shape.lists()).for_each(|list| cache.retain(list, tokens / 2 - tokens / 3..tokens / 2).unwrap());
            check(&cache);
            assert_eq!(cache.most_pages(), most);
        }
    }
}

#[test]
fn a_fork_shares_pages_until_one_of_them_changes() {
    let mut pair = Pair::new(shape(16, DType::F32, BOTH));
    pair.take(Step::AppendTo { sequence: 0, source: 0, count: 40 });
    let pages = |pair: &Pair| pair.cache.pages() / HEADS;
    assert_eq!(pages(&pair), 3);
    pair.take(Step::Fork { from: 0, to: 1 });
    pair.take(Step::Fork { from: 0, to: 2 });
    assert_eq!(pages(&pair), 3);
    // The begun page is copied; the two full ones stay shared.
    pair.take(Step::AppendTo { sequence: 1, source: 1, count: 1 });
    assert_eq!(pages(&pair), 4);
    // What is in front of the gap, and whole pages behind the end, are not touched.
    (0..HEADS).for_each(|head| pair.take(Step::EvictRange { list: 2 * HEADS + head, from: 35, count: 1 }));
    assert_eq!(pages(&pair), 5);
    (0..HEADS).for_each(|head| pair.cache.retain(2 * HEADS + head, 0..16).unwrap());
    assert_eq!(pages(&pair), 4);
    (0..HEADS).for_each(|head| pair.cache.retain(2 * HEADS + head, 0..10).unwrap());
    assert_eq!(pages(&pair), 5);
    (0..HEADS).for_each(|head| pair.model[2 * HEADS + head].truncate(10));
    pair.check_contents().unwrap();
    pair.check_pages().unwrap();
    (0..2).for_each(|sequence| pair.take(Step::Free(sequence)));
    assert_eq!(pages(&pair), 1);
    pair.check_contents().unwrap();
}

#[test]
fn without_room_the_cache_stays_as_it_was() {
    let source = Arena::unlimited();
    let (k, v) = (tensor(&source, DType::F32, 0), tensor(&source, DType::F32, 1));
    let shape = shape(16, DType::F32, BOTH);
    let table_bytes = shape.bytes([], 0).values().sum::<u64>();
    let one_slab = shape.bytes([], 1).values().sum::<u64>();
    // Room for two slabs of 64 pages. Sequences of 21 pages, 3 * 2 lists: 126 pages.
    let arena = Arena::with_limit(2 * one_slab - table_bytes);
    let mut cache = PagedCache::new(&arena, shape).unwrap();
    cache.append(k.view(), v.view(), 0..330).unwrap();
    assert_eq!(cache.pages(), 126);
    assert!(cache.append(k.view(), v.view(), 330..340).is_err());
    assert!(cache.append_sequence(0, k.view(), v.view(), 0, 330..360).is_err());
    assert_eq!(cache.lens(), [330; 6]);
    // Shared pages of which there is no room for copies.
    cache.free(1);
    cache.fork(0, 1);
    cache.append_sequence(2, k.view(), v.view(), 2, 330..330 + 22 * 16).unwrap();
    assert_eq!(cache.pages(), 128);
    assert!(cache.retain(0, 1..330).is_err());
    assert!(cache.add_attention(0, &[1.0; 330]).is_err());
    assert!(cache.write_key(0, 0, &[0.0; WIDTH]).is_err());
    let mut key = [0.0; WIDTH];
    cache.read_key(0, 0, &mut key);
    assert_eq!((cache.lens()[0], key, cache.attention(0, 329)), (330, row(0, 0, 0), 0.0));
    // Whole pages go without a copy.
    cache.retain(0, 0..320).unwrap();
    assert_eq!((cache.lens()[0], cache.pages()), (320, 128));
}

#[test]
fn lists_that_grow_in_turn_get_pages_behind_one_another() {
    let Pair { k, v, mut cache, .. } = Pair::new(shape(16, DType::F32, &[]));
    (0..960).for_each(|at| cache.append(k.view(), v.view(), at..at + 1).unwrap());
    for list in 0..SEQUENCES * HEADS {
        let pages: Vec<u32> = (0..60).map(|index| cache.coded.page(list, index)).collect();
        let runs = 1 + pages.windows(2).filter(|pair| !cache.coded.pool.follows(pair[0], pair[1])).count();
        assert!(runs <= 12, "60 pages of list {list} lie in {runs} runs");
    }
    // A slab that is emptied moves as one piece.
    (0..SEQUENCES * HEADS).for_each(|list| cache.retain(list, 0..if list == 0 { 960 } else { 16 }).unwrap());
    cache.release();
    let slabs: std::collections::BTreeSet<usize> =
        (0..60).map(|index| cache.coded.pool.slab_of(cache.coded.page(0, index))).collect();
    assert_eq!(slabs.len(), 2, "65 pages take two slabs");
}
