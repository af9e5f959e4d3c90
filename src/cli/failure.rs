//! How an error becomes an exit status: each error of the library is classed once, here.
//!
//! What the user can put right by giving other input or arguments is a [`Failure::Usage`] (files, shapes, names,
//! values); what goes wrong although they are right is a [`Failure::Work`] (no memory, a full disk, a bad result).

use crate::anatomy::RetrievalError;
use crate::attention::AttentionError;
use crate::device::cpu::CpuError;
use crate::device::cuda::CudaError;
use crate::editing::EditError;
use crate::episodic::EpisodicError;
use crate::eval::EvalError;
use crate::experiment::runner::RunError;
use crate::experiment::spec::SpecError;
use crate::experiment::store::StoreError;
use crate::format::FormatError;
use crate::memory::ArenaError;
use crate::model::ModelError;
use crate::named::NamedError;
use crate::planner::PlanError;
use crate::policy::cuda::DevicePolicyError;
use crate::policy::{BudgetError, PolicyError};
use crate::ranks::RankError;
use crate::report::ReportError;
use crate::task::TaskError;
use crate::tensor::file::FileError;
use crate::train::run::TrainError;
use crate::workload::WorkloadError;
use std::fmt;
use std::process::ExitCode;

/// Why a command did not do what it was asked to do.
#[derive(Debug)]
pub enum Failure {
    /// The input or the arguments are wrong: exit status 2.
    Usage(anyhow::Error),
    /// Failed while working: exit status 1.
    Work(anyhow::Error),
}

impl Failure {
    /// A user's mistake, in words.
    pub fn usage(message: String) -> Self {
        Failure::Usage(anyhow::Error::msg(message))
    }

    /// A failure while working, in words.
    pub fn work(message: String) -> Self {
        Failure::Work(anyhow::Error::msg(message))
    }

    /// A user's mistake in the words of what the user typed.
    pub fn reworded(self, words: impl Fn(&str) -> String) -> Self {
        match self {
            Failure::Usage(_) => Failure::usage(words(&self.to_string())),
            Failure::Work(_) => self,
        }
    }

    /// The status that the process ends with.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.status())
    }

    /// The same as a number.
    pub fn status(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::Work(_) => 1,
        }
    }
}

/// The error and its causes in one line, whatever line breaks a path or a message of the system holds.
impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Failure::Usage(error) | Failure::Work(error)) = self;
        let text = format!("{error:#}");
        formatter.write_str(&text.lines().map(str::trim).collect::<Vec<_>>().join(" "))
    }
}

impl From<NamedError> for Failure {
    fn from(error: NamedError) -> Self {
        Failure::Usage(error.into())
    }
}

impl From<FormatError> for Failure {
    fn from(error: FormatError) -> Self {
        Failure::Usage(error.into())
    }
}

impl From<AttentionError> for Failure {
    fn from(error: AttentionError) -> Self {
        match error {
            AttentionError::Arena(error) => error.into(),
            error => Failure::Usage(error.into()),
        }
    }
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::NoDriver
            | CudaError::OldDriver { .. }
            | CudaError::NoNvrtc { .. }
            | CudaError::Architecture { .. }
            | CudaError::TooOld { .. }
            | CudaError::Operand(_) => Failure::Usage(error.into()),
            error => Failure::Work(error.into()),
        }
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        match error {
            FileError::Arena(error) => error.into(),
            FileError::Write { .. } => Failure::Work(error.into()),
            error => Failure::Usage(error.into()),
        }
    }
}

impl From<ArenaError> for Failure {
    fn from(error: ArenaError) -> Self {
        Failure::Work(error.into())
    }
}

impl From<CpuError> for Failure {
    fn from(error: CpuError) -> Self {
        match error {
            CpuError::Threads { .. } | CpuError::Environment { .. } | CpuError::Isa(_) => Failure::Usage(error.into()),
            CpuError::System { .. } => Failure::Work(error.into()),
        }
    }
}

impl From<BudgetError> for Failure {
    fn from(error: BudgetError) -> Self {
        Failure::Usage(error.into())
    }
}

impl From<PolicyError> for Failure {
    fn from(error: PolicyError) -> Self {
        match error {
            PolicyError::Arena(error) => error.into(),
            PolicyError::Score { .. } => Failure::Work(error.into()),
            error => Failure::Usage(error.into()),
        }
    }
}

impl From<DevicePolicyError> for Failure {
    fn from(error: DevicePolicyError) -> Self {
        match error {
            DevicePolicyError::Policy(error) => error.into(),
            DevicePolicyError::Cuda(error) => error.into(),
        }
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::File(error) => error.into(),
            ModelError::Attention(error) => error.into(),
            ModelError::Policy(error) => error.into(),
            ModelError::Arena(error) => error.into(),
            ModelError::Logit { .. } => Failure::Work(error.into()),
            error => Failure::Usage(error.into()),
        }
    }
}

impl From<RankError> for Failure {
    fn from(error: RankError) -> Self {
        match error {
            RankError::Attention(error) => error.into(),
            RankError::Policy(error) => error.into(),
            RankError::Arena(error) => error.into(),
            RankError::Unsupported(_) | RankError::Differs { .. } => Failure::Usage(error.into()),
            error => Failure::Work(error.into()),
        }
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::Tensors(error) => error.into(),
            PlanError::Model(error) => error.into(),
            error => Failure::Usage(error.into()),
        }
    }
}

impl From<EvalError> for Failure {
    fn from(error: EvalError) -> Self {
        match error {
            EvalError::Model(error) => error.into(),
            EvalError::Task(error) => error.into(),
            EvalError::Named(error) => error.into(),
            EvalError::Arena(error) => error.into(),
            EvalError::File(error) => Failure::work(error.to_string()),
        }
    }
}

impl From<EpisodicError> for Failure {
    fn from(error: EpisodicError) -> Self {
        match error {
            EpisodicError::Arena(error) => error.into(),
            EpisodicError::File(error) => error.into(),
            error => Failure::Usage(error.into()),
        }
    }
}

impl From<EditError> for Failure {
    fn from(error: EditError) -> Self {
        match error {
            EditError::Model(error) => error.into(),
            EditError::Memory(error) => error.into(),
            EditError::File(error) => error.into(),
            EditError::Arena(error) => error.into(),
            error => Failure::Usage(error.into()),
        }
    }
}

impl From<TaskError> for Failure {
    fn from(error: TaskError) -> Self {
        Failure::Usage(error.into())
    }
}

impl From<RetrievalError> for Failure {
    fn from(error: RetrievalError) -> Self {
        match error {
            RetrievalError::Task(error) => error.into(),
            RetrievalError::Model(error) => error.into(),
        }
    }
}

impl From<SpecError> for Failure {
    fn from(error: SpecError) -> Self {
        Failure::Usage(error.into())
    }
}

impl From<WorkloadError> for Failure {
    fn from(error: WorkloadError) -> Self {
        match error {
            WorkloadError::Arena(error) => error.into(),
            WorkloadError::File(error) => error.into(),
            error => Failure::Usage(error.into()),
        }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Write { .. } | StoreError::Busy { .. } => Failure::Work(error.into()),
            StoreError::Read { .. } | StoreError::Damaged { .. } | StoreError::Locks { .. } => {
                Failure::Usage(error.into())
            }
        }
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        match error {
            RunError::Store(error) => error.into(),
            RunError::Workload(error) => error.into(),
            RunError::Cell(_) => Failure::Usage(error.into()),
            RunError::Gpu { .. } | RunError::Lost { .. } => Failure::Work(error.into()),
        }
    }
}

impl From<TrainError> for Failure {
    fn from(error: TrainError) -> Self {
        match error {
            TrainError::Attention(error) => error.into(),
            TrainError::Rank(error) => error.into(),
            TrainError::Arena(error) => error.into(),
            TrainError::File(error) => error.into(),
            TrainError::Model(error) => error.into(),
            TrainError::Edit(error) => error.into(),
            TrainError::System { .. } | TrainError::Diverged { .. } | TrainError::Collapsed { .. } => {
                Failure::Work(error.into())
            }
            error => Failure::Usage(error.into()),
        }
    }
}

impl From<ReportError> for Failure {
    fn from(error: ReportError) -> Self {
        match error {
            ReportError::NoRun | ReportError::NoCells(_) => Failure::Usage(error.into()),
            error => Failure::Work(error.into()),
        }
    }
}
