//! TriAttention (arXiv 2604.04921): before RoPE the queries of a head lie near a centre that hardly depends on the text, so
//! the attention that a key will get is a function of its distance, a trigonometric series whose coefficients the centre
//! and the key give, and no recent query has to be looked at.
//!
//! In RoPE's pair `f`, which turns by `w` radians a token, let `c` be the mean of a head's queries before RoPE, `n` the mean of
//! their norms, and `k` the key, as complex numbers. The score is the sum over pairs of `|c||k| cos(w d + arg c k*)`, averaged
//! over the distances `d` of queries 1, 2, 4, ... `future` positions ahead, plus `(n - |c|) |k|`, which counts where
//! queries are spread. The mean of the cosines is a product with the key as it is cached, of `c` turned by RoPE to those
//! positions on average, so no key is rotated back. Each query head's scores are then normalised over the list (mean 0, deviation 1); a
//! KV head gets the maximum over its group, and with `layers=mean` the mean of that over all layers, so that a KV head keeps the same
//! tokens in each. Centres and norms are calibrated once for a model and read from a policy file; [`calibrate`] makes them.
//!
//! Where the authors' paper and their code (WeianMao/triattention at c3744ee) leave a choice:
//!
//! | choice | theirs | here |
//! |---|---|---|
//! | who keeps the same tokens | scripts of the published runs and vLLM: a KV head in all layers; options: each layer by itself; one set for all heads, of those that any head's best reach | `layers=mean`; `layers=own` |
//! | over distances | mean; option: maximum, of one distance for all pairs | mean |
//! | what competes | generated tokens, the prompt stays; option: all | all; `+protect:sink=N` keeps a prompt |
//! | recent tokens | evicted as any other; vLLM's plugin can keep the last 128 | `+protect:window=128` |
//! | when | every 128 tokens once the cache is 128 over the budget | once, or as `+every:steps=128` says |
//! | ties | noise of 1e-6 | the later token |
//! | phases | f32, off by 0.004 at a distance of 65536 | f64 |
//! | centres | `scripts/calibrate.py` leaves out the norm that Qwen3 has behind its projection | of queries as RoPE gets them |

use super::super::linear::dot;
use super::expected_attention::AverageTurn;
use crate::attention::Shape;
use crate::memory::Label;
use crate::named::Parameter;
use crate::policy::Axis::{HeadDim, Layers, QHeads, RopePairs};
use crate::policy::{Averages, Context, Learned, Policy, PolicyEntry, PolicyError, Scorer, Statistic, each_list};
use crate::tensor::TensorView;

/// The tensor of centres, `[layers, Hq, D]`: the mean query before RoPE.
pub const CENTRES: &str = "triattention.centres";
/// The tensor of norms, `[layers, Hq, D/2]`: the mean norm of the queries in each pair of channels.
pub const NORMS: &str = "triattention.norms";

/// The registry's line.
pub const ENTRY: PolicyEntry = PolicyEntry {
    name: "triattention",
    about: "keeps the keys that calibrated query centres would attend to from distances to come; reads triattention.centres \
            [layers, Hq, D] and triattention.norms [layers, Hq, D/2] of --policy-file; the paper's is triattention+every:steps=128",
    paper: "2604.04921",
    parameters: &[
        Parameter {
            name: "future",
            default: "65536",
            about: "the farthest of the positions to come: 1, 2, 4, ... ahead",
        },
        Parameter {
            name: "layers",
            default: "mean",
            about: "mean: a KV head keeps the same tokens in all layers, by the mean of their scores; own: each layer by itself",
        },
    ],
    build: |named, assets| {
        let together = match named.text("layers") {
            None | Some("mean") => true,
            Some("own") => false,
            Some(_) => return Err(named.wrong("layers", "mean or own".into()).into()),
        };
        let centres = assets.needed(CENTRES, &[Layers, QHeads, HeadDim])?;
        let norms = assets.needed(NORMS, &[Layers, QHeads, RopePairs])?;
        let future = named.count("future", 65536, 1)?;
        Ok(Policy::after_prefill(TriAttention { future, together, calibrated: centres.zip(norms) }))
    },
};

/// The least deviation that scores are divided by.
const LEAST_DEVIATION: f64 = 1e-6;

struct TriAttention {
    /// The farthest position ahead.
    future: usize,
    /// Whether layers keep the same tokens.
    together: bool,
    /// Centres and norms; `None` where there is no file, which is refused before anything is scored.
    calibrated: Option<(Learned, Learned)>,
}

/// Scratch elements of a list: the scores of each query head of the group, its centre, turned, and the weights of norms.
fn parts(shape: &Shape) -> [usize; 3] {
    [shape.kv_len, shape.head_dim, shape.head_dim / 2].map(|len| shape.group() * len)
}

impl Scorer for TriAttention {
    fn averages(&self) -> Averages {
        if self.together { Averages::Layers } else { Averages::Nothing }
    }

    fn needs(&self) -> Vec<Statistic> {
        vec![Statistic::Keys, Statistic::BeforeRope]
    }

    fn scratch_bytes(&self, shape: &Shape, _: usize) -> u64 {
        4 * (shape.batch * shape.kv_heads * parts(shape).iter().sum::<usize>()) as u64
    }

    fn score(&self, context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
        let missing = PolicyError::Missing { policy: ENTRY.name, what: "a policy file of calibrated centres" };
        let (centres, norms) = self.calibrated.as_ref().ok_or(missing)?;
        let distances = std::iter::successors(Some(1usize), |distance| distance.checked_mul(2));
        let distances = distances.take_while(|&distance| distance <= self.future);
        let turn = AverageTurn::over(context, distances, ENTRY.name)?;
        let shape = context.call.shape;
        let (width, group, parts) = (shape.head_dim, shape.group(), parts(&shape));
        let pairs = norms.at(&[0, 0]).len();
        let mut scratch =
            context.arena.alloc::<f32>(Label::Workspace, context.lists() * parts.iter().sum::<usize>())?;
        each_list(context, scores, &mut scratch, |list, scores, scratch| {
            let (raw, scratch) = scratch.split_at_mut(parts[0]);
            let (turned, weights) = scratch.split_at_mut(parts[1]);
            let layer = context.layer_number(list.batch);
            let heads = turned.chunks_exact_mut(width).zip(weights.chunks_exact_mut(width / 2));
            for (head, (turned, weights)) in heads.enumerate() {
                let of = [layer, list.head * group + head];
                turned.copy_from_slice(centres.at(&of));
                // Channels that no RoPE turns have their part in the product, and no weight here.
                for (pair, (weight, norm)) in weights.iter_mut().zip(norms.at(&of)).enumerate() {
                    *weight = norm - turned[pair].hypot(turned[pair + pairs]);
                }
                turn.apply(turned);
            }
            list.keys(|slot, key| {
                let mut sizes = [0.0; Shape::MAX_HEAD_DIM / 2];
                let (first, second) = key.split_at(pairs);
                sizes.iter_mut().zip(first.iter().zip(second)).for_each(|(to, (x, y))| *to = (x * x + y * y).sqrt());
                let heads = turned.chunks_exact(width).zip(weights.chunks_exact(width / 2));
                for (raw, (turned, weights)) in raw.chunks_exact_mut(shape.kv_len).zip(heads) {
                    raw[slot] = dot(key, turned) + dot(&sizes[..width / 2], weights);
                }
            });
            scores.fill(f32::NEG_INFINITY);
            for raw in raw.chunks_exact(shape.kv_len) {
                let raw = &raw[..list.len];
                let (mean, deviation) = mean_and_deviation(raw);
                for (score, raw) in scores.iter_mut().zip(raw) {
                    *score = score.max(((f64::from(*raw) - mean) / deviation.max(LEAST_DEVIATION)) as f32);
                }
            }
        });
        if self.together { mean_over_layers(context, scores) } else { Ok(()) }
    }
}

/// Mean and deviation of numbers, these being all there are.
fn mean_and_deviation(values: &[f32]) -> (f64, f64) {
    let count = values.len().max(1) as f64;
    let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
    let squares = values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
    (mean, (squares / count).sqrt())
}

/// Gives the lists of a KV head the mean of their scores over all layers.
fn mean_over_layers(context: &Context<'_>, scores: &mut [f32]) -> Result<(), PolicyError> {
    let kv_len = context.call.shape.kv_len;
    // Lists of a sequence and a KV head are this far apart from one layer to the next.
    let stride = context.lists() / context.layers;
    let (lowest, others) = scores.split_at_mut(stride * kv_len);
    for (list, sum) in lowest.chunks_mut(kv_len).enumerate() {
        let len = context.len(list);
        let sum = &mut sum[..len];
        let higher = || (1..context.layers).map(|layer| layer * stride + list);
        let position = |list, slot| (context.positions)(list, slot);
        let is_same =
            |other| context.len(other) == len && (0..len).all(|slot| position(other, slot) == position(list, slot));
        if !higher().all(is_same) {
            let reason = "layers=mean keeps the same tokens of a KV head in all layers, which hold different ones here; use layers=own";
            return Err(PolicyError::Combination { policy: ENTRY.name.into(), reason: reason.into() });
        }
        for other in higher() {
            let other = &others[(other - stride) * kv_len..][..len];
            sum.iter_mut().zip(other).for_each(|(sum, score)| *sum += score);
        }
        sum.iter_mut().for_each(|sum| *sum /= context.layers as f32);
        for other in higher() {
            others[(other - stride) * kv_len..][..len].copy_from_slice(sum);
        }
    }
    Ok(())
}

/// Centres `[layers, Hq, D]` and norms `[layers, Hq, D/2]` as a policy file has them, from a model's queries before RoPE over a
/// text, `[layers, Hq, L, D]`, of whose channels RoPE turns the first `pairs` pairs: as many norms are made.
pub fn calibrate(q: &TensorView<'_>, pairs: usize) -> (Vec<f32>, Vec<f32>) {
    let [layers, heads, tokens, width] = q.dims();
    let (mut centres, mut norms) = (Vec::new(), Vec::new());
    let mut row = [0.0; Shape::MAX_HEAD_DIM];
    let row = &mut row[..width];
    for (layer, head) in (0..layers).flat_map(|layer| (0..heads).map(move |head| (layer, head))) {
        let (mut sum, mut sizes) = (vec![0.0f64; width], vec![0.0f64; pairs]);
        for token in 0..tokens {
            q.read_rows(layer, head, token, row);
            sum.iter_mut().zip(&*row).for_each(|(sum, &x)| *sum += f64::from(x));
            let (first, second) = row.split_at(pairs);
            let both = first.iter().zip(second);
            sizes.iter_mut().zip(both).for_each(|(sum, (&x, &y))| *sum += f64::from(x).hypot(f64::from(y)));
        }
        centres.extend(sum.iter().map(|sum| (sum / tokens as f64) as f32));
        norms.extend(sizes.iter().map(|sum| (sum / tokens as f64) as f32));
    }
    (centres, norms)
}
