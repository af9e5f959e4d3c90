//! Policies by name, and the algebra of `method:key=value+part:key=value`.
//!
//! A text is a method or a preset, then parts. Parts that a method brings by default are replaced without a word; two
//! parts of the same kind in one text, and combinations that mean nothing, are refused with the reason.

use super::action::Action;
use super::allocation::{OverHeads, OverLayers};
use super::scorers::protect::Protected;
use super::{
    Assets, Averages, Decoding, PARTS, POLICIES, PRESETS, Policy, PolicyError, PolicyFile, Protect, Scorer, Statistic,
};
use crate::named::{Named, NamedError, Parameter};
use std::sync::Arc;

/// A method as the registry knows it.
#[derive(Clone, Copy)]
pub struct PolicyEntry {
    /// Name on the command line and in records.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// Where it was published (arXiv id), or an empty text.
    pub paper: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
    /// Makes it, with the method's own budget allocation, schedule and action; from tensors of a policy file too, where it reads
    /// any.
    pub build: fn(&Named, &mut Assets<'_>) -> Result<Policy, PolicyError>,
}

/// A part that replaces one of a method's.
#[derive(Clone, Copy)]
pub struct PartEntry {
    /// Name after a `+`.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// Where it was published (arXiv id), or an empty text.
    pub paper: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
    /// Makes it, as [`PolicyEntry::build`].
    pub build: fn(&Named, &mut Assets<'_>) -> Result<Part, PolicyError>,
}

/// A name for a combination.
#[derive(Clone, Copy)]
pub struct Preset {
    /// Name on the command line and in records.
    pub name: &'static str,
    /// The combination.
    pub text: &'static str,
    /// Where it was published (arXiv id), or an empty text.
    pub paper: &'static str,
    /// One line.
    pub about: &'static str,
}

/// Makes another scorer of one.
pub type ChangeScorer = Box<dyn FnOnce(Box<dyn Scorer>) -> Box<dyn Scorer>>;

/// What a [`PartEntry`] makes.
pub enum Part {
    /// Divides the budget over layers.
    Layers(Box<dyn OverLayers>),
    /// Divides a layer's budget over its heads.
    Heads(Box<dyn OverHeads>),
    /// Divides the budget over layers and heads.
    Both(Box<dyn OverLayers>, Box<dyn OverHeads>),
    /// Prefill in chunks of so many tokens.
    Chunks(usize),
    /// What happens while decoding.
    Decoding(Decoding),
    /// Delayed eviction, behind a window of recent tokens.
    Delayed {
        /// The window.
        window: usize,
    },
    /// Makes another scorer of the method's.
    Scorer(ChangeScorer),
    /// What becomes of an evicted token; `None` drops it.
    Action(Option<Box<dyn Action>>),
    /// Turns keys to positions inside the cache.
    Rerotate,
}

impl Part {
    /// The kind of the part, in the words of the catalogue.
    pub fn kind(&self) -> &'static str {
        match self {
            Part::Layers(_) => "budget allocation over layers",
            Part::Heads(_) => "budget allocation over heads",
            Part::Both(..) => "budget allocation over layers and heads",
            Part::Chunks(_) => "schedule of prefill",
            Part::Decoding(_) | Part::Delayed { .. } => "schedule of decoding",
            Part::Scorer(_) => "change of the scores",
            Part::Action(_) => "action",
            Part::Rerotate => "positions of keys",
        }
    }

    /// What it settles, so that a second part cannot settle it again.
    fn settles(&self) -> &'static [&'static str] {
        match self {
            Part::Layers(_) => &["how layers share the budget"],
            Part::Heads(_) => &["how heads share the budget"],
            Part::Both(..) => &["how layers share the budget", "how heads share the budget"],
            Part::Chunks(_) => &["the chunks of prefill"],
            Part::Decoding(_) | Part::Delayed { .. } => &["when tokens are evicted while decoding"],
            Part::Scorer(_) => &[],
            Part::Action(_) => &["what becomes of an evicted token"],
            Part::Rerotate => &["the positions of keys"],
        }
    }

    fn apply(self, policy: &mut Policy) {
        match self {
            Part::Layers(layers) => policy.layers = layers,
            Part::Heads(heads) => policy.heads = heads,
            Part::Both(layers, heads) => (policy.layers, policy.heads) = (layers, heads),
            Part::Chunks(tokens) => policy.schedule.chunk_tokens = Some(tokens),
            Part::Decoding(decoding) => policy.schedule.decoding = decoding,
            Part::Delayed { window } => {
                policy.schedule.decoding = Decoding::Delayed;
                policy.scorer = policy.scorer.take().map(|scorer| -> Box<dyn Scorer> {
                    Box::new(Protected { scorer, more: Protect { sink: 0, window }, at_most_budget: true })
                });
            }
            Part::Scorer(change) => policy.scorer = policy.scorer.take().map(change),
            Part::Action(action) => policy.action = action,
            Part::Rerotate => policy.rerotates = true,
        }
    }
}

/// The policies that an experiment may name.
#[derive(Clone)]
pub struct Registry {
    entries: Vec<PolicyEntry>,
    parts: Vec<PartEntry>,
    file: Option<Arc<PolicyFile>>,
}

impl Default for Registry {
    fn default() -> Self {
        Registry { entries: POLICIES.to_vec(), parts: PARTS.to_vec(), file: None }
    }
}

impl Registry {
    /// The built-in policies and one more; an entry of the same name is replaced.
    pub fn with(mut self, entry: PolicyEntry) -> Self {
        self.entries.retain(|known| known.name != entry.name);
        self.entries.push(entry);
        self
    }

    /// The same with one more part; a part of the same name is replaced.
    pub fn with_part(mut self, part: PartEntry) -> Self {
        self.parts.retain(|known| known.name != part.name);
        self.parts.push(part);
        self
    }

    /// The same with a file that policies may read tensors of.
    pub fn with_file(mut self, file: PolicyFile) -> Self {
        self.file = Some(Arc::new(file));
        self
    }

    /// The same without a file.
    pub fn without_file(mut self) -> Self {
        self.file = None;
        self
    }

    /// The file that was given.
    pub fn file(&self) -> Option<&PolicyFile> {
        self.file.as_deref()
    }

    /// Every method, in the order in which they are listed.
    pub fn entries(&self) -> &[PolicyEntry] {
        &self.entries
    }

    /// Every part, in the order in which they are listed.
    pub fn parts(&self) -> &[PartEntry] {
        &self.parts
    }

    /// Makes the policy that a text such as `snapkv:window=32+ada` names.
    ///
    /// # Errors
    /// When there is no such method, part or parameter, a value is wrong, or the parts do not go together.
    pub fn policy(&self, text: &str) -> Result<Policy, PolicyError> {
        let mut pieces = pieces(text)?;
        let method = pieces.remove(0);
        let preset = PRESETS.iter().find(|preset| preset.name == method.name);
        let to_preset: Vec<(String, String)> = match preset {
            Some(_) => method.arguments().map(|(key, value)| (key.to_string(), value.to_string())).collect(),
            None => Vec::new(),
        };
        let (method, brought) = match preset {
            Some(preset) => self.expand(preset, &method)?,
            None => (method, Vec::new()),
        };
        let entry = self.entries.iter().find(|entry| entry.name == method.name).ok_or_else(|| {
            let presets = PRESETS.iter().map(|preset| preset.name);
            NamedError::unknown("policy", &method.name, self.entries.iter().map(|entry| entry.name).chain(presets))
        })?;
        method.check(entry.parameters)?;
        let mut assets = Assets::new(self.file.as_deref());
        let mut policy = (entry.build)(&method, &mut assets)?;
        let refuse = |reason: String| PolicyError::Combination { policy: text.into(), reason };
        if policy.scorer.is_none() && !pieces.is_empty() {
            let reason = format!("'{}' keeps everything, so '{}' has nothing to do", method.name, pieces[0].name);
            return Err(refuse(reason));
        }
        let mut settled: Vec<(&str, String)> = Vec::new();
        let given = pieces.iter().map(|piece| self.part(piece, &mut assets)).collect::<Result<Vec<_>, _>>()?;
        for (part, piece) in given.iter().zip(&pieces) {
            for what in part.settles() {
                if let Some((_, other)) = settled.iter().find(|(known, _)| known == what) {
                    return Err(refuse(format!("'{other}' and '{}' both settle {what}; give one", piece.name)));
                }
                settled.push((what, piece.name.clone()));
            }
            if pieces.iter().filter(|other| other.name == piece.name).count() > 1 {
                return Err(refuse(format!("'{}' is given twice", piece.name)));
            }
        }
        // What is given in place of a part that the preset brings.
        let is_given = |piece: &Named| pieces.iter().any(|given| given.name == piece.name);
        let mut replaced: Vec<&str> = Vec::new();
        for piece in &brought {
            if is_given(piece) {
                replaced.push(&piece.name);
                continue;
            }
            let read = assets.read();
            let part = self.part(piece, &mut assets)?;
            match part.settles().iter().all(|what| settled.iter().all(|(known, _)| known != what)) {
                true => part.apply(&mut policy),
                false => {
                    assets.forget(read);
                    replaced.push(&piece.name);
                }
            }
        }
        let has = |name: &str, key: &str| match name == method.name {
            true => has_parameter(entry.parameters, key),
            false => self.part_entry(name).is_ok_and(|entry| has_parameter(entry.parameters, key)),
        };
        for (key, _) in &to_preset {
            let remain = std::iter::once(&method).chain(&brought).map(|piece| &*piece.name);
            if !remain.filter(|name| !replaced.contains(name)).any(|name| has(name, key)) {
                let part = replaced.iter().find(|name| has(name, key)).copied().unwrap_or_default();
                return Err(refuse(format!(
                    "'{key}' is a parameter of '{part}', which another part replaces; leave it out"
                )));
            }
        }
        if policy.schedule.decoding == Decoding::Delayed
            && let Some(at) = given.iter().position(|part| matches!(part, Part::Delayed { .. }))
        {
            let (method, part) = (&method.name, &pieces[at].name);
            return Err(refuse(format!(
                "'{method}' is delayed eviction with a window of its own, which '{part}' does not change; write {method}:window=N"
            )));
        }
        given.into_iter().for_each(|part| part.apply(&mut policy));
        policy.parameters = assets.into_parameters();
        sensible(&policy).map_err(refuse)?;
        Ok(policy)
    }

    /// The kind of a part, in words.
    pub fn kind(&self, entry: &PartEntry) -> &'static str {
        let plain: Named = entry.name.parse().expect("names of parts are plain words");
        (entry.build)(&plain, &mut Assets::new(None)).map_or("", |part| part.kind())
    }

    fn part_entry(&self, name: &str) -> Result<&PartEntry, NamedError> {
        let known = || self.parts.iter().map(|entry| entry.name);
        let entry = self.parts.iter().find(|entry| entry.name == name);
        entry.ok_or_else(|| NamedError::unknown("part of a policy", name, known()))
    }

    fn part(&self, named: &Named, assets: &mut Assets<'_>) -> Result<Part, PolicyError> {
        let entry = self.part_entry(&named.name)?;
        named.check(entry.parameters)?;
        (entry.build)(named, assets)
    }

    /// Parameters of a preset: those of its method and of its parts, the first of each name, with the values that the
    /// preset gives them as defaults; without one where its pieces have different ones.
    pub fn preset_parameters(&self, preset: &Preset) -> Vec<Parameter> {
        let mut parameters: Vec<Parameter> = Vec::new();
        for (index, piece) in split(preset.text).into_iter().enumerate() {
            let (name, given) = piece.split_once(':').unwrap_or((piece, ""));
            let own: &[Parameter] = match index {
                0 => self.entries.iter().find(|entry| entry.name == name).map_or(&[], |entry| entry.parameters),
                _ => self.part_entry(name).map_or(&[], |entry| entry.parameters),
            };
            let set = |parameter: &Parameter| {
                let mut pairs = given.split(',').filter_map(|pair| pair.split_once('='));
                let default =
                    pairs.find(|(key, _)| *key == parameter.name).map_or(parameter.default, |(_, value)| value);
                Parameter { default, ..*parameter }
            };
            for own in own.iter().map(set) {
                match parameters.iter_mut().find(|known| known.name == own.name) {
                    Some(known) if known.default != own.default => known.default = "",
                    Some(_) => {}
                    None => parameters.push(own),
                }
            }
        }
        parameters
    }

    /// The method and the parts of a preset, with the parameters that were given to it.
    fn expand(&self, preset: &Preset, given: &Named) -> Result<(Named, Vec<Named>), NamedError> {
        given.check(&self.preset_parameters(preset))?;
        let mut pieces = pieces(preset.text)?;
        for (key, value) in given.arguments() {
            let parameter = |(index, piece): (usize, &Named)| {
                let entry = self.entries.iter().find(|entry| entry.name == piece.name).map(|entry| entry.parameters);
                let entry = match index {
                    0 => entry,
                    _ => self.part_entry(&piece.name).ok().map(|entry| entry.parameters),
                };
                entry
                    .unwrap_or_default()
                    .iter()
                    .find(|parameter| parameter.name == key)
                    .map(|found| (index, found.default))
            };
            let mut all: Vec<(usize, &str)> = pieces.iter().enumerate().filter_map(parameter).collect();
            // Of parts with a parameter of the name, some have no automatic value of it.
            if all.iter().any(|(_, default)| *default == value) {
                all.retain(|(_, default)| value != "auto" || *default == value);
            }
            all.into_iter().for_each(|(index, _)| pieces[index].set(key, value));
        }
        let method = pieces.remove(0);
        Ok((method, pieces))
    }
}

fn has_parameter(parameters: &[Parameter], key: &str) -> bool {
    parameters.iter().any(|parameter| parameter.name == key)
}

/// The pieces between the plus signs; a plus before a digit belongs to a number such as `1e+4`.
fn split(text: &str) -> Vec<&str> {
    let (mut pieces, mut start) = (Vec::new(), 0);
    for (plus, _) in text.match_indices('+') {
        if !text[plus + 1..].starts_with(|c: char| c.is_ascii_digit()) {
            pieces.push(text[start..plus].trim());
            start = plus + 1;
        }
    }
    pieces.push(text[start..].trim());
    pieces
}

fn pieces(text: &str) -> Result<Vec<Named>, NamedError> {
    let parsed = |piece: &str| match piece {
        "" => Err(NamedError::Syntax { text: text.into() }),
        piece => piece.parse(),
    };
    split(text).into_iter().map(parsed).collect()
}

/// Says why a combination makes no sense.
fn sensible(policy: &Policy) -> Result<(), String> {
    let needs = policy.needs();
    let again = policy.schedule.decoding != Decoding::Never || policy.schedule.chunk_tokens.is_some();
    if needs.contains(&Statistic::FutureAttention) && again {
        return Err("it looks into the future once, after prefill; it cannot evict again".into());
    }
    if policy.rerotates && needs.contains(&Statistic::BeforeRope) && again {
        return Err(
            "it evicts again by vectors before RoPE, and 'rerotate' rotates keys to other positions after the first \
                    eviction; use 'once', or leave 'rerotate' out"
                .into(),
        );
    }
    if policy.action.as_ref().is_some_and(|action| action.refits()) {
        if policy.schedule.decoding != Decoding::Never {
            return Err("it refits what is retained to queries of the context, once that was read; leave 'every' and 'delayed' \
                        out"
                .into());
        }
        if policy.rerotates {
            return Err("it refits what is retained to queries and keys as they stand; leave 'rerotate' out".into());
        }
    }
    let moving = [Statistic::RecentAttention, Statistic::AccumulatedAttention];
    if policy.schedule.decoding == Decoding::Delayed {
        let instead = "use keydiff, knorm or a gate, or every:steps=N";
        if needs.iter().any(|need| moving.contains(need)) {
            return Err(format!(
                "delayed eviction compares a score with those of prefill, and attention changes with every query; {instead}"
            ));
        }
        if policy.heads.settles_lists() || policy.scorer.as_ref().is_some_and(|scorer| !scorer.is_absolute()) {
            return Err(format!(
                "delayed eviction compares a score with those of prefill, and these scores are relative to what else the cache \
                 holds in a step; {instead}"
            ));
        }
    }
    let averages = policy.scorer.as_ref().map_or(Averages::Nothing, |scorer| scorer.averages());
    // A layer's share of an uneven division need not be a multiple of its heads, and one of them holds a token more.
    if again && averages == Averages::Heads && !(policy.heads.is_even() && policy.layers.is_even()) {
        return Err("it takes a mean over heads, which hold different tokens after the first eviction; give all layers and heads \
                    the same budget, or use 'once'"
            .into());
    }
    policy.scorer.as_ref().map_or(Ok(()), |scorer| scorer.check()).map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_builds_with_its_defaults() {
        let registry = Registry::default();
        for entry in registry.entries() {
            assert!(registry.policy(entry.name).is_ok(), "{}", entry.name);
        }
        for preset in PRESETS {
            assert!(registry.policy(preset.name).is_ok(), "{}", preset.name);
        }
        for part in registry.parts() {
            assert!(registry.part(&part.name.parse().unwrap(), &mut Assets::new(None)).is_ok(), "{}", part.name);
        }
    }

    #[test]
    fn parts_replace_what_a_method_brings() {
        let registry = Registry::default();
        let decoding = |text: &str| registry.policy(text).unwrap().schedule.decoding;
        assert_eq!(decoding("h2o+every"), Decoding::EverySteps(1));
        assert_eq!(decoding("h2o"), Decoding::Never);
        assert_eq!(decoding("snapkv + every:steps=8"), Decoding::EverySteps(8));
        assert_eq!(decoding("delayed-keydiff"), Decoding::Delayed);
        assert_eq!(decoding("delayed-keydiff+once"), Decoding::Never);
        let window = |text: &str| registry.policy(text).unwrap().scorer.unwrap().protect(1000).window;
        assert_eq!((window("snapkv@factory"), window("snapkv@factory:window=16")), (8, 16));
        assert_eq!((window("snapkv@frontier:window=32"), window("snapkv@frontier:local=16,window=32")), (128, 16));
        assert_eq!(
            (window("delayed-keydiff"), window("delayed-keydiff:window=32"), window("ada-snapkv:window=8")),
            (128, 32, 8)
        );
    }

    #[test]
    fn a_preset_lists_the_values_that_it_runs_with() {
        let registry = Registry::default();
        let default = |preset: &str, parameter: &str| {
            let preset = PRESETS.iter().find(|known| known.name == preset).unwrap();
            registry.preset_parameters(preset).into_iter().find(|known| known.name == parameter).unwrap().default
        };
        assert_eq!(default("ada-expected-attention", "epsilon"), "0.01");
        assert_eq!((default("delayed-keydiff", "floor"), default("ada-snapkv", "floor")), ("0", "0.2"));
        assert_eq!((default("snapkv@factory", "window"), default("snapkv@kvpress", "window")), ("8", "64"));
        // What is listed, given as it stands, changes nothing that is protected.
        for preset in PRESETS {
            let protects = |text: &str| {
                let policy = registry.policy(text).unwrap_or_else(|error| panic!("{error}"));
                let protect = policy.scorer.unwrap().protect(1000);
                (protect.sink, protect.window)
            };
            for parameter in registry.preset_parameters(preset).iter().filter(|known| !known.default.is_empty()) {
                let text = format!("{}:{}={}", preset.name, parameter.name, parameter.default);
                if let (Ok(_), false) = (registry.policy(&text), parameter.name == "window") {
                    assert_eq!(protects(&text), protects(preset.name), "{text}");
                }
            }
        }
    }

    #[test]
    fn a_part_of_ones_own_is_known_and_replaces_one_of_its_name() {
        const EVERY: PartEntry = PartEntry {
            name: "every",
            about: "",
            paper: "",
            parameters: &[],
            build: |_, _| Ok(Part::Decoding(Decoding::EverySteps(99))),
        };
        let registry = Registry::default().with_part(EVERY).with_part(PartEntry { name: "seldom", ..EVERY });
        for text in ["knorm+every", "knorm+seldom"] {
            assert_eq!(registry.policy(text).unwrap().schedule.decoding, Decoding::EverySteps(99), "{text}");
        }
        assert_eq!(registry.parts().iter().filter(|part| part.name == "every").count(), 1);
    }

    #[test]
    fn combinations_that_mean_nothing_are_refused_with_the_reason() {
        let cases = [
            ("full+ada", "'full' keeps everything, so 'ada' has nothing to do"),
            ("snapkv+ada+ada", "'ada' is given twice"),
            ("snapkv+ada+global", "'ada' and 'global' both settle how heads share the budget"),
            ("snapkv+every+once", "'every' and 'once' both settle when tokens are evicted while decoding; give one"),
            ("oracle+every", "it looks into the future once"),
            ("quest+merge", "'quest' keeps everything, so 'merge' has nothing to do"),
            ("think+rerotate", "'think' keeps everything, so 'rerotate' has nothing to do"),
            ("knorm+merge+cam", "'merge' and 'cam' both settle what becomes of an evicted token"),
            ("knorm+rerotate+rerotate", "'rerotate' is given twice"),
            ("knorm+merge:threshold=2", "merge: threshold is '2'; it must be"),
            ("knorm+cam:window=0", "cam: window is '0'; it must be"),
            ("think:ratio=1", "think: ratio is '1'; it must be"),
            ("delayed-keydiff+cam", "attention changes with every query"),
            ("cur+delayed", "these scores are relative to what else the cache holds"),
            ("qfilters+delayed", "these scores are relative to what else the cache holds"),
            ("keydiff+critical+delayed", "these scores are relative to what else the cache holds"),
            ("dms:window=4+delayed:window=8", "delayed eviction with a window of its own"),
            ("tova+table:heads=1;3+every", "it takes a mean over heads, which hold different tokens"),
            ("tova+table:layers=1;3+chunks", "give all layers and heads the same budget"),
            ("snapkv+blocks", "'blocks' is for scores of keys, values or queries"),
            ("ada-snapkv:floor=0.9+uniform", "'floor' is a parameter of 'ada', which another part replaces"),
            ("expected-attention:vnorm=false,epsilon=7", "epsilon is '7'; it must be 0 where vnorm is false"),
            ("expected-attention:future=1000000000", "future is '1000000000'; it must be a whole number from 1 to"),
            ("knorm+match:fit=values,bound=9", "bound is '9'; it must be left out where only values are fitted"),
            ("lagkv:lag=9223372036854775808", "it must be a whole number of at most 1073741824"),
            ("snapkv+delayed", "attention changes with every query"),
            ("snapkv+knorm", "unknown part of a policy 'knorm'"),
            ("snapkw", "unknown policy 'snapkw'; did you mean 'snapkv'"),
            ("ada-snapkv:widow=3", "'ada-snapkv' has no parameter 'widow'; it has window, kernel"),
            ("snapkv+", "'snapkv+' is not of the form NAME"),
            ("snapkv+ada:floor=2", "ada: floor is '2'; it must be"),
            ("snapkv@factory:kernel=4", "kernel is '4'; it must be odd"),
            ("snapkv@mine", "unknown policy 'snapkv@mine'"),
            ("snapkv:pool=median", "pool is 'median'; it must be avg or max"),
            ("snapkv:local=16", "local is '16'; it must be at least the window of 64"),
            ("morphkv:fusion=mean", "fusion is 'mean'; it must be sum or max"),
            ("knorm+duo+delayed", "attention changes with every query"),
            ("knorm+duo+ada", "'duo' and 'ada' both settle how heads share the budget"),
            ("knorm+simlayer:recent=2,last=2", "recent is '2'; it must be more than last, which is 2"),
            ("knorm+table:layers=3;x", "layers is '3;x'; it must be equal, or numbers of at least 0"),
            ("knorm+table:heads=0;0", "heads is '0;0'; it must be"),
            ("knorm+table:layers=2;1+pyramid", "'table' and 'pyramid' both settle how layers share the budget"),
            ("knorm+pyramid:layer=8,layers=8", "layer is '8'; it must be less than layers, which is 8"),
            ("knorm+pyramid:layer=1", "layers is ''; it must be given beside layer"),
        ];
        for (text, expected) in cases {
            let error = Registry::default().policy(text).err().expect(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
