use super::{Choice, Comparisons, Measurement, Runs, Scope, Stage, pass};
use crate::attention::kernel;
use crate::experiment::cell::Cell;
use crate::experiment::record::{Memory, Record, Status};
use crate::experiment::spec::Grid;

/// The scratch memory of kernels, from their formulas alone: nothing is allocated, so any context can be asked for.
pub(super) struct Scratch;

impl Measurement for Scratch {
    fn name(&self) -> &'static str {
        "scratch"
    }

    fn about(&self) -> &'static str {
        "scratch memory of a forward pass, by the kernels' formulas"
    }

    fn fields(&self) -> &'static [&'static str] {
        &["kernel", "context_tokens", "heads", "head_dim", "batch", "dtype", "causal", "window", "softcap"]
    }

    fn compares(&self) -> Choice {
        Choice::Kernel
    }

    fn expand(&self, grid: &Grid, scope: &Scope<'_>) -> Result<Vec<Cell>, String> {
        pass::expand(grid, scope, "tiled", 0)
    }

    fn runs(&self) -> Runs<'_> {
        Runs::InComparisons(self)
    }
}

impl Comparisons for Scratch {
    fn run(&self, records: Vec<Record>, stage: &Stage<'_>, each: &mut dyn FnMut(&Cell, f64)) -> Vec<Record> {
        let run = |record: Record| {
            each(&record.cell, 0.0);
            let cell = &record.cell;
            match kernel(&cell.kernel) {
                Ok(kernel) => {
                    let threads = stage.engine.cpu().threads();
                    let size = kernel.workspace(&cell.shape(), &cell.params(), cell.dtype, threads);
                    Record { memory: Some(Memory { workspace_bytes: size.bytes(), ..Memory::default() }), ..record }
                }
                Err(error) => Record { status: Status::Failed, reason: Some(error.to_string()), ..record },
            }
        };
        records.into_iter().map(run).collect()
    }
}
