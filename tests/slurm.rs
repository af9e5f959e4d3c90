//! `kvsieve slurm` on a real Slurm, where one is installed (`slurmctld` and `slurmd`): `cargo test --release --test slurm --
//! --ignored`. The cluster has one node and lives in a folder of its own (`tests/slurm/cluster`).

#![cfg(unix)]

use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A Slurm that ends with the test.
struct Cluster {
    folder: TempDir,
    daemons: Child,
}

impl Cluster {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/slurm/cluster");
        let daemons = Command::new(script).arg(folder.path()).stdout(Stdio::null()).spawn().unwrap();
        let cluster = Cluster { folder, daemons };
        let ready = cluster.folder.path().join("ready");
        wait_for("Slurm to start", Duration::from_secs(30), || ready.exists());
        cluster
    }

    /// A command that speaks to this cluster, in its folder.
    fn run(&self, program: &str, arguments: &[&str]) -> Output {
        let conf = self.folder.path().join("slurm.conf");
        let mut command = Command::new("timeout");
        command.arg("60").arg(program).args(arguments).current_dir(&self.folder).env("SLURM_CONF", conf);
        command.output().unwrap()
    }

    /// Writes `x.toml`: comparisons of two kernels, of which each cell takes `seconds` whatever the machine.
    fn experiment(&self, comparisons: usize, seconds: f64) {
        let text = format!(
            "name = \"x\"\n[timing]\nmin_rounds = 3\nmax_rounds = 10000\ntarget = 0.000001\ncap_s = {seconds}\n\
             [[grid]]\nmeasure = \"forward\"\nkernel = [\"naive\", \"tiled\"]\nheads = \"2/1\"\nhead_dim = 32\n\
             context_tokens = \"101..{}+1\"\n",
            100 + comparisons
        );
        fs::write(self.folder.path().join("x.toml"), text).unwrap();
    }

    /// Submits `x.toml` and returns the number of the job.
    fn submit(&self, options: &[&str]) -> String {
        let arguments = [&["slurm", "x.toml", "--out", "out", "--submit"], options].concat();
        let output = self.run(env!("CARGO_BIN_EXE_kvsieve"), &arguments);
        let shown = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        shown.trim().rsplit("job: ").next().unwrap().to_string()
    }

    /// What Slurm says of each task of a job: `JobState=COMPLETED`, `Restarts=1` and so on.
    fn show(&self, job: &str) -> String {
        String::from_utf8(self.run("scontrol", &["show", "job", job]).stdout).unwrap()
    }

    fn wait_until_over(&self, job: &str, limit: Duration) {
        wait_for("the job to end", limit, || {
            let shown = self.show(job);
            let mut states = shown.split("JobState=").skip(1).filter_map(|rest| rest.split_whitespace().next());
            states.all(|state| ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"].contains(&state))
        });
    }

    fn results(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// Ids of the cells that are recorded, each as often as there is a record.
    fn recorded(&self) -> Vec<String> {
        let mut ids = Vec::new();
        for run in entries(&self.results().join("x")).into_iter().filter(|path| path.is_dir()) {
            for path in
                entries(&run).into_iter().filter(|path| path.extension().is_some_and(|ending| ending == "jsonl"))
            {
                let text = fs::read_to_string(path).unwrap();
                let id = |line: &str| serde_json::from_str::<Value>(line).ok()?["cell_id"].as_str().map(String::from);
                ids.extend(text.lines().filter_map(id));
            }
        }
        ids
    }

    fn assert_each_once(&self, cells: usize) {
        let ids = self.recorded();
        assert_eq!((ids.len(), ids.iter().collect::<BTreeSet<_>>().len()), (cells, cells), "{}", self.logs());
    }

    fn logs(&self) -> String {
        let logs = entries(&self.results()).into_iter().filter(|path| path.extension().is_some_and(|end| end == "log"));
        logs.map(|path| format!("{}:\n{}", path.display(), fs::read_to_string(&path).unwrap())).collect()
    }

    /// What `kvsieve report` shows of the run.
    fn report(&self) -> String {
        let run = entries(&self.results().join("x")).into_iter().find(|path| path.is_dir()).unwrap();
        let output = self.run(env!("CARGO_BIN_EXE_kvsieve"), &["report", run.to_str().unwrap()]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The script ends both daemons with itself, and what still runs.
        let _ = Command::new("kill").arg(self.daemons.id().to_string()).status();
        let _ = self.daemons.wait();
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).map(|found| found.map(|entry| entry.unwrap().path()).collect()).unwrap_or_default()
}

fn wait_for(what: &str, limit: Duration, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < limit, "waited {} s for {what}", limit.as_secs());
        sleep(Duration::from_millis(200));
    }
}

#[test]
#[ignore = "needs Slurm"]
fn an_array_does_a_sweep_and_scancel_loses_nothing() {
    let cluster = Cluster::start();
    cluster.experiment(12, 0.5);
    let job = cluster.submit(&["--tasks", "2", "--limit-memory", "64MiB"]);
    wait_for("records", Duration::from_secs(60), || cluster.recorded().len() >= 4);
    assert!(cluster.run("scancel", &[&job]).status.success());
    cluster.wait_until_over(&job, Duration::from_secs(30));
    let done = cluster.recorded().len();
    assert!((4..24).contains(&done), "{done} records when the job was cancelled");
    assert!(cluster.report().starts_with(&format!("x: {done} of 24 cells\n")), "{}", cluster.report());

    let job = cluster.submit(&["--tasks", "2", "--limit-memory", "64MiB"]);
    cluster.wait_until_over(&job, Duration::from_secs(120));
    assert_eq!(
        cluster.show(&job).matches("JobState=COMPLETED").count(),
        2,
        "{}\n{}",
        cluster.show(&job),
        cluster.logs()
    );
    cluster.assert_each_once(24);
    let shown = cluster.report();
    assert!(shown.starts_with("x: 24 of 24 cells\n"), "{shown}");
    assert!(shown.contains(&format!("{job}_1")) && shown.contains(&format!("{job}_2")), "{shown}");
}

#[test]
#[ignore = "needs Slurm, and takes minutes"]
fn a_task_that_meets_its_time_limit_goes_on_later() {
    let cluster = Cluster::start();
    // More than a task has: two minutes, of which the last is for notice.
    cluster.experiment(50, 1.0);
    let job = cluster.submit(&["--tasks", "1", "--time", "2"]);
    cluster.wait_until_over(&job, Duration::from_secs(480));
    let shown = cluster.show(&job);
    assert!(shown.contains("JobState=COMPLETED") && !shown.contains("Restarts=0"), "{shown}\n{}", cluster.logs());
    cluster.assert_each_once(100);
}

#[test]
#[ignore = "needs Slurm"]
fn a_task_that_is_preempted_or_killed_resumes_where_it_was() {
    let cluster = Cluster::start();
    cluster.experiment(12, 0.5);
    let job = cluster.submit(&["--tasks", "1"]);
    // As a partition preempts with REQUEUE: SIGTERM to what runs, then back into the queue.
    wait_for("records", Duration::from_secs(60), || cluster.recorded().len() >= 3);
    assert!(cluster.run("scontrol", &["requeue", &format!("{job}_1")]).status.success());
    let before = cluster.recorded();
    assert!(before.len() < 24, "{} records when the task was requeued", before.len());
    wait_for("more records", Duration::from_secs(90), || cluster.recorded().len() >= before.len() + 3);
    assert!(cluster.show(&job).contains("Restarts=1"), "{}", cluster.show(&job));
    let kept = cluster.recorded();
    assert!(before.iter().all(|id| kept.contains(id)), "records from before are gone");
    // SIGTERM to kvsieve alone and no requeue: the cell in work is dropped, and the task ends.
    assert!(cluster.run("scancel", &["--signal=TERM", "--full", &job]).status.success());
    cluster.wait_until_over(&job, Duration::from_secs(60));
    let shown = cluster.show(&job);
    assert!(!shown.contains("JobState=COMPLETED") && cluster.recorded().len() < 24, "{shown}");

    let job = cluster.submit(&["--tasks", "1"]);
    cluster.wait_until_over(&job, Duration::from_secs(120));
    assert!(cluster.show(&job).contains("JobState=COMPLETED"), "{}\n{}", cluster.show(&job), cluster.logs());
    cluster.assert_each_once(24);
}

/// A folder with an experiment of two comparisons.
fn desk() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = "name = \"x\"\n[[grid]]\nmeasure = \"forward\"\nkernel = [\"naive\", \"tiled\"]\nheads = \"2/1\"\nhead_dim = 32\n\
                context_tokens = [64, 128]\n";
    fs::write(folder.path().join("x.toml"), text).unwrap();
    folder
}

/// Runs `kvsieve slurm` where no Slurm is: status, stdout and stderr.
fn slurm(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvsieve"));
    let output = command.arg("slurm").args(arguments).current_dir(folder).env("PATH", "").output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_script_says_what_was_asked_and_the_shell_reads_it() {
    let desk = desk();
    let folder = desk.path().join("two words");
    fs::create_dir(&folder).unwrap();
    fs::copy(desk.path().join("x.toml"), folder.join("my x.toml")).unwrap();
    let options = ["--tasks", "2", "--out", "my out", "--cpus", "3", "--time", "1-00:30:00", "--limit-memory", "8GiB"];
    let (status, shown, said) = slurm(&folder, &[&["my x.toml"], &options[..]].concat());
    assert_eq!((status, said.as_str()), (Some(0), ""));
    assert_eq!(shown, "4 cells in 2 comparisons, 2 tasks\nsubmit with: sbatch 'my out/x.sbatch'\n");
    let path = folder.join("my out/x.sbatch");
    let script = fs::read_to_string(&path).unwrap();
    let chdir = format!("#SBATCH --chdir='{}'", folder.canonicalize().unwrap().display());
    for line in [
        "#SBATCH --array=1-2",
        "#SBATCH --cpus-per-task=3",
        "#SBATCH --time=1-00:30:00",
        "#SBATCH --mem=10240M",
        "#SBATCH --output='my out/x-%A_%a.log'",
        "#SBATCH --requeue",
        &chdir,
    ] {
        assert!(script.lines().any(|found| found == line), "{line}: {script}");
    }
    let run = "run 'my x.toml' --out 'my out' --join --threads 3 --limit-memory 8589934592B &\n";
    assert!(script.contains(run), "{script}");
    assert!(Command::new("bash").arg("-n").arg(&path).status().unwrap().success());
}

#[test]
fn tasks_on_gpus_ask_for_one_each() {
    let desk = desk();
    let (status, _, said) = slurm(desk.path(), &["x.toml", "--tasks", "2", "--device", "cuda"]);
    assert_eq!((status, said.as_str()), (Some(0), ""));
    let script = fs::read_to_string(desk.path().join("results/x.sbatch")).unwrap();
    assert!(script.lines().any(|line| line == "#SBATCH --gpus-per-task=1"), "{script}");
    assert!(script.contains(" --join --device cuda --threads 1 &\n"), "{script}");
    let (_, _, said) = slurm(desk.path(), &["x.toml", "--tasks", "2"]);
    let script = fs::read_to_string(desk.path().join("results/x.sbatch")).unwrap();
    assert!(said.is_empty() && !script.contains("gpu") && !script.contains("--device"), "{script}");
}

#[test]
fn every_mistake_is_one_line() {
    let desk = desk();
    let ranks = "name = \"ranks\"\n[[grid]]\nmeasure = \"ranks\"\nranks = [\"ring:1\", \"ring:2\"]\nheads = \"2/1\"\n\
                 head_dim = 32\ncontext_tokens = 64\n";
    fs::write(desk.path().join("ranks.toml"), ranks).unwrap();
    fs::write(desk.path().join("file"), "").unwrap();
    for (arguments, expected) in [
        (&["x.toml", "--tasks", "0"][..], "error: invalid value '0' for '--tasks <N>'"),
        (&["x.toml"], "error: the following required arguments were not provided: --tasks <N>"),
        (&["none.toml", "--tasks", "2"], "error: there is no experiment 'none.toml'"),
        (&["x.toml", "--tasks", "2", "--cpus", "0"], "error: invalid value '0' for '--cpus <N>'"),
        (&["x.toml", "--tasks", "2", "--cpus", "99999"], "error: invalid value '99999' for '--cpus <N>'"),
        (
            &["x.toml", "--tasks", "2", "--time", "1 hour"],
            "error: invalid value '1 hour' for '--time <TIME>': '1 hour' is no time limit; write minutes,",
        ),
        (
            &["x.toml", "--tasks", "2", "--out", "it's"],
            "error: 'it's/x-%A_%a.log' cannot stand in a script; name another path",
        ),
        (&["x.toml", "--tasks", "2", "--out", "file"], "error: --out 'file': 'file' is not a folder; name another"),
        (&["x.toml", "--tasks", "2", "--device", "cuda:1"], "error: invalid value 'cuda:1' for '--device <cpu|cuda>'"),
        (
            &["ranks.toml", "--tasks", "1", "--device", "cuda"],
            "error: --device cuda: none of the cells of 'ranks' runs on a GPU: ranks are threads of the CPU; leave it out",
        ),
        (&["x.toml", "--tasks", "2", "--submit"], "error: cannot run sbatch: No such file"),
    ] {
        let (status, shown, said) = slurm(desk.path(), arguments);
        assert_eq!((status, shown.as_str()), (Some(2), ""), "{arguments:?}: {said}");
        assert!(said.starts_with(expected) && said.lines().count() == 1, "{arguments:?}: {said}");
    }
    let (status, _, said) = slurm(desk.path(), &["x.toml", "--tasks", "5"]);
    assert_eq!(status, Some(0));
    assert_eq!(said, "warning: 2 comparisons are dealt to 5 tasks; 3 of them will find nothing to do\n");
}
