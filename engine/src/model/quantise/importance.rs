//! By what errors of a weight count: the mean square of the input that it is multiplied with (llama.cpp's importance matrix), taken while
//! the model reads a text, or read from a file that llama.cpp's `imatrix` wrote.

use super::fold::input_of;
use super::gguf::Planned;
use super::inputs::read_inputs;
use super::walk::Calibration;
use crate::device::Cpu;
use crate::memory::Arena;
use crate::model::ModelError;
use crate::model::gguf::{MeanSquares, read_importance};
use std::path::Path;

/// What a silent channel counts, of the mean of all.
const SILENT: f64 = 1e-6;

/// Where mean squares come from.
#[derive(Debug, Clone, Copy)]
pub enum Importance<'a> {
    /// The model reads a text.
    Text(Calibration<'a>),
    /// A file of `imatrix`, GGUF or the older list.
    File(&'a Path),
}

impl Importance<'_> {
    /// Those of the matrices of the model at `source`.
    ///
    /// # Errors
    /// When the model or the file cannot be read, or the file is of another model.
    pub(super) fn read(
        self,
        source: &Path,
        planned: &[Planned],
        (cpu, arena): (&Cpu, &Arena),
    ) -> Result<MeanSquares, ModelError> {
        let in_blocks = |own: &str| own.strip_prefix("blk.")?.split_once('.')?.0.parse::<usize>().ok();
        let matrices = planned.iter().filter(|one| one.shape.len() == 2);
        let mut read = match self {
            Importance::Text(text) => {
                let inputs = read_inputs(source, text, cpu, arena)?;
                let squares = |layer: usize, one: &Planned| inputs[layer][input_of(&one.name)].mean_squares();
                matrices.filter_map(|one| Some((one.own.clone(), squares(in_blocks(&one.own)?, one)))).collect()
            }
            Importance::File(path) => {
                let found = read_importance(path)?;
                for one in matrices {
                    let wrong = match (found.get(&one.own), one.shape[1]) {
                        (None, _) if in_blocks(&one.own).is_some() => format!("it has nothing of '{}'", one.own),
                        (Some(squares), width) if squares.len() != width => {
                            format!("'{}' has {} inputs and not {width}", one.own, squares.len())
                        }
                        _ => continue,
                    };
                    let reason = format!("not an importance matrix of this model: {wrong}");
                    return Err(ModelError::Weights { path: path.into(), reason });
                }
                found
            }
        };
        read.values_mut().for_each(|squares| heard(squares));
        Ok(read)
    }
}

/// A channel that the text leaves silent counts a little: another text may not. Where all are silent they count alike.
fn heard(squares: &mut [f32]) {
    let mean = squares.iter().map(|square| f64::from(*square)).sum::<f64>() / squares.len().max(1) as f64;
    if mean == 0.0 {
        return squares.fill(1.0);
    }
    squares.iter_mut().for_each(|square| *square = square.max((SILENT * mean) as f32));
}

#[cfg(test)]
mod tests {
    use super::heard;

    #[test]
    fn silence_by_hand() {
        let mut squares = [12.5, 1.0, 0.0];
        heard(&mut squares);
        assert_eq!(squares, [12.5, 1.0, 4.5e-6]);
        let mut silent = [0.0; 3];
        heard(&mut silent);
        assert_eq!(silent, [1.0; 3]);
    }
}
