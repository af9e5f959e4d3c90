//! Runs that several processes shared: who measured how much, and which records times may be compared of.

use super::table;
use crate::experiment::record::{Record, Status, Worker};
use crate::units;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Cells by task, in Markdown; `None` where no processes shared the run.
pub fn by_task(records: &[Record]) -> Option<String> {
    let mut tasks: BTreeMap<(&str, &str), Vec<&Record>> = BTreeMap::new();
    for record in records {
        let Some(worker) = &record.worker else { continue };
        tasks.entry((&worker.task, &worker.host)).or_default().push(record);
    }
    if tasks.is_empty() {
        return None;
    }
    let mut rows = vec![["task", "host", "cells", "failed", "time", "last begun"].map(String::from).to_vec()];
    rows.extend(tasks.into_iter().map(|((task, host), records)| {
        let failed = records.iter().filter(|record| record.status == Status::Failed).count();
        let wall_ns: u64 = records.iter().map(|record| record.wall_ns).sum();
        let last = records.iter().map(|record| record.started_at.as_str()).max().unwrap_or_default();
        let (cells, failed, time) = (records.len(), failed, units::nanoseconds(wall_ns as f64));
        vec![task.into(), host.into(), cells.to_string(), failed.to_string(), time, last.into()]
    }));
    Some(table::lines(rows))
}

/// Records in parts whose times may stand in one table: those of one kind of machine, with as many threads. Each has its name.
/// What no processes shared is as its environment says.
pub fn by_machine(records: Vec<Record>, environment: &Value) -> Vec<(String, Vec<Record>)> {
    let fact = |object: &str, name: &str| environment[object][name].clone();
    let alone = (fact("machine", "cpu"), fact("run", "threads"), fact("run", "isa_path"));
    let mut parts: BTreeMap<String, Vec<Record>> = BTreeMap::new();
    for record in records {
        let (cpu, threads, path) = match &record.worker {
            Some(worker) => (worker.cpu.clone().into(), record.threads.into(), record.isa_path.clone().into()),
            None => alone.clone(),
        };
        let text = |fact: Value| fact.as_str().map_or_else(|| fact.to_string(), String::from);
        let name = format!("{}, {} threads, {}", text(cpu), text(threads), text(path));
        parts.entry(name).or_default().push(record);
    }
    parts.into_iter().collect()
}

/// Where a record's times were measured, and by which of the processes that shared a run.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Machine {
    process: Option<Worker>,
    isa_path: String,
    threads: usize,
}

/// See [`Machine`].
pub fn machine(record: &Record) -> Machine {
    Machine { process: record.worker.clone(), isa_path: record.isa_path.clone(), threads: record.threads }
}

/// Whether a ratio of the two records' times says something: they were measured on one machine, by one process, with as many
/// threads.
pub fn same_machine(a: &Record, b: &Record) -> bool {
    machine(a) == machine(b)
}

/// What no ratio is formed of although it would be on one machine: comparisons that one process began and another ended
/// elsewhere.
pub fn divided(records: &[Record]) -> Option<String> {
    let mut comparisons: BTreeMap<String, Vec<&Record>> = BTreeMap::new();
    for record in records.iter().filter(|record| record.worker.is_some()) {
        comparisons.entry(record.cell.without_choice().id()).or_default().push(record);
    }
    let divided: Vec<&Vec<&Record>> =
        comparisons.values().filter(|records| records.iter().any(|record| !same_machine(record, records[0]))).collect();
    let first = divided.first()?;
    let of = |worker: &Worker| {
        let is_named = worker.process == 0 || worker.task == worker.process.to_string();
        let process = if is_named { String::new() } else { format!(" (process {})", worker.process) };
        format!("task {}{process} on '{}'", worker.task, worker.host)
    };
    let processes: BTreeSet<String> = first.iter().filter_map(|record| record.worker.as_ref()).map(of).collect();
    let processes = processes.into_iter().collect::<Vec<_>>().join(" and ");
    Some(format!(
        "{} of the comparisons were measured partly by one process and partly by another; no ratio is formed across them. The \
         first is that of '{}', by {processes}",
        divided.len(),
        first[0].cell.label()
    ))
}

#[cfg(test)]
mod tests {
    use super::super::baseline;
    use super::super::samples::evicted;
    use super::*;

    fn by(task: &str, host: &str, cpu: &str, record: Record) -> Record {
        Record { worker: Some(Worker { task: task.into(), process: 1, host: host.into(), cpu: cpu.into() }), ..record }
    }

    #[test]
    fn no_ratio_is_of_two_machines() {
        let of = |context: usize, policy: &str| evicted(context, policy, 0.5);
        let records = [
            by("7_1", "a", "EPYC", of(4096, "full")),
            by("7_1", "a", "EPYC", of(4096, "knorm")),
            by("7_2", "b", "EPYC", of(4096, "h2o")),
            by("7_2", "b", "EPYC", of(8192, "full")),
            by("7_1", "a", "Xeon", of(8192, "knorm")),
            by("7_2", "b", "EPYC", of(8192, "h2o")),
            by("7_3", "b", "EPYC", of(8192, "tova")),
        ];
        let all: Vec<&Record> = records.iter().collect();
        let has_ratio = |index: usize| baseline::speed_up(all[index], &all).is_some();
        // Nor of two processes on one machine.
        assert_eq!([1, 2, 4, 5, 6].map(has_ratio), [true, false, false, true, false]);
        let said = divided(&records).unwrap();
        assert!(
            said.starts_with("2 of the comparisons")
                && said.contains("by task 7_1 (process 1) on 'a' and task 7_2 (process 1) on 'b'"),
            "{said}"
        );
        assert_eq!(divided(&records[..2]), None);
        let parts = by_machine(records.to_vec(), &Value::Null);
        assert_eq!(parts.iter().map(|(_, records)| records.len()).collect::<Vec<_>>(), [6, 1]);
        assert!(parts[1].0.starts_with("Xeon, 2 threads, "), "{}", parts[1].0);
    }

    #[test]
    fn each_task_has_its_line() {
        let mut failed = by("7_2", "b", "EPYC", evicted(8192, "h2o", 0.5));
        failed.status = Status::Failed;
        let records = [by("7_1", "a", "EPYC", evicted(4096, "full", 0.5)), failed.clone(), failed];
        let text = by_task(&records).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        let words =
            |line: &str| line.split_whitespace().filter(|word| *word != "|").take(4).collect::<Vec<_>>().join(" ");
        assert_eq!([words(lines[2]), words(lines[3])], ["7_1 a 1 0", "7_2 b 2 2"]);
        assert_eq!(by_task(&[evicted(4096, "full", 0.5)]), None);
    }
}
