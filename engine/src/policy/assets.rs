//! What a policy reads from a file of its own: the weights of learned gates, calibrated filters.
//!
//! A [`PolicyFile`] is a safetensors file with its hash. A registry that was given one hands it, as [`Assets`], to
//! whatever it builds; which tensors were read, and by which axes, stays with the policy as its [`Parameters`], so that a
//! model of other extents is refused before anything runs. Elements are widened to f32 as they are read.

use super::{Policy, PolicyError};
use crate::memory::{Arena, ArenaError, Claim, Label};
use crate::tensor::file::{Entry, FileError, TensorFile, read_as};
use std::path::{Path, PathBuf};

/// A policy's file, mapped.
pub struct PolicyFile {
    file: TensorFile,
    hash: String,
}

impl PolicyFile {
    /// Maps a file, checks its header, and hashes it.
    ///
    /// # Errors
    /// When it cannot be read or is not a safetensors file.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let file = TensorFile::open(path)?;
        let hash = file.hash();
        Ok(PolicyFile { file, hash })
    }

    /// BLAKE3 hash of the whole file, in hexadecimal.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// A text of its metadata.
    fn metadata(&self, key: &str) -> Option<String> {
        self.file.metadata(key)
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.file.has(name)
    }
}

/// What an axis of a tensor counts, and so what a model must have as many of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Layers of the model.
    Layers,
    /// Query heads of a layer.
    QHeads,
    /// KV heads of a layer.
    KvHeads,
    /// Elements of a head.
    HeadDim,
    /// Pairs of elements that RoPE turns together: half of a head.
    RopePairs,
    /// Elements of a hidden state.
    Hidden,
    /// Elements of a gate's inner layer, of which a model has none.
    Inner,
}

impl Axis {
    fn name(self) -> &'static str {
        match self {
            Axis::Layers => "layers",
            Axis::QHeads => "query heads",
            Axis::KvHeads => "KV heads",
            Axis::HeadDim => "head dim",
            Axis::RopePairs => "RoPE pairs",
            Axis::Hidden => "hidden",
            Axis::Inner => "inner elements",
        }
    }
}

/// A tensor that was read.
#[derive(Debug, Clone)]
pub struct Learned {
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Learned {
    /// `values` of this shape.
    pub(super) fn new(shape: &[usize], values: Vec<f32>) -> Self {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "{shape:?}");
        Learned { shape: shape.to_vec(), values }
    }

    /// What lies at `outer`, indices of the first axes.
    ///
    /// # Panics
    /// When an index is out of its axis.
    pub fn at(&self, outer: &[usize]) -> &[f32] {
        let (axes, inner) = self.shape.split_at(outer.len());
        let flat = outer.iter().zip(axes).fold(0, |flat, (&index, &axis)| {
            assert!(index < axis, "{outer:?} in {:?}", self.shape);
            flat * axis + index
        });
        let len: usize = inner.iter().product();
        &self.values[flat * len..][..len]
    }

    /// Every element, in order.
    pub fn values(&self) -> &[f32] {
        &self.values
    }
}

/// Which tensors a policy was built from.
#[derive(Debug, Clone, Default)]
pub struct Parameters {
    tensors: Vec<Read>,
    /// A tensor that is needed, where there is no file.
    missing: Option<&'static str>,
}

/// A tensor that was read.
#[derive(Debug, Clone)]
struct Read {
    path: PathBuf,
    /// Of the file.
    hash: String,
    /// Fingerprint of the model that the file was trained on, where it says so.
    base: Option<String>,
    name: &'static str,
    shape: Vec<usize>,
    axes: Vec<Axis>,
}

impl Read {
    /// Refuses another number of axes, or extents other than those `known`.
    fn check(&self, known: &[(Axis, usize)]) -> Result<(), PolicyError> {
        let of = |axis: &Axis| known.iter().find(|(other, _)| other == axis).map(|&(_, extent)| extent);
        let fits = |(axis, &found): (&Axis, &usize)| of(axis).is_none_or(|extent| extent == found);
        if self.axes.len() == self.shape.len() && self.axes.iter().zip(&self.shape).all(fits) {
            return Ok(());
        }
        let say = |axis: &Axis| of(axis).map_or(axis.name().into(), |extent| format!("{} = {extent}", axis.name()));
        let expected = format!("[{}]", self.axes.iter().map(say).collect::<Vec<_>>().join(", "));
        let (path, name, found) = (self.path.clone(), self.name.into(), self.shape.clone());
        Err(FileError::Shape { path, name, found, expected }.into())
    }
}

impl Parameters {
    /// Whether the policy was built without a tensor of a file.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// A tensor that the policy needs, where it was given no file.
    pub fn missing(&self) -> Option<&'static str> {
        self.missing
    }

    /// The files that tensors were read from, each once, in the order of their reading.
    pub fn files(&self) -> Vec<&Path> {
        let mut files: Vec<&Path> = Vec::new();
        for read in &self.tensors {
            if !files.contains(&&*read.path) {
                files.push(&read.path);
            }
        }
        files
    }

    /// What is known of the contents of these files: the hash of the one, or one of the hashes of several.
    pub fn hash(&self) -> Option<String> {
        let mut hashes: Vec<&str> = self.tensors.iter().map(|read| &*read.hash).collect();
        hashes.dedup();
        match &hashes[..] {
            [] => None,
            [one] => Some(one.to_string()),
            several => Some(blake3::hash(several.concat().as_bytes()).to_hex().to_string()),
        }
    }

    /// How long an axis is, where one of the tensors has it.
    pub fn extent(&self, axis: Axis) -> Option<usize> {
        self.extents().find(|(known, _)| *known == axis).map(|(_, extent)| extent)
    }

    fn extents(&self) -> impl Iterator<Item = (Axis, usize)> {
        self.tensors.iter().flat_map(|read| read.axes.iter().copied().zip(read.shape.iter().copied()))
    }

    /// Counts them under `policy`, for as long as the claim is held.
    ///
    /// # Errors
    /// When the arena has no room.
    pub fn claim(&self, arena: &Arena) -> Result<Claim, ArenaError> {
        let elements: usize = self.tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
        arena.claim(Label::Policy, 4 * elements as u64)
    }
}

impl Policy {
    /// Refuses a policy that lacks its file, or whose parameters are of other extents than what it is to work on. An axis
    /// that `extents` does not name may be as long as it likes. `name` stands in errors.
    ///
    /// # Errors
    /// In one line: the tensor, its shape, and the shape that would be right.
    pub fn check_parameters(&self, name: &str, extents: &[(Axis, usize)]) -> Result<(), PolicyError> {
        if let Some(tensor) = self.parameters.missing {
            let reason =
                format!("it reads '{tensor}' of a policy file; give --policy-file, in an experiment policy_file");
            return Err(PolicyError::Combination { policy: name.into(), reason });
        }
        self.parameters.tensors.iter().try_for_each(|tensor| tensor.check(extents))
    }
}

impl Policy {
    /// Refuses parameters that were trained on another model than that of this fingerprint, or the one that its weights are other
    /// `weights_of`; a file that does not name its model may be of any.
    ///
    /// # Errors
    /// In one line: the file, its model, and this one.
    pub fn check_base(&self, fingerprint: &str, weights_of: Option<&str>) -> Result<(), PolicyError> {
        let is_this = |base: &str| base == fingerprint || Some(base) == weights_of;
        let other = |read: &&Read| read.base.as_deref().is_some_and(|base| !is_this(base));
        match self.parameters.tensors.iter().find(other) {
            Some(Read { path, base, .. }) => Err(PolicyError::File(format!(
                "'{}' was trained on the model {}; this model is {fingerprint}, train gates of its own",
                path.display(),
                base.as_deref().unwrap_or_default()
            ))),
            None => Ok(()),
        }
    }
}

/// What a policy may be built from besides its text.
pub struct Assets<'f> {
    file: Option<&'f PolicyFile>,
    parameters: Parameters,
}

impl<'f> Assets<'f> {
    /// From a file, or from none.
    pub fn new(file: Option<&'f PolicyFile>) -> Self {
        Assets { file, parameters: Parameters::default() }
    }

    /// What `read` makes of another file than the one that was given.
    pub fn of_file<T>(&mut self, file: &PolicyFile, read: impl FnOnce(&mut Assets<'_>) -> T) -> T {
        let parameters = std::mem::take(&mut self.parameters);
        let mut assets = Assets { file: Some(file), parameters };
        let made = read(&mut assets);
        self.parameters = assets.parameters;
        made
    }

    /// Notes tensors with these axes that were made of the weights of a folder as read.
    ///
    /// # Errors
    /// When an axis differs from that of a tensor read before.
    pub(super) fn note(
        &mut self,
        folder: &Path,
        tensors: &[(&'static str, &[Axis], &Learned)],
    ) -> Result<(), PolicyError> {
        let mut hasher = blake3::Hasher::new();
        tensors.iter().for_each(|(.., learned)| _ = hasher.update(bytemuck::cast_slice(&learned.values)));
        let hash = hasher.finalize().to_hex().to_string();
        for (name, axes, learned) in tensors {
            let (shape, axes) = (learned.shape.clone(), axes.to_vec());
            let read = Read { path: folder.into(), hash: hash.clone(), base: None, name, shape, axes };
            read.check(&self.parameters.extents().collect::<Vec<_>>())?;
            self.parameters.tensors.push(read);
        }
        Ok(())
    }

    /// A text of the file's metadata.
    pub fn metadata(&self, key: &str) -> Option<String> {
        self.file?.metadata(key)
    }

    /// Which tensors were read.
    pub(super) fn into_parameters(self) -> Parameters {
        self.parameters
    }

    /// Tensors that were read so far.
    pub(super) fn read(&self) -> usize {
        self.parameters.tensors.len()
    }

    /// Forgets all but the first `read` tensors: what they were for is not part of the policy.
    pub(super) fn forget(&mut self, read: usize) {
        self.parameters.tensors.truncate(read);
    }

    /// The tensor `name` with these axes; `None` where the file has none of this name, or there is no file.
    ///
    /// # Errors
    /// When its shape is another, or differs along an axis from that of a tensor read before, its elements are not F32,
    /// F16 or BF16, or one is not finite.
    pub fn optional(&mut self, name: &'static str, axes: &[Axis]) -> Result<Option<Learned>, PolicyError> {
        match self.file {
            Some(file) if file.has(name) => self.load(file, name, axes).map(Some),
            _ => Ok(None),
        }
    }

    /// As [`Assets::optional`], of a tensor that the policy cannot do without. Where there is no file it is `None`, so that
    /// the policy can be listed, and [`Policy::check_parameters`] refuses it.
    ///
    /// # Errors
    /// As [`Assets::optional`], and when the file has no such tensor.
    pub fn needed(&mut self, name: &'static str, axes: &[Axis]) -> Result<Option<Learned>, PolicyError> {
        match self.file {
            Some(file) => self.load(file, name, axes).map(Some),
            None => {
                self.parameters.missing.get_or_insert(name);
                Ok(None)
            }
        }
    }

    fn load(&mut self, file: &PolicyFile, name: &'static str, axes: &[Axis]) -> Result<Learned, PolicyError> {
        let path = file.file.path();
        let entry = file.file.entries()?.into_iter().find(|entry| entry.name == name);
        let Some(entry) = entry else {
            let found = file.file.names()?.join(", ");
            return Err(FileError::Missing { path: path.into(), name: name.into(), found }.into());
        };
        let (hash, base) = (file.hash.clone(), file.metadata("base_model"));
        let shape = entry.shape.clone();
        let read = Read { path: path.into(), hash, base, name, shape: shape.clone(), axes: axes.to_vec() };
        read.check(&self.parameters.extents().collect::<Vec<_>>())?;
        let values = decoded(&file.file, &entry)?;
        self.parameters.tensors.push(read);
        Ok(Learned { shape, values })
    }
}

/// The elements of a file's tensor.
///
/// # Errors
/// When they are not F32, F16 or BF16, or one is not finite.
pub(super) fn decoded(file: &TensorFile, entry: &Entry) -> Result<Vec<f32>, PolicyError> {
    let Entry { name, shape, dtype, range } = entry;
    let path = file.path();
    let Some(element) = read_as(*dtype) else {
        let found = format!("{dtype:?}");
        return Err(FileError::DType { path: path.into(), name: name.clone(), found }.into());
    };
    let mut values = vec![0f32; shape.iter().product()];
    element.decode(file.bytes(range.clone()), &mut values);
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(at) => Err(PolicyError::File(format!(
            "tensor '{name}' in '{}' holds {} as element {at} of {shape:?}; every element must be finite",
            path.display(),
            values[at]
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Registry;
    use crate::tensor::file::{Output, write};

    /// A registry with a file of these tensors.
    fn registry(tensors: &[(&str, Vec<usize>, Vec<f32>)]) -> Registry {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policy.safetensors");
        let outputs: Vec<_> =
            tensors.iter().map(|(name, shape, values)| Output::f32(name, shape.clone(), values)).collect();
        write(&path, &outputs).unwrap();
        Registry::default().with_file(PolicyFile::open(&path).unwrap())
    }

    fn gate(weight: &[usize], bias: &[usize]) -> Registry {
        let tensor = |name, shape: &[usize]| (name, shape.to_vec(), vec![0.5; shape.iter().product()]);
        registry(&[tensor("gate.weight", weight), tensor("gate.bias", bias)])
    }

    #[test]
    fn tensors_that_do_not_fit_are_refused_with_what_would() {
        let says = |registry: &Registry, text: &str| registry.policy(text).err().unwrap().to_string();
        let nan =
            registry(&[("gate.weight", vec![1, 1, 2], vec![0.0, f32::NAN]), ("gate.bias", vec![1, 1], vec![0.0])]);
        let other = registry(&[("other", vec![1], vec![0.0])]);
        for (registry, text, expected) in [
            (gate(&[2, 16], &[2, 2]), "gate", "has shape [2, 16]; [layers, KV heads, hidden] is needed"),
            (gate(&[3, 2, 16], &[2, 2]), "gate", "has shape [2, 2]; [layers = 3, KV heads = 2] is needed"),
            (nan, "gate", "holds NaN as element 1 of [1, 1, 2]"),
            (registry(&[("qfilters.filters", vec![8], vec![0.0; 8])]), "qfilters", "[layers, KV heads, head dim]"),
            (registry(&[("duo.alpha", vec![2, 2, 1], vec![0.0; 4])]), "knorm+duo", "[layers, KV heads]"),
        ] {
            let said = says(&registry, text);
            assert!(said.contains(expected) && !said.contains('\n'), "{said}");
        }
        let said = says(&other, "gate");
        assert!(said.contains("has no tensor 'gate.weight'; it holds other"), "{said}");
        assert!(other.policy("qfilters").unwrap().parameters.is_empty());
    }

    #[test]
    fn parameters_must_be_of_the_models_extents() {
        let policy = gate(&[3, 2, 16], &[3, 2]).policy("gate").unwrap();
        let model = |layers, kv_heads, hidden| {
            let extents = [(Axis::Layers, layers), (Axis::KvHeads, kv_heads), (Axis::Hidden, hidden)];
            policy.check_parameters("gate", &extents).map_err(|error| error.to_string())
        };
        assert_eq!(model(3, 2, 16), Ok(()));
        for wrong in [model(4, 2, 16), model(3, 1, 16), model(3, 2, 8)] {
            let said = wrong.unwrap_err();
            assert!(said.contains("'gate.weight'") && said.contains("[3, 2, 16]; [layers = "), "{said}");
        }
        let without = Registry::default().policy("gate").unwrap();
        let said = without.check_parameters("gate", &[]).unwrap_err().to_string();
        assert!(said.contains("'gate.weight' of a policy file; give --policy-file"), "{said}");
    }

    /// The format lets a header be of any length, and so data begin anywhere.
    #[test]
    fn elements_are_read_wherever_a_header_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policy.safetensors");
        let values = [0.5f32, -2.0, 3.25];
        write(&path, &[Output::f32("x", vec![3], &values)]).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let (len, rest) = bytes.split_at(8);
        let (header, data) = rest.split_at(u64::from_le_bytes(len.try_into().unwrap()) as usize);
        for more in 0..4 {
            let header = [header, &b"    "[..more]].concat();
            std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], &header, data].concat()).unwrap();
            let file = TensorFile::open(&path).unwrap();
            let entry = &file.entries().unwrap()[0];
            assert_eq!(decoded(&file, entry).unwrap(), values, "{more} bytes further");
        }
    }

    #[test]
    fn a_part_that_was_replaced_leaves_nothing_of_its_tensors() {
        let registry = registry(&[("duo.alpha", vec![2, 2], vec![0.0; 4])]);
        assert!(!registry.policy("duoattention").unwrap().parameters.is_empty());
        assert!(registry.policy("duoattention+ada").unwrap().parameters.is_empty());
    }
}
