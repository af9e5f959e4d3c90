//! What kvsieve itself takes to run a scenario's model on a CPU: the sizes that its own code allocates, to the byte.
//!
//! The other terms of a plan are formulas for engines on GPUs. These are no formulas beside the code but the code's own:
//! the workspace of the kernel, the pages of the cache, the buffers of the decoder ([`crate::model::bytes`]).

use super::PlanError;
use super::scenario::{Attention, Scenario};
use super::source::Source;
use crate::memory::Arena;
use crate::model::{Model, Setup, bytes};

/// Peak of the arena when kvsieve reads the prompts and decodes the outputs of a scenario on `threads` threads; `None` where
/// the model is none that kvsieve can run, or the scenario asks for what kvsieve does not run: other formats than it has,
/// eviction, several cards.
///
/// # Errors
/// When there is no such kernel, which the tests hold.
pub fn own_peak_bytes(scenario: &Scenario<'_>, threads: usize) -> Result<Option<u64>, PlanError> {
    let Source::Tensors(folder) = &scenario.subject.source else { return Ok(None) };
    let super::kv::KvStore::Own(kv_format) = scenario.kv else { return Ok(None) };
    let elsewhere = scenario.tensor_parallel * scenario.pipeline > 1 || scenario.offload > 0;
    if elsewhere || scenario.eviction.is_some() || scenario.weights.is_some() {
        return Ok(None);
    }
    let Ok(model) = Model::open(folder, &Arena::unlimited()) else { return Ok(None) };
    let dtype = model.weights.dtype();
    let (prompt, output) = (scenario.context as usize, scenario.output as usize);
    let setup = Setup {
        kernel: if scenario.attention == Attention::Tiled { "tiled" } else { "naive" },
        batch: scenario.batch as usize,
        max_tokens: prompt + output,
        chunk_tokens: scenario.pass_tokens(scenario.context) as usize,
        all_logits: scenario.logits == super::scenario::Logits::All,
        dtype,
        kv_format,
        columns: &[],
    };
    Ok(Some(bytes(&model, &setup, &vec![prompt; setup.batch], output, threads)?))
}
