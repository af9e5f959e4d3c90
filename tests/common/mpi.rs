//! `mpirun` for tests of builds with MPI.

use assert_cmd::Command;
use std::time::Duration;

/// `mpirun` on this machine, whoever runs it and however few cores there are. It ends its processes when it ends.
pub fn mpirun(ranks: usize, deadline: Duration) -> Command {
    let mut command = Command::new("mpirun");
    command.timeout(deadline);
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] {
        command.env(name, "1");
    }
    // It has ended them before it is killed itself.
    let seconds = (deadline.as_secs() - 10).to_string();
    command.args(["--oversubscribe", "--timeout", &seconds, "-n", &ranks.to_string()]);
    command
}
