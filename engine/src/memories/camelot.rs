//! CAMELoT (arXiv 2402.13449): an associative memory of modes, means of tokens with similar keys, in every layer.
//!
//! A text is read in segments of `window` tokens. A token attends to the modes of its KV head and to its segment up to
//! itself. Behind the segment each of its tokens is written: if the key of the nearest mode is more similar to its own than
//! `threshold`, it is taken into the mode's mean key and mean value (consolidation); else it becomes a mode of its own, in a
//! free slot or in that of the mode that was written to the longest ago (novelty and recency). Keys are compared, and
//! averaged, as they were before RoPE, by the cosine; `position` says where modes are read. `docs/camelot.md` has the
//! equations, and what of them the paper leaves open. Heads are written one thread each, each token by token.

mod head;

use super::{At, Memory, MemoryEntry, MemoryShape, MemoryState, Modes, Run, Runs, in_segment};
use crate::memory::{Arena, ArenaError, Buffer, Label, LabelBytes};
use crate::named::{Named, NamedError, Parameter};
use crate::tensor::TensorView;
use head::{Head, Mode};
use rayon::prelude::*;

pub(super) const ENTRY: MemoryEntry = MemoryEntry {
    name: "camelot",
    about: "an associative memory of modes: means of tokens with similar keys, behind a window",
    paper: "2402.13449",
    parameters: &[
        Parameter { name: "slots", default: "1024", about: "modes of each KV head of each layer" },
        Parameter { name: "window", default: "128", about: "tokens of a segment, which are written together" },
        Parameter {
            name: "threshold",
            default: "0.9",
            about: "cosine above which a token is taken into the nearest mode, -2 to 2; above 1 none is",
        },
        Parameter {
            name: "sink",
            default: "0",
            about: "first tokens of a text that stay modes of their own, of the slots",
        },
        Parameter {
            name: "top",
            default: "all",
            about: "modes that a token reads, those of sink and then of the most similar keys: more than sink; with a number tokens go one by one",
        },
        Parameter {
            name: "position",
            default: "last",
            about: "where a mode is read: at its last token, at the mean of its tokens, or near, in the places before the window",
        },
    ],
    exact: "camelot:slots=1000000,threshold=2",
    build,
};

/// Where a mode is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    /// Where the last token that was taken into it stood.
    Last,
    /// At the mean of its tokens' positions.
    Mean,
    /// All modes in the places just before the segment, in the order in which they were written to.
    Near,
}

fn build(named: &Named) -> Result<Box<dyn Memory>, NamedError> {
    let position = match named.text("position").unwrap_or("last") {
        "last" => Position::Last,
        "mean" => Position::Mean,
        "near" => Position::Near,
        _ => return Err(named.wrong("position", "last, mean or near".into())),
    };
    let top = match named.text("top") {
        None | Some("all") => None,
        Some(_) => match named.count("top", 1, 1) {
            Ok(top) => Some(top),
            Err(_) => return Err(named.wrong("top", "all or a whole number of at least 1".into())),
        },
    };
    let (slots, sink) = (named.count("slots", 1024, 1)?, named.count("sink", 0, 0)?);
    if sink >= slots {
        return Err(named.wrong("sink", format!("less than the {slots} slots")));
    }
    if top.is_some_and(|top| top <= sink) {
        return Err(named.wrong("top", format!("all or more than the {sink} of sink")));
    }
    Ok(Box::new(Camelot {
        slots,
        sink,
        window: named.count("window", 128, 1)?,
        threshold: named.number("threshold", 0.9, -2.0..=2.0)? as f32,
        top,
        position,
    }))
}

#[derive(Clone, Copy)]
struct Camelot {
    slots: usize,
    sink: usize,
    window: usize,
    threshold: f32,
    top: Option<usize>,
    position: Position,
}

/// Extents of the buffers.
struct Sizes {
    /// Slots of a list: no more than tokens come.
    slots: usize,
    /// Tokens of a segment, likewise.
    window: usize,
    /// Modes that are copied together for one token; 0 where all are read where they lie.
    picks: usize,
    lists: usize,
}

impl Camelot {
    fn sizes(&self, shape: &MemoryShape) -> Sizes {
        let slots = self.slots.min(shape.max_tokens);
        let picks = self.top.unwrap_or(usize::MAX).min(slots);
        let chooses = self.top.is_some() || shape.windowed;
        let lists = shape.sequences * shape.kv_heads;
        Sizes { slots, window: self.window.min(shape.max_tokens), picks: if chooses { picks } else { 0 }, lists }
    }
}

impl Memory for Camelot {
    fn segment_tokens(&self) -> Option<usize> {
        Some(self.window)
    }

    fn together(&self, seen: usize, tokens: usize, window: Option<usize>) -> usize {
        let segment = in_segment(seen, tokens, self.window);
        // Nothing is chosen while there are no modes, and nothing hidden within the sliding window of the first tokens.
        match self.top.is_some() && seen >= self.window {
            true => 1,
            false => segment.min(window.map_or(segment, |window| window.saturating_sub(seen))).max(1),
        }
    }

    fn most_rows(&self, shape: &MemoryShape) -> usize {
        let Sizes { slots, window, .. } = self.sizes(shape);
        self.top.unwrap_or(usize::MAX).min(slots) + window
    }

    fn bytes(&self, shape: &MemoryShape) -> LabelBytes {
        let Sizes { slots, window, picks, lists } = self.sizes(shape);
        let row = 4 * shape.head_dim;
        LabelBytes::from([
            (Label::Kv, (3 * row * lists * (slots + window)) as u64),
            (Label::Metadata, (size_of::<Mode>() * lists * slots) as u64),
            (Label::Workspace, (2 * row * shape.kv_heads * picks + 8 * shape.kv_heads * slots) as u64),
        ])
    }

    fn open(&self, shape: &MemoryShape, arena: &Arena) -> Result<Box<dyn MemoryState>, ArenaError> {
        let Sizes { slots, window, picks, lists } = self.sizes(shape);
        let rows = |count: usize| arena.alloc::<f32>(Label::Kv, count * shape.head_dim);
        let picked = || arena.alloc(Label::Workspace, shape.kv_heads * picks * shape.head_dim);
        Ok(Box::new(State {
            asked: *self,
            shape: *shape,
            modes: [rows(lists * slots)?, rows(lists * slots)?, rows(lists * slots)?],
            facts: arena.alloc(Label::Metadata, lists * slots)?,
            tokens: [rows(lists * window)?, rows(lists * window)?, rows(lists * window)?],
            picked: [picked()?, picked()?],
            scores: arena.alloc(Label::Workspace, shape.kv_heads * slots)?,
            order: arena.alloc(Label::Workspace, shape.kv_heads * slots)?,
            counts: vec![0; lists],
            segments: vec![Segment { first: 0, tokens: 0 }; shape.sequences],
        }))
    }
}

/// Where the segment of a sequence begins, and how many of its tokens are there.
#[derive(Debug, Clone, Copy)]
struct Segment {
    first: usize,
    tokens: usize,
}

/// Keys before RoPE, keys after it, and values.
const BEFORE: usize = 0;
const ROTATED: usize = 1;
const VALUES: usize = 2;

struct State {
    asked: Camelot,
    shape: MemoryShape,
    /// Means of modes, `[sequences, Hkv, slots, D]`.
    modes: [Buffer<f32>; 3],
    /// What else is known of them, `[sequences, Hkv, slots]`.
    facts: Buffer<Mode>,
    /// Tokens of the segment, `[sequences, Hkv, window, D]`.
    tokens: [Buffer<f32>; 3],
    /// Rotated keys and values of chosen modes, `[Hkv, picks, D]`.
    picked: [Buffer<f32>; 2],
    /// Similarities to a key, and an order of modes, `[Hkv, slots]`.
    scores: Buffer<f32>,
    order: Buffer<u32>,
    /// Modes of each list.
    counts: Vec<usize>,
    segments: Vec<Segment>,
}

impl State {
    fn sizes(&self) -> Sizes {
        self.asked.sizes(&self.shape)
    }

    /// Modes of each head of a sequence.
    fn counts(&self, sequence: usize) -> &[usize] {
        &self.counts[sequence * self.shape.kv_heads..(sequence + 1) * self.shape.kv_heads]
    }
}

impl MemoryState for State {
    fn append(&mut self, at: &At<'_>, k: TensorView<'_>, v: TensorView<'_>) {
        let (MemoryShape { kv_heads, head_dim, .. }, room) = (self.shape, self.sizes().window);
        let (segment, count) = (&mut self.segments[at.sequence], k.dims()[2]);
        for head in 0..kv_heads {
            for token in 0..count {
                let place = ((at.sequence * kv_heads + head) * room + segment.tokens + token) * head_dim;
                let row = place..place + head_dim;
                let [before, rotated, values] = &mut self.tokens;
                k.read_rows(0, head, token, &mut before[row.clone()]);
                rotated[row.clone()].copy_from_slice(&before[row.clone()]);
                at.rope.rotate(&mut rotated[row.clone()], (segment.first + segment.tokens + token) as f64);
                v.read_rows(0, head, token, &mut values[row]);
            }
        }
        segment.tokens += count;
    }

    fn read(&mut self, at: &At<'_>, _q: TensorView<'_>) -> Runs<'_> {
        let MemoryShape { kv_heads, head_dim, .. } = self.shape;
        let Sizes { slots, window, picks, .. } = self.sizes();
        let Segment { first, tokens } = self.segments[at.sequence];
        let own = first + tokens - 1;
        let hidden = at.window.map_or(0, |window| (own + 1).saturating_sub(window));
        let rows = |list: usize, room: usize, from: usize, to: usize| {
            (list * room + from) * head_dim..(list * room + to) * head_dim
        };
        // How many of each head's modes were copied; `None` where all are read where they lie.
        let (mut chosen, mut looked_at) = (Vec::with_capacity(kv_heads), 0);
        for head in 0..kv_heads {
            let list = at.sequence * kv_heads + head;
            let modes = &self.facts[list * slots..][..self.counts[list]];
            if modes.len() <= self.asked.top.unwrap_or(usize::MAX) && modes.iter().all(|mode| mode.sees(hidden)) {
                chosen.push(None);
                continue;
            }
            let key = &self.tokens[BEFORE][rows(list, window, tokens - 1, tokens)];
            let keys = &self.modes[BEFORE][rows(list, slots, 0, modes.len())];
            let scores = &mut self.scores[head * slots..][..modes.len()];
            let order = &mut self.order[head * slots..][..modes.len()];
            let picked =
                head::nearest(at.cpu.isa(), modes, hidden, (key, keys), (picks, self.asked.sink), scores, order);
            for (pick, &slot) in picked.iter().enumerate() {
                let from = rows(list, slots, slot as usize, slot as usize + 1);
                let to = rows(head, picks, pick, pick + 1);
                self.picked[0][to.clone()].copy_from_slice(&self.modes[ROTATED][from.clone()]);
                self.picked[1][to].copy_from_slice(&self.modes[VALUES][from]);
            }
            chosen.push(Some(picked.len()));
            looked_at += modes.len();
        }
        let runs = |(head, chosen): (usize, Option<usize>)| {
            let list = at.sequence * kv_heads + head;
            let modes = match chosen {
                None => {
                    let all = rows(list, slots, 0, self.counts[list]);
                    Run { k: &self.modes[ROTATED][all.clone()], v: &self.modes[VALUES][all] }
                }
                Some(count) => {
                    let copied = rows(head, picks, 0, count);
                    Run { k: &self.picked[0][copied.clone()], v: &self.picked[1][copied] }
                }
            };
            let seen = rows(list, window, hidden.saturating_sub(first), tokens);
            [modes, Run { k: &self.tokens[ROTATED][seen.clone()], v: &self.tokens[VALUES][seen] }]
        };
        Runs::new(head_dim, chosen.into_iter().enumerate().map(runs)).chosen_by(looked_at)
    }

    fn write(&mut self, at: &At<'_>) {
        let Segment { first, tokens } = self.segments[at.sequence];
        if tokens < self.asked.window {
            return;
        }
        let MemoryShape { kv_heads, head_dim, .. } = self.shape;
        let Sizes { slots, window, .. } = self.sizes();
        let lists = at.sequence * kv_heads..(at.sequence + 1) * kv_heads;
        // One head each: its modes, and room for what is worked out.
        let part = |per_list: usize| lists.start * per_list..lists.end * per_list;
        let [before, rotated, values] = &mut self.modes;
        let heads = before[part(slots * head_dim)]
            .par_chunks_mut(slots * head_dim)
            .zip(rotated[part(slots * head_dim)].par_chunks_mut(slots * head_dim))
            .zip(values[part(slots * head_dim)].par_chunks_mut(slots * head_dim))
            .zip(self.facts[part(slots)].par_chunks_mut(slots))
            .zip(self.counts[lists.clone()].par_iter_mut())
            .zip(self.scores.par_chunks_mut(slots))
            .zip(self.order.par_chunks_mut(slots));
        let [keys, _, from_values] = &self.tokens;
        let (asked, list) = (self.asked, window * head_dim);
        heads.enumerate().for_each(|(head, ((((((before, rotated), values), modes), count), scores), order))| {
            let mut written =
                Head { head_dim, before, rotated, values, modes, count, scores, sink: asked.sink, isa: at.cpu.isa() };
            let own = (lists.start + head) * list..(lists.start + head + 1) * list;
            let rows = keys[own.clone()].chunks_exact(head_dim).zip(from_values[own].chunks_exact(head_dim));
            for (position, (key, value)) in (first..).zip(rows) {
                written.write(key, value, position, asked.threshold, asked.position == Position::Mean);
            }
            match asked.position {
                Position::Near => written.place_near(first + tokens, at.rope, order),
                Position::Last | Position::Mean => written.turn_since(first, at.rope),
            }
        });
        self.segments[at.sequence] = Segment { first: first + tokens, tokens: 0 };
    }

    fn held_rows(&self, sequence: usize) -> usize {
        let heads = self.shape.kv_heads;
        self.counts(sequence).iter().sum::<usize>() + heads * self.segments[sequence].tokens
    }

    fn modes(&self, sequence: usize) -> Option<Modes> {
        let written = self.segments[sequence].first as f64;
        let of_head = |(head, &count): (usize, &usize)| {
            let slots = self.sizes().slots;
            let modes = &self.facts[(sequence * self.shape.kv_heads + head) * slots..][..count];
            let mean = |value: &dyn Fn(&Mode) -> f64| modes.iter().map(value).sum::<f64>() / count as f64;
            let taken_in = modes.iter().map(|mode| f64::from(mode.tokens - 1)).sum::<f64>();
            let likeness = modes.iter().map(|mode| f64::from(mode.likeness) * f64::from(mode.tokens - 1)).sum::<f64>();
            Modes {
                count: count as f64,
                tokens: mean(&|mode| mode.tokens.into()),
                most_tokens: modes.iter().map(|mode| mode.tokens).max().unwrap_or(0).into(),
                single: mean(&|mode| f64::from(u8::from(mode.tokens == 1))),
                age_tokens: mean(&|mode| written - 1.0 - f64::from(mode.last)),
                likeness: (taken_in > 0.0).then(|| likeness / taken_in),
            }
        };
        let heads: Vec<Modes> =
            self.counts(sequence).iter().enumerate().filter(|(_, count)| **count > 0).map(of_head).collect();
        Modes::mean(&heads)
    }

    fn fork(&mut self, from: usize, to: usize) {
        let heads = self.shape.kv_heads;
        let sequences = self.shape.sequences;
        for rows in self.modes.iter_mut().chain(&mut self.tokens) {
            let len = rows.len() / sequences;
            rows.copy_within(from * len..(from + 1) * len, to * len);
        }
        let len = self.facts.len() / sequences;
        self.facts.copy_within(from * len..(from + 1) * len, to * len);
        self.counts.copy_within(from * heads..(from + 1) * heads, to * heads);
        self.segments[to] = self.segments[from];
    }

    fn free(&mut self, sequence: usize) {
        let heads = self.shape.kv_heads;
        self.counts[sequence * heads..(sequence + 1) * heads].fill(0);
        self.segments[sequence] = Segment { first: 0, tokens: 0 };
    }
}
