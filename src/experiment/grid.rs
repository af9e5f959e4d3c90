//! From an experiment file to its cells.

use super::cell::{Cell, Device};
use super::measure::{Runs, Scope, check_fields};
use super::spec::{Grid, Spec, SpecError};
use crate::policy::{PolicyFile, Registry};
use crate::workload::{FileSource, Knobs, SyntheticSpec};

/// An experiment with its cells and the source of its inputs.
pub struct Experiment {
    /// What the file said.
    pub spec: Spec,
    /// The user's tensors, if the inputs are not synthetic.
    pub file: Option<FileSource>,
    /// The points of all grids, each once, in order.
    pub cells: Vec<Cell>,
}

/// Refuses a file of tensors for a measure that reads none, and several seeds of a file: its tensors are the same for each of them
/// and would count as further draws.
fn check_file(grid: &Grid) -> Result<(), String> {
    match grid.measure.runs() {
        Runs::InComparisons(_) => Err(format!(
            "{} reads no tensors; leave [file] out, or write this grid into another experiment",
            grid.measure.name()
        )),
        Runs::InTrials(_) if grid.seed.0.len() > 1 => Err(format!(
            "seed is {:?}; the tensors of a [file] are the same for every seed, give one (further draws of a policy like random \
             are a grid of their own)",
            grid.seed.0
        )),
        Runs::InTrials(_) => Ok(()),
    }
}

impl Experiment {
    /// Expands the grids for a device, checking every name, shape and budget before anything runs. `origin` stands in
    /// errors.
    ///
    /// # Errors
    /// Names the first value that makes no sense.
    pub fn new(spec: Spec, origin: &str, registry: &Registry, device: Device) -> Result<Self, SpecError> {
        let value = |message: String| SpecError::Value { origin: origin.into(), message };
        let file = match &spec.file {
            Some(file) => Some(FileSource::open(&file.path).map_err(|error| value(error.to_string()))?),
            None => None,
        };
        let workload_hash = match &file {
            Some(file) => file.hash().map_err(|error| value(error.to_string()))?,
            None => hash_of(&spec.synthetic.clone().unwrap_or_default()),
        };
        let mut cells: Vec<Cell> = Vec::new();
        for (index, grid) in spec.grid.iter().enumerate() {
            let context = format!("grid {} ({})", index + 1, grid.measure.name());
            let registry = &with_file(grid, registry).map_err(|message| value(format!("{context}: {message}")))?;
            let scope = Scope { file: file.as_ref(), workload_hash: &workload_hash, registry, device };
            let expanded = check_fields(grid)
                .and_then(|()| if file.is_some() { check_file(grid) } else { Ok(()) })
                .and_then(|()| grid.measure.expand(grid, &scope))
                .and_then(|cells| name_file(grid, registry, cells))
                .and_then(|cells| turn_knobs(grid, &spec, cells))
                .map_err(|message| value(format!("{context}: {message}")))?;
            for cell in expanded {
                if !cells.contains(&cell) {
                    cells.push(cell);
                }
            }
        }
        Ok(Experiment { spec, file, cells })
    }

    /// The synthetic inputs of cells with these knobs.
    pub fn synthetic(&self, knobs: Option<&Knobs>) -> SyntheticSpec {
        synthetic(&self.spec, knobs).expect("checked when the grids were expanded")
    }

    /// The cells that take trials.
    pub fn in_trials(&self) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(|cell| cell.measure.trials().is_some())
    }

    /// The cells that run in comparisons.
    pub fn in_comparisons(&self) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(|cell| cell.measure.comparisons().is_some())
    }

    /// Hash of what is measured and how: runs with the same hash can be resumed and merged.
    pub fn config_hash(&self) -> String {
        let text = serde_json::to_string(&(&self.cells, &self.spec.timing)).expect("cells are plain data");
        blake3::hash(text.as_bytes()).to_hex()[..8].to_string()
    }
}

/// The experiment's synthetic inputs with some of their knobs turned.
fn synthetic(spec: &Spec, knobs: Option<&Knobs>) -> Result<SyntheticSpec, String> {
    let base = spec.synthetic.clone().unwrap_or_default();
    knobs.map_or(Ok(base.clone()), |knobs| knobs.over(&base))
}

fn hash_of(synthetic: &SyntheticSpec) -> String {
    let knobs = serde_json::to_string(synthetic).expect("knobs are plain data");
    blake3::hash(knobs.as_bytes()).to_hex()[..16].to_string()
}

/// Each cell with every setting of the grid's knobs.
fn turn_knobs(grid: &Grid, spec: &Spec, cells: Vec<Cell>) -> Result<Vec<Cell>, String> {
    if grid.knobs.is_empty() {
        return Ok(cells);
    }
    let mut turned = Vec::new();
    for knobs in &grid.knobs.0 {
        let knobs = Some(knobs).filter(|knobs| !knobs.is_empty());
        let workload_hash = hash_of(&synthetic(spec, knobs)?);
        let with = |cell: &Cell| Cell { knobs: knobs.cloned(), workload_hash: workload_hash.clone(), ..cell.clone() };
        turned.extend(cells.iter().map(with));
    }
    Ok(turned)
}

/// A registry that knows the grid's policy file.
fn with_file(grid: &Grid, registry: &Registry) -> Result<Registry, String> {
    match &grid.policy_file {
        Some(path) => {
            let file = PolicyFile::open(path).map_err(|error| format!("policy_file: {error}"))?;
            Ok(registry.clone().with_file(file))
        }
        None => Ok(registry.clone()),
    }
}

/// Names the file of its policy's parameters in each cell, the grid's or one that the policy names itself; refuses a file of
/// the grid that no policy reads.
fn name_file(grid: &Grid, registry: &Registry, mut cells: Vec<Cell>) -> Result<Vec<Cell>, String> {
    let mut is_read = false;
    for cell in &mut cells {
        let policy = cell.policy.as_ref().map(|text| registry.policy(text)).transpose();
        let Some(policy) = policy.map_err(|error| error.to_string())? else { continue };
        let files = policy.parameters.files();
        let of_grid = grid.policy_file.as_deref().filter(|path| files.contains(path));
        is_read |= of_grid.is_some();
        cell.policy_file = of_grid.or(files.first().copied()).map(|path| path.display().to_string());
        cell.policy_file_hash = policy.parameters.hash();
    }
    match &grid.policy_file {
        Some(path) if !is_read => {
            Err(format!("none of the policies reads a tensor of policy_file '{}'; leave it out", path.display()))
        }
        _ => Ok(cells),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{PRESETS, Policy, PolicyEntry};

    #[test]
    fn a_star_is_every_method_and_preset_with_each_budget() {
        let text = "name = \"x\"\n[[grid]]\nmeasure = \"evict\"\nheads = \"2/1\"\nhead_dim = 8\ncontext_tokens = 64\n\
                    policy = \"*\"\nbudget = [16, 32]\n";
        let own = PolicyEntry { name: "own", about: "", paper: "", parameters: &[], build: |_, _| Ok(Policy::full()) };
        let registry = Registry::default().with(own);
        let spec = Spec::parse(text, "x.toml").unwrap();
        let experiment = Experiment::new(spec, "x.toml", &registry, Device::Cpu).unwrap();
        let policies: Vec<&str> = experiment.cells.iter().filter_map(|cell| cell.policy.as_deref()).collect();
        let count = |name: &str| policies.iter().filter(|policy| **policy == name).count();
        for name in registry.entries().iter().map(|entry| entry.name).chain(PRESETS.iter().map(|preset| preset.name)) {
            let expected = match registry.policy(name).unwrap() {
                policy if policy.parameters.missing().is_some() || policy.reconstruction.is_some() => 0,
                _ if name == "full" => 1,
                _ => 2,
            };
            assert_eq!(count(name), expected, "{name}");
        }
        assert_eq!(count("own"), 2);
    }
}
