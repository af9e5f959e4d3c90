//! What the commands that run a model share: which model, which policy, and how keys and values are kept.

use super::Compute;
use super::failure::Failure;
use super::output;
use super::policy::{self, Built, FileArg, Used};
use crate::attention::{self, cuda::cuda_kernel};
use crate::device::Cpu;
use crate::device::cuda::Runtime;
use crate::format::{GpuRows, KvFormat, RowFormat};
use crate::memories::{Memory, memory};
use crate::memory::Arena;
use crate::model::{Decoder, Eviction, Model, Repeat, Setup, Text, locate};
use crate::policy::{Budget, Policy, Registry};
use crate::tensor::DType;
use crate::train::sensitivity;
use std::path::{Path, PathBuf};

/// The options of every command that runs a model.
#[derive(clap::Args)]
pub struct ModelArgs {
    /// Hugging Face folder (config.json, safetensors in one file or shards, tokenizer.json), a GGUF file, or 'builtin'
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Tokens that go through the model together
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub chunk: usize,
    /// Kernel of attention where several tokens go through together, perhaps with parameters (see `kvsieve list kernels`)
    #[arg(long, value_name = "KERNEL", default_value = "tiled")]
    pub kernel: String,
    /// Element type of the pass, and of keys and values in the cache: f32, bf16 or f16 [default: that of the weights]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<DType>,
    /// How the cache keeps keys and values: a format, or k=FORMAT,v=FORMAT (see `kvsieve list formats`) [default: as --dtype]
    #[arg(long, value_name = "FORMAT")]
    pub kv_format: Option<KvFormat>,
    /// How weight matrices are kept: a format (see `kvsieve list formats`) [default: as in their file]
    #[arg(long, value_name = "FORMAT")]
    pub weights: Option<RowFormat>,
    /// What activations are rounded to before each linear layer: a format (see `kvsieve list formats`); int8 beside --weights int8
    /// is W8A8 [default: nothing]
    #[arg(long, value_name = "FORMAT")]
    pub activations: Option<RowFormat>,
    /// Run sequences that are longer than the model was made for
    #[arg(long)]
    pub beyond_limit: bool,
    /// Eviction policy, perhaps with parameters (see `kvsieve list policies`) [default: nothing is evicted]
    #[arg(long, value_name = "POLICY", help_heading = "What is evicted")]
    pub policy: Option<String>,
    #[command(flatten)]
    pub file: FileArg,
    /// What may stay: a fraction (0.25), tokens per KV head (512) or bytes of all layers (64MiB)
    #[arg(long, value_name = "BUDGET", requires = "policy")]
    #[arg(help_heading = "What is evicted")]
    pub budget: Option<String>,
    /// What attention reads in place of the cache, perhaps with parameters (see `kvsieve list memories`) [default: the cache]
    #[arg(long, value_name = "MEMORY", conflicts_with_all = ["policy", "kv_format", "budget", "policy_file"])]
    pub memory: Option<String>,
    /// Seed of what is drawn; it changes nothing where nothing is
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    pub compute: Compute,
    /// Write the measurements as JSON instead of the summary, to standard output (-) or a file
    #[arg(long, value_name = "-|FILE", help_heading = "What is reported")]
    pub json: Option<PathBuf>,
}

/// A model, opened, and what it is to be run with.
pub struct Opened {
    pub model: Model,
    pub policy: Option<Policy>,
    pub policy_file: Option<Used>,
    pub budget: Option<Budget>,
    /// The words with which the model repeats its context, where the policy looks at that.
    pub repeat: Option<Repeat>,
    pub memory: Option<Box<dyn Memory>>,
    pub cpu: Cpu,
    pub arena: Arena,
}

/// As [`Opened`], for a GPU.
pub struct OnCuda {
    pub runtime: Runtime,
    /// The arena counts the GPU's memory, and the CPU divides budgets.
    pub opened: Opened,
}

impl ModelArgs {
    /// What is read, with its options, for checks of what is written.
    pub fn reads(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        [("--model", self.model.as_path())].into_iter().chain(self.file.read())
    }

    /// Reads names and files, names first.
    pub fn open(&self, registry: &Registry) -> Result<Opened, Failure> {
        let (built, budget) = self.asked(registry)?;
        let (policy, used) = built.unzip();
        let memory = self.memory.as_deref().map(memory).transpose()?;
        attention::kernel(&self.kernel)?;
        let cpu = self.compute.cpu()?;
        let arena = Arena::with_limit(self.compute.limit_bytes());
        let folder = locate(&self.model)?;
        let model = Model::open_in(&folder, self.weights, &arena)?;
        let repeats = policy.as_ref().is_some_and(|policy| policy.reconstruction.is_some());
        let repeat =
            if repeats { Some(Repeat::new(&folder, &self.text()?)?.with_gradients(sensitivity)) } else { None };
        Ok(Opened { model, policy, policy_file: used.flatten(), budget, repeat, memory, cpu, arena })
    }

    /// As [`ModelArgs::open`], for GPU `index`.
    pub fn open_on_cuda(&self, index: usize, registry: &Registry) -> Result<OnCuda, Failure> {
        let (built, budget) = self.asked(registry)?;
        let (policy, used) = built.unzip();
        if let Some(memory) = &self.memory {
            return Err(Failure::usage(format!("memory '{memory}' is at work on the CPU only; leave --device out")));
        }
        cuda_kernel(&self.kernel)?;
        if let Some(format) = self.weights.filter(|format| format.dtype().is_none()) {
            return Err(Failure::usage(format!("no kernel for GPUs reads weights in {format}; use --device cpu")));
        }
        if let Some(format) = self.activations.and_then(RowFormat::rounding) {
            return Err(Failure::usage(format!(
                "activations are rounded to {format} on the CPU only; leave --device out"
            )));
        }
        let runtime = Runtime::open(index, self.compute.nvrtc.as_deref())?;
        let arena = Arena::with_limit(self.compute.limit_memory.unwrap_or(runtime.device().free_bytes()));
        // The mapped files are not what is measured.
        let model = Model::open_in(&locate(&self.model)?, self.weights, &Arena::unlimited())?;
        let dtype = self.dtype.unwrap_or(model.weights.dtype());
        if let Some(format) = self.kv_format {
            GpuRows::new(dtype, format).map_err(Failure::usage)?;
            format.check(model.config.head_dim, usize::MAX)?;
        }
        let cpu = Cpu::new(self.compute.threads)?;
        Ok(OnCuda {
            runtime,
            opened: Opened {
                model,
                policy,
                policy_file: used.flatten(),
                budget,
                repeat: None,
                memory: None,
                cpu,
                arena,
            },
        })
    }

    /// What is to be evicted, by names that are checked.
    fn asked(&self, registry: &Registry) -> Result<(Option<Built>, Option<Budget>), Failure> {
        if self.chunk == 0 {
            return Err(Failure::usage("--chunk is 0; at least one token goes through the model".into()));
        }
        let built = self.policy.as_deref().map(|text| self.file.policy(text, registry)).transpose()?;
        let Some((policy, used)) = built else { return Ok((None, None)) };
        let name = self.policy.as_deref().unwrap_or_default();
        let budget = policy::budget(&policy, name, self.budget.as_deref())?;
        Ok((Some((policy, used)), budget))
    }

    /// The model's tokenizer.
    pub fn text(&self) -> Result<Text, Failure> {
        Ok(Text::open(&locate(&self.model)?)?)
    }

    /// How the model is run on `batch` sequences of at most `max_tokens` tokens.
    pub fn setup(
        &self,
        opened: &Opened,
        batch: usize,
        max_tokens: usize,
        all_logits: bool,
    ) -> Result<Setup<'_>, Failure> {
        let more_tokens = self.eviction(opened).map_or(0, |eviction| eviction.more_tokens(max_tokens));
        let max_tokens = max_tokens + more_tokens;
        if !self.beyond_limit {
            opened.model.check_length(max_tokens)?;
            opened.memory.as_ref().map_or(Ok(()), |memory| opened.model.config.check_memory(&**memory))?;
        }
        let dtype = self.dtype.unwrap_or(opened.model.weights.dtype());
        Ok(Setup {
            kernel: &self.kernel,
            batch,
            chunk_tokens: self.chunk.min(max_tokens),
            all_logits,
            activations: self.activations.and_then(RowFormat::rounding),
            kv_format: self.kv_format.unwrap_or(dtype.into()),
            columns: opened.policy.as_ref().map_or(&[], Policy::columns),
            ..Setup::of(max_tokens, dtype)
        })
    }

    /// The model with its cache, or with a memory in its place.
    pub fn decoder<'a>(&'a self, opened: &'a Opened, setup: Setup<'a>) -> Result<Decoder<'a>, Failure> {
        let Opened { model, memory, cpu, arena, .. } = opened;
        Ok(match memory {
            Some(memory) => Decoder::with_memory(model, setup, &**memory, cpu, arena)?,
            None => Decoder::new(model, setup, cpu, arena)?,
        })
    }

    /// What is to be known of an eviction of contexts of these lengths, each thing once; also printed.
    pub fn warnings(&self, opened: &Opened, setup: &Setup<'_>, contexts: &[usize]) -> Vec<String> {
        let Some(eviction) = self.eviction(opened) else { return Vec::new() };
        let of = |&context: &usize| eviction.warnings(&opened.model.config, context, setup.kv_format);
        let mut warnings: Vec<String> = contexts.iter().flat_map(of).collect();
        warnings.sort();
        warnings.dedup();
        output::warn(&warnings);
        warnings
    }

    /// What is asked of the policy, if there is one.
    pub fn eviction<'a>(&'a self, opened: &'a Opened) -> Option<Eviction<'a>> {
        let (policy, name) = (opened.policy.as_ref()?, self.policy.as_deref()?);
        Some(Eviction { policy, name, budget: opened.budget, seed: self.seed, repeat: opened.repeat.as_ref() })
    }
}
