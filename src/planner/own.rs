//! What kvsieve itself takes to run a scenario's model on a CPU: the sizes that its own code allocates, to the byte.
//!
//! The other terms of a plan are formulas for engines on GPUs. These are no formulas beside the code but the code's own:
//! the workspace of the kernel, the pages of the cache, the buffers of the decoder ([`crate::model::bytes_unopened`]).

use super::PlanError;
use super::kv::KvStore;
use super::scenario::{Attention, Logits, Scenario};
use super::source::Source;
use crate::format::RowFormat;
use crate::memory::LabelBytes;
use crate::model::{Config, Setup, bytes_unopened, gguf_tensors, packed_bytes, tensor_files};
use crate::tensor::DType;
use crate::tensor::file::{Entry, TensorFile, read_as};
use std::fmt;
use std::path::Path;

/// A scenario that kvsieve can run.
pub(super) struct Own<'a> {
    /// The model's files.
    pub folder: &'a Path,
    /// How its matrices are kept, where that is not as in the files.
    pub format: Option<RowFormat>,
    scenario: &'a Scenario<'a>,
}

impl<'a> Own<'a> {
    /// # Errors
    /// When the model has no files, or the scenario asks for what kvsieve does not run: other formats than it has, eviction,
    /// several cards, prompts that are read while others wait.
    pub fn of(scenario: &'a Scenario<'a>) -> Result<Self, PlanError> {
        let wrong = |what, value: &dyn fmt::Display, expected: &str| {
            Err(PlanError::Value { what, value: value.to_string(), expected: expected.into() })
        };
        let Source::Tensors(folder) = &scenario.subject.source else {
            return wrong("--model", &scenario.subject.name, "kvsieve runs a folder or a GGUF file");
        };
        let one = "kvsieve runs on one CPU; leave it out";
        for (what, count) in [("--tensor-parallel", scenario.tensor_parallel), ("--pipeline", scenario.pipeline)] {
            if count > 1 {
                return wrong(what, &count, one);
            }
        }
        if scenario.offload > 0 {
            return wrong("--offload-layers", &scenario.offload, one);
        }
        if scenario.held() > scenario.batch {
            return wrong(
                "--concurrency",
                &scenario.concurrency,
                "all prompts are read together; give --batch instead",
            );
        }
        if let Some(eviction) = &scenario.eviction {
            return wrong("--policy", &eviction.name, "what is measured is a run without eviction; leave it out");
        }
        let KvStore::Own(_) = scenario.kv else {
            return wrong("--kv-format", &scenario.kv, "it must be one of `kvsieve list formats`");
        };
        let format = match scenario.weights.map(|format| (format, format.name.parse())) {
            None => None,
            Some((_, Ok(format))) => Some(format),
            Some((format, Err(_))) => {
                return wrong("--weights", &format.name, "it must be one of `kvsieve list formats`");
            }
        };
        Ok(Own { folder, format, scenario })
    }

    /// How a model is run whose plain matrices are `dtype`.
    pub fn setup(&self, dtype: DType) -> Setup<'static> {
        let scenario = self.scenario;
        let KvStore::Own(kv_format) = scenario.kv else { unreachable!("checked when made") };
        Setup {
            kernel: if scenario.attention == Attention::Tiled { "tiled" } else { "naive" },
            batch: scenario.batch as usize,
            chunk_tokens: scenario.run_chunk() as usize,
            all_logits: scenario.logits == Logits::All,
            kv_format,
            ..Setup::of((scenario.context + scenario.output) as usize, dtype)
        }
    }

    /// Name, shape and format of each tensor; `None` where one is of a type that kvsieve does not run.
    fn tensors(&self) -> Option<Vec<(String, Vec<usize>, RowFormat)>> {
        if self.folder.is_dir() {
            let files = tensor_files(self.folder).ok()?;
            let entries = files.iter().map(TensorFile::entries).collect::<Result<Vec<_>, _>>().ok()?;
            let tensor = |entry: Entry| Some((entry.name, entry.shape, RowFormat::plain(read_as(entry.dtype)?)));
            return entries.into_iter().flatten().map(tensor).collect();
        }
        let (_, tensors) = gguf_tensors(self.folder).ok()?;
        tensors.into_iter().map(|tensor| Some((tensor.name.clone(), tensor.shape.clone(), tensor.format()?))).collect()
    }

    /// Bytes of weights once they are loaded, matrices as in the files or in the format and vectors in f32; and the element type
    /// of the embedding, f32 where it is quantised.
    pub fn weights(&self) -> Option<(u64, DType)> {
        let config = Config::read(self.folder).ok().filter(|config| config.packing.is_some());
        if let Some(config) = config {
            return packed_bytes(self.folder, &config, self.format).ok();
        }
        let tensors = self.tensors()?;
        let bytes = |(_, shape, format): &(String, Vec<usize>, RowFormat)| match shape[..] {
            [rows, width] => rows * self.format.unwrap_or(*format).row_bytes(width),
            _ => 4 * shape.iter().product::<usize>(),
        };
        let is_embedding = |name: &str| name.ends_with("embed_tokens.weight") || name == "token_embd.weight";
        let (.., format) = tensors.iter().find(|(name, ..)| is_embedding(name))?;
        Some((tensors.iter().map(bytes).sum::<usize>() as u64, format.dtype().unwrap_or(DType::F32)))
    }

    /// Most bytes of its arena, all together and by label, with nothing but headers read; `None` where kvsieve cannot run it.
    ///
    /// # Errors
    /// When there is no such kernel, which the tests hold.
    pub fn bytes(&self, threads: usize) -> Result<Option<(u64, LabelBytes)>, PlanError> {
        let Some(((weights, dtype), config)) = self.weights().zip(Config::read(self.folder).ok()) else {
            return Ok(None);
        };
        let (setup, scenario) = (self.setup(dtype), self.scenario);
        let prompts = vec![scenario.context as usize; setup.batch];
        Ok(Some(bytes_unopened(&config, weights, &setup, &prompts, scenario.output as usize, threads)?))
    }
}

/// Peak of the arena when kvsieve reads the prompts and decodes the outputs of a scenario on `threads` threads; `None` where
/// it cannot.
///
/// # Errors
/// When there is no such kernel, which the tests hold.
pub fn own_peak_bytes(scenario: &Scenario<'_>, threads: usize) -> Result<Option<u64>, PlanError> {
    match Own::of(scenario) {
        Ok(own) => Ok(own.bytes(threads)?.map(|(peak, _)| peak)),
        Err(_) => Ok(None),
    }
}
