//! A policy by its text and its file, as the commands that evict once take it.

use super::failure::Failure;
use crate::policy::{Budget, Policy, PolicyFile, Registry};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The option of these commands.
#[derive(clap::Args)]
pub struct FileArg {
    /// Safetensors file that the policy reads tensors of (see `kvsieve list policies`) [default: none]
    #[arg(long, value_name = "FILE", requires = "policy", help_heading = "What is evicted")]
    pub policy_file: Option<PathBuf>,
}

/// A policy, and the file that it was built from if there is one.
pub type Built = (Policy, Option<Used>);

/// The file that a policy was built from, under the names that records use.
#[derive(Debug, Clone, Serialize)]
pub struct Used {
    policy_file: PathBuf,
    policy_file_hash: String,
}

impl Used {
    /// The file of `policy`, of several that at `path` or the first.
    fn of(policy: &Policy, path: Option<&Path>) -> Option<Self> {
        let path = path.or(policy.parameters.files().first().copied())?;
        Some(Used { policy_file: path.into(), policy_file_hash: policy.parameters.hash()? })
    }
}

/// The budget of a policy, by its text. Where nothing is evicted there need be none.
///
/// # Errors
/// When it is none, or is missing.
pub fn budget(policy: &Policy, name: &str, text: Option<&str>) -> Result<Option<Budget>, Failure> {
    match text {
        None if policy.keeps_all() => Ok(None),
        None => Err(Failure::usage(format!("policy '{name}' has no budget; give --budget, such as 0.25 or 512"))),
        Some(text) => Ok(Some(text.parse()?)),
    }
}

impl FileArg {
    /// The policy that `text` names, from this file.
    pub fn policy(&self, text: &str, registry: &Registry) -> Result<Built, Failure> {
        let Some(path) = &self.policy_file else {
            let policy = registry.policy(text)?;
            policy.check_parameters(text, &[])?;
            let used = Used::of(&policy, None);
            return Ok((policy, used));
        };
        let policy = registry.clone().with_file(PolicyFile::open(path)?).policy(text)?;
        if !policy.parameters.files().contains(&&**path) {
            let shown = path.display();
            return Err(Failure::usage(format!(
                "policy '{text}' reads no tensor of --policy-file '{shown}'; leave it out"
            )));
        }
        let used = Used::of(&policy, Some(path));
        Ok((policy, used))
    }

    /// The file with its option, for checks of what is read and written.
    pub fn read(&self) -> Option<(&'static str, &Path)> {
        self.policy_file.as_deref().map(|path| ("--policy-file", path))
    }
}
