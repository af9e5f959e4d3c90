//! Attention that is shared out over ranks: threads of this process, or the processes that `mpirun` started.
//!
//! Every rank reads its own tokens from the file, and computes, sends and counts as [`Shared`] says. Behind what is measured, rank 0
//! gathers the result, checks it against the f64 reference and writes it.

mod report;

use super::pass::{Problem, refuse_bad_gradients};
use super::{Args, write_tensors};
use crate::attention::{self, Gradients, Outputs, Shape};
use crate::cli::failure::Failure;
use crate::cli::{output, ranks};
use crate::device::Cpu;
use crate::memory::{Arena, Label};
use crate::ranks::{Asked, Comm, Method, OfRank, Rank, RankError, RingBackward, Shared, scatter_rows};
use crate::tensor::Tensor;
use crate::tensor::file::TensorFile;
use crate::units;
use report::{Passes, Report};
use std::ops::Range;

/// Runs `attend` on the ranks that were asked for.
pub fn run(args: &Args, asked: Asked) -> Result<(), Failure> {
    ranks::run_attention(asked, &args.compute, |comm, cpu, arena| args.on_rank(asked.method, comm, cpu, arena))
}

impl Args {
    /// What one rank does.
    fn on_rank(&self, method: Method, comm: &Comm, cpu: &Cpu, arena: &Arena) -> Result<(), Failure> {
        let prepare = || {
            self.check_files()?;
            if self.backward && method == Method::Tree {
                return Err(Failure::usage(
                    "--backward is not available over a tree, which is for decoding; write --ranks ring, or ring:4"
                        .into(),
                ));
            }
            let file = TensorFile::open(&self.input)?;
            let problem = self.problem(&file)?;
            let shared = Shared::new(method, problem.shape, problem.params, problem.dtype, comm.size())?;
            if comm.rank() == 0 {
                self.refuse_beyond(&problem)?;
            }
            Ok::<_, Failure>((file, problem, shared))
        };
        let (file, problem, shared) = ranks::settle(comm, prepare())?;
        let Problem { shape, params, dtype, backward, .. } = problem;
        let (json, output, input) = (self.json.is_some(), self.output.display(), file.hash());
        let text = format!("{method} {shape:?} {params:?} {dtype} {backward} {} {json} {output} {input}", self.repeat);
        ranks::agree_on_input(comm, &text)?;
        // As many queries as a rank has decide which kernel fits.
        let kernel = attention::kernel(match method {
            Method::Ring => "tiled",
            Method::Tree => attention::fitting(&shape, false),
        })?;
        let on = Rank { comm, cpu, arena, kernel: &*kernel };

        let (own, forward, backward) = self.measure(on, &shared, &file)?;
        let forward = Passes::new(ranks::gather(comm, &forward)?);
        let backward = backward.map(|seen| Ok::<_, Failure>(Passes::new(ranks::gather(comm, &seen)?))).transpose()?;
        // The whole is on one rank only here, where nothing is measured any more.
        let arena = &Arena::with_limit(self.compute.limit_bytes());
        let Some(whole) = own.gather(Rank { arena, ..on }, &shared, &shape)? else { return Ok(()) };
        let inputs = problem.load_all(&file, arena)?;
        let (rel_l2, checked_rows) = problem.check_forward(&inputs, &whole.outputs, cpu)?;
        whole.gradients.as_ref().map_or(Ok(()), refuse_bad_gradients)?;
        write_tensors(&self.output, &shape, &whole.outputs, whole.gradients.as_ref())?;
        let names = [method.to_string(), comm.transport().into(), kernel.name().into()];
        let report = Report::new(names, cpu, &problem, forward, backward, (rel_l2, checked_rows));
        match &self.json {
            Some(target) => output::json(target, &report),
            None => output::print(&report.summary(&self.output)),
        }
    }

    /// Says before anything is computed that the whole problem, which rank 0 checks and writes, is beyond the limit.
    fn refuse_beyond(&self, problem: &Problem) -> Result<(), Failure> {
        let Problem { shape, dtype, backward, ref stored, .. } = *problem;
        let inputs: u64 = stored.iter().map(|&(_, dims, _)| Tensor::bytes_of(dtype, dims)).sum();
        let gradients = if backward { Gradients::bytes(&shape, dtype) } else { 0 };
        let (whole, limit) = (inputs + Outputs::bytes(&shape, dtype) + gradients, self.compute.limit_bytes());
        if whole <= limit {
            return Ok(());
        }
        Err(Failure::work(format!(
            "out of memory: behind the passes rank 0 checks the whole result, of {} with its inputs, and the limit is {}; \
             shorten the context, or raise --limit-memory",
            units::bytes(whole),
            units::bytes(limit)
        )))
    }

    /// Loads this rank's tokens and runs the passes: its results, and what it took and sent in the forward and backward passes.
    fn measure(
        &self,
        on: Rank<'_>,
        shared: &Shared,
        file: &TensorFile,
    ) -> Result<(Results, OfRank, Option<OfRank>), Failure> {
        let [q_of, kv_of] = shared.tokens_of(on.comm.rank());
        let load = |name, ranges: &[Range<usize>]| file.load_tokens(name, ranges, on.arena, Label::Input);
        let (q, k, v) = (load("q", &q_of)?, load("k", &kv_of)?, load("v", &kv_of)?);
        let mut forward = OfRank::default();
        let mut outputs = None;
        if self.repeat > 1 {
            shared.sample(on, q.view(), [&k, &v], &mut OfRank::default())?;
        }
        for _ in 0..self.repeat {
            drop(outputs.take());
            outputs = Some(shared.sample(on, q.view(), [&k, &v], &mut forward)?);
        }
        let outputs = outputs.expect("at least one pass");
        // The summary says nothing of the cost model, and timing links takes longer than short passes.
        if self.json.is_some() {
            shared.predict(on, &mut forward)?;
        }
        let (Shared::Ring(ring), true) = (shared, self.backward) else {
            return Ok((Results { outputs, gradients: None }, forward, None));
        };
        // Behind the forward passes, which have no part in it.
        let grad_o = load("do", &q_of)?;
        let call = RingBackward { q: q.view(), o: outputs.o.view(), lse: &outputs.lse, grad_o: grad_o.view() };
        let (mut backward, mut gradients) = (OfRank::default(), None);
        if self.repeat > 1 {
            ring.sample_backward(on, call, [&k, &v], &mut OfRank::default())?;
        }
        for _ in 0..self.repeat {
            drop(gradients.take());
            gradients = Some(ring.sample_backward(on, call, [&k, &v], &mut backward)?);
        }
        if self.json.is_some() {
            ring.predict_backward(on, &mut backward)?;
        }
        Ok((Results { outputs, gradients }, forward, Some(backward)))
    }
}

/// What a rank computed, or all of them.
struct Results {
    outputs: Outputs,
    gradients: Option<Gradients>,
}

impl Results {
    /// The whole result on rank 0, put together from the tokens of each rank.
    fn gather(self, on: Rank<'_>, shared: &Shared, shape: &Shape) -> Result<Option<Results>, Failure> {
        if matches!(shared, Shared::Tree(_)) {
            return Ok(Some(self).filter(|_| on.comm.rank() == 0));
        }
        let dtype = self.outputs.o.dtype();
        let mut whole = (on.comm.rank() == 0).then(|| Outputs::allocate(on.arena, shape, dtype)).transpose()?;
        let queries = |rank: usize| shared.tokens_of(rank)[0].clone();
        let keys = |rank: usize| shared.tokens_of(rank)[1].clone();
        let rows = |own: &Tensor, whole: Option<&mut Tensor>, of: &dyn Fn(usize) -> Vec<Range<usize>>| {
            let row_bytes = own.dims()[3] * own.dtype().bytes();
            gather_rows(on.comm, own.bytes(), whole.map(Tensor::bytes_mut), of, row_bytes)
        };
        rows(&self.outputs.o, whole.as_mut().map(|whole| &mut whole.o), &queries)?;
        let lse = whole.as_mut().map(|whole| bytemuck::cast_slice_mut(&mut whole.lse));
        gather_rows(on.comm, bytemuck::cast_slice(&self.outputs.lse), lse, &queries, size_of::<f32>())?;
        let mut gradients = None;
        if let Some(own) = self.gradients {
            gradients = whole.as_ref().map(|_| Gradients::allocate(on.arena, shape, dtype)).transpose()?;
            rows(&own.q, gradients.as_mut().map(|whole| &mut whole.q), &queries)?;
            rows(&own.k, gradients.as_mut().map(|whole| &mut whole.k), &keys)?;
            rows(&own.v, gradients.as_mut().map(|whole| &mut whole.v), &keys)?;
        }
        Ok(whole.map(|outputs| Results { outputs, gradients }))
    }
}

/// Writes rows `[heads, tokens]` of all ranks to `whole`, which rank 0 has; those of a rank are its tokens by `of`.
fn gather_rows(
    comm: &Comm,
    own: &[u8],
    whole: Option<&mut [u8]>,
    of: &dyn Fn(usize) -> Vec<Range<usize>>,
    row_bytes: usize,
) -> Result<(), RankError> {
    let Some(whole) = whole else { return comm.transfer(&[(0, own)], &mut []) };
    let count = |rank: usize| of(rank).iter().map(Range::len).sum::<usize>();
    let tokens = (0..comm.size()).map(count).sum();
    scatter_rows(whole, own, tokens, &of(0), row_bytes);
    for rank in 1..comm.size() {
        let mut part = vec![0; whole.len() / tokens * count(rank)];
        comm.transfer(&[], &mut [(rank, &mut part)])?;
        scatter_rows(whole, &part, tokens, &of(rank), row_bytes);
    }
    Ok(())
}
