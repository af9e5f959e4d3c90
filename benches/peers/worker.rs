//! kvsieve's side of `compare.py` and `models.py`: one request per line of JSON on stdin, one answer per line on stdout.
//!
//! A request names a pass and a problem and asks for one sample: calls until `min_ns` have passed. Problems stay
//! prepared between requests, so that the two sides of a comparison can take turns and only the passes are timed.

#[path = "../../tests/common/mod.rs"]
mod common;
mod decoder;

use common::accuracy::{Checked, Described};
use common::{Problem, grad_o, inputs};
use kvsieve::attention::{Backward, DenseKv, Forward, Gradients, Inputs, Kernel, Outputs, Workspace, kernel};
use kvsieve::device::{Cpu, cpu::CpuInfo, probe};
use kvsieve::memory::Arena;
use kvsieve::tensor::Tensor;
use kvsieve::tensor::file::{self, Output};
use safetensors::Dtype;
use serde::Deserialize;
use serde_json::{Value, json};
use std::error::Error;
use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

type Answer = Result<Value, Box<dyn Error>>;

/// Prepared problems that are kept: the two that a comparison of kvsieve with itself takes in turn.
const KEPT: usize = 2;

#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
enum Request {
    /// What this build runs on.
    Info,
    /// A ceiling of the machine, per second; null where this CPU or build has none.
    Probe {
        ceiling: Ceiling,
        threads: usize,
    },
    /// Writes seeded `q`, `k`, `v`, and in f64 the rows `at` of the result, to a safetensors file.
    Inputs {
        #[serde(flatten)]
        problem: Described,
        seed: u64,
        path: PathBuf,
    },
    /// Relative L2 error of a kernel over the same rows.
    Error {
        #[serde(flatten)]
        problem: Described,
        seed: u64,
        kernel: String,
    },
    Forward(Sample),
    Decode(Sample),
    Naive(Sample),
    Backward(Sample),
    /// A prompt and steps through a whole model.
    Generate(decoder::Request),
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Ceiling {
    Fma,
    Bf16,
    Read,
}

#[derive(Deserialize)]
struct Sample {
    #[serde(flatten)]
    problem: Described,
    threads: usize,
    min_ns: u64,
    /// Keys and values are copied until they fill this many bytes, and calls go round the copies: caches stay cold.
    #[serde(default)]
    rotate_bytes: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::args().nth(1).as_deref() != Some("serve") {
        println!("peer_worker is driven by compare.py and models.py in benches/peers; alone it does nothing");
        return Ok(());
    }
    let mut bench = Bench { prepared: Vec::new(), open: None };
    for line in std::io::stdin().lock().lines() {
        let answer = bench.answer(&line?).unwrap_or_else(|error| json!({ "error": error.to_string() }));
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

struct Bench {
    prepared: Vec<Prepared>,
    open: Option<decoder::Open>,
}

impl Bench {
    fn answer(&mut self, line: &str) -> Answer {
        match serde_json::from_str(line)? {
            Request::Info => info(),
            Request::Probe { ceiling, threads } => {
                Ok(json!({ "per_second": per_second(ceiling, &Cpu::new(Some(threads))?) }))
            }
            Request::Inputs { problem, seed, path } => write_inputs(&problem, seed, &path),
            Request::Error { problem, seed, kernel: name } => {
                kernel(&name)?;
                Ok(json!({ "error_l2": Checked::new(problem.problem()?, seed).error(&name) }))
            }
            Request::Forward(sample) => self.sample("tiled", false, &sample),
            Request::Decode(sample) => self.sample("decode", false, &sample),
            Request::Naive(sample) => self.sample("naive", false, &sample),
            Request::Backward(sample) => self.sample("tiled", true, &sample),
            Request::Generate(request) => decoder::run(&mut self.open, &request),
        }
    }

    fn sample(&mut self, kernel: &'static str, backward: bool, sample: &Sample) -> Answer {
        let key = Key { kernel, backward, problem: sample.problem, threads: sample.threads };
        let prepared = match self.prepared.iter().position(|prepared| prepared.key == key) {
            Some(index) => &mut self.prepared[index],
            None => {
                self.prepared.drain(..(self.prepared.len() + 1).saturating_sub(KEPT));
                self.prepared.push(Prepared::new(key, sample.rotate_bytes)?);
                self.prepared.last_mut().expect("one was just added")
            }
        };
        prepared.sample(Duration::from_nanos(sample.min_ns))
    }
}

fn info() -> Answer {
    let cpu = CpuInfo::probe();
    Ok(json!({ "model": cpu.model, "cores": cpu.cores, "isa": cpu.isa, "isa_path": Cpu::new(Some(1))?.isa().name() }))
}

fn per_second(ceiling: Ceiling, cpu: &Cpu) -> Option<f64> {
    match ceiling {
        Ceiling::Fma => Some(probe::fma_flops(cpu)),
        Ceiling::Bf16 => probe::bf16_dot_flops(cpu),
        Ceiling::Read => Some(probe::read_bytes(cpu)),
    }
}

fn write_inputs(problem: &Described, seed: u64, path: &std::path::Path) -> Answer {
    let checked = Checked::new(problem.problem()?, seed);
    let rows: Vec<f64> = checked.expected.iter().flat_map(|row| row.o.iter().copied()).collect();
    let at: Vec<i64> = checked.at.iter().flatten().map(|&index| index as i64).collect();
    let o = Output {
        name: "o",
        dtype: Dtype::F64,
        shape: vec![checked.at.len(), problem.head_dim],
        bytes: bytemuck::cast_slice(&rows),
    };
    let Inputs { q, k, v } = &checked.inputs;
    let [q, k, v] = [("q", q), ("k", k), ("v", v)].map(|(name, tensor)| Output::tensor(name, tensor));
    file::write(path, &[q, k, v, o, Output::i64("at", vec![checked.at.len(), 3], &at)])?;
    Ok(json!({ "rows": checked.at.len() }))
}

/// What tells prepared problems apart.
#[derive(PartialEq)]
struct Key {
    kernel: &'static str,
    backward: bool,
    problem: Described,
    threads: usize,
}

/// Everything that the calls of a sample read and write.
struct Prepared {
    key: Key,
    problem: Problem,
    kernel: Box<dyn Kernel>,
    cpu: Cpu,
    /// Copies of the inputs; `next` is the one for the next call.
    copies: Vec<Inputs>,
    next: usize,
    outputs: Outputs,
    workspace: Workspace,
    backward: Option<BackwardPart>,
}

struct BackwardPart {
    grad_o: Tensor,
    gradients: Gradients,
    workspace: Workspace,
}

impl Prepared {
    fn new(key: Key, rotate_bytes: u64) -> Result<Self, Box<dyn Error>> {
        let (problem, kernel, cpu) = (key.problem.problem()?, kernel(key.kernel)?, Cpu::new(Some(key.threads))?);
        let Problem { shape, params, dtype } = problem;
        let arena = Arena::unlimited();
        let copies = rotate_bytes.div_ceil(kv_bytes(&problem)).max(1);
        let workspace = kernel.workspace(&shape, &params, dtype, cpu.threads()).allocate(&arena)?;
        let backward = key.backward.then(|| BackwardPart::new(&*kernel, &problem, &cpu, &arena)).transpose()?;
        let mut prepared = Prepared {
            problem,
            copies: (0..copies).map(|seed| inputs(&problem, seed)).collect(),
            next: 0,
            outputs: Outputs::allocate(&arena, &shape, dtype)?,
            workspace,
            backward,
            kernel,
            cpu,
            key,
        };
        prepared.forward()?;
        if prepared.key.backward {
            prepared.backward()?;
        }
        Ok(prepared)
    }

    fn sample(&mut self, least: Duration) -> Answer {
        let (mut calls, start) = (0u32, Instant::now());
        while calls == 0 || start.elapsed() < least {
            if self.key.backward {
                self.backward()?
            } else {
                self.forward()?
            }
            calls += 1;
        }
        let ns = start.elapsed().as_nanos() as f64 / f64::from(calls);
        let forward_flops = self.problem.shape.flops(&self.problem.params);
        let flops = if self.key.backward { forward_flops * 5 / 2 } else { forward_flops };
        Ok(json!({ "ns": ns, "calls": calls, "flops": flops, "kv_bytes": kv_bytes(&self.problem) }))
    }

    fn forward(&mut self) -> Result<(), Box<dyn Error>> {
        let inputs = &self.copies[self.next];
        self.next = (self.next + 1) % self.copies.len();
        let kv = DenseKv::new(inputs.k.view(), inputs.v.view())?;
        let Problem { shape, params, .. } = self.problem;
        let call = Forward { shape, params, q: inputs.q.view(), kv: &kv, cpu: &self.cpu };
        Ok(self.kernel.forward(&call, &mut self.outputs, &mut self.workspace)?)
    }

    /// The backward pass alone, from the outputs of the forward pass that was run when the problem was prepared.
    fn backward(&mut self) -> Result<(), Box<dyn Error>> {
        let Some(part) = &mut self.backward else { return Ok(()) };
        let inputs = &self.copies[0];
        let kv = DenseKv::new(inputs.k.view(), inputs.v.view())?;
        let Problem { shape, params, .. } = self.problem;
        let forward = Forward { shape, params, q: inputs.q.view(), kv: &kv, cpu: &self.cpu };
        let (o, lse) = (self.outputs.o.view(), &self.outputs.lse);
        let call = Backward { forward, o, lse, grad_o: part.grad_o.view() };
        Ok(self.kernel.backward(&call, &mut part.gradients, &mut part.workspace)?)
    }
}

impl BackwardPart {
    fn new(kernel: &dyn Kernel, problem: &Problem, cpu: &Cpu, arena: &Arena) -> Result<Self, Box<dyn Error>> {
        let Problem { shape, params, dtype } = *problem;
        let size = kernel
            .backward_workspace(&shape, &params, problem.dtype, cpu.threads())
            .ok_or("this kernel has no backward pass")?;
        let gradients = Gradients::allocate(arena, &shape, dtype)?;
        Ok(BackwardPart { grad_o: grad_o(problem, 0), gradients, workspace: size.allocate(arena)? })
    }
}

/// Bytes of the keys and values, each counted once.
fn kv_bytes(problem: &Problem) -> u64 {
    2 * Tensor::bytes_of(problem.dtype, problem.shape.kv_dims())
}
