//! Records of earlier programs: fields that only have another name now are read under it, and intervals that are defined otherwise now
//! are made again from their samples, so that old runs can still be drawn, and beside new ones.

use super::answers::Estimate;
use super::record::Record;
use crate::stats::median_with_interval;
use serde_json::Value;
use std::collections::HashMap;

/// The schema before the current one.
const V2: &str = "kvsieve/cell/v2";
/// Object, field as it was, and as it is.
const RENAMED: &[(&str, &str, &str)] = &[
    ("", "products", "gemm"),
    ("/refused", "asked_bytes", "requested_bytes"),
    ("/serving", "token_share", "token_fraction"),
    ("/serving", "reserved_share", "reserved_fraction"),
    ("/serving", "internal_share", "internal_fraction"),
    ("/serving", "external_share", "external_fraction"),
];

/// Makes a record of [`V2`] one of the current schema.
pub(super) fn renew(record: &mut Value) {
    if record["schema"] != V2 {
        return;
    }
    for &(object, before, now) in RENAMED {
        let Some(fields) = record.pointer_mut(object).and_then(Value::as_object_mut) else { continue };
        if let Some(value) = fields.remove(before) {
            fields.insert(now.into(), value);
        }
    }
    record["schema"] = super::record::SCHEMA.into();
}

/// What is found otherwise now: intervals of times, of scores and of their differences from the full cache's, as they are defined now: of records that have them so
/// already nothing changes.
pub(super) fn renew_found(records: &mut [Record]) {
    // Of keys in codes the mass was that of the codes.
    for record in records.iter_mut().filter(|record| record.cell.kv_format().k.dtype().is_none()) {
        let Some(eviction) = &mut record.eviction else { continue };
        eviction.attention_mass_kept = None;
        eviction.steps.iter_mut().for_each(|step| step.attention_mass_kept = None);
    }
    for latency in records.iter_mut().flat_map(|record| record.latency.values_mut()) {
        if !latency.samples_ns.is_empty() {
            let values: Vec<f64> = latency.samples_ns.iter().map(|&ns| ns as f64).collect();
            (latency.median_ns, latency.ci95_low_ns, latency.ci95_high_ns) = median_with_interval(&values);
        }
    }
    let scores = |record: &Record| {
        record.answers.as_ref().map(|answers| answers.sample_scores.clone()).filter(|scores| !scores.is_empty())
    };
    let is_plain = |record: &&Record| {
        let cell = &record.cell;
        cell.policy.as_deref() == Some("full")
            && cell.kv_format.is_none()
            && cell.weights.is_none()
            && cell.activations.is_none()
    };
    let full = records.iter().filter(is_plain);
    let full: HashMap<String, Vec<f64>> =
        full.filter_map(|record| Some((record.cell.without_choice().id(), scores(record)?))).collect();
    for record in records {
        let Some(own) = scores(record) else { continue };
        let full = full.get(&record.cell.without_choice().id()).filter(|full| full.len() == own.len());
        let Some(answers) = &mut record.answers else { continue };
        answers.accuracy = answers.accuracy.and(Estimate::of_shares(&[&own]));
        if let (Some(_), Some(full)) = (answers.accuracy_difference, full) {
            let differences = own.iter().zip(full).map(|(own, full)| own - full).collect();
            answers.accuracy_difference = Estimate::of_differences(differences);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::experiment::record::SCHEMA;
    use crate::experiment::store;
    use std::path::Path;

    #[test]
    fn the_reference_runs_are_read() {
        let folders = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("results/reference")).unwrap();
        let folders = folders.map(|entry| entry.unwrap().path()).filter(|folder| folder.join(store::CELLS).exists());
        let (mut simulated, mut scores) = (0, 0);
        for folder in folders {
            let (records, _) = store::read(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
            assert!(records.iter().all(|record| record.schema == SCHEMA), "{}", folder.display());
            // Scores that are all alike have an interval too, whenever they were recorded.
            let answers = records.iter().filter_map(|record| record.answers.as_ref());
            let scored =
                answers.filter(|answers| !answers.sample_scores.is_empty()).filter_map(|answers| answers.accuracy);
            assert!(scored.clone().all(|score| score.ci95_low < score.ci95_high), "{}", folder.display());
            scores += scored.count();
            for usage in records.iter().filter_map(|record| record.serving.as_ref()) {
                let sum =
                    usage.token_fraction + usage.reserved_fraction + usage.internal_fraction + usage.external_fraction;
                assert!((sum - 1.0).abs() < 1e-9, "{sum}");
                simulated += 1;
            }
        }
        assert!(simulated > 0, "the run paging-waste is one of them");
        assert!(scores > 100, "eval-builtin is one of them");
    }
}
