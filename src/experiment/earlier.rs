//! Records of earlier schemas: fields that only have another name now are read under it, so that old runs can still be drawn.

use serde_json::Value;

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

#[cfg(test)]
mod tests {
    use crate::experiment::record::SCHEMA;
    use crate::experiment::store;
    use std::path::Path;

    #[test]
    fn the_reference_runs_are_read() {
        let folders = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("results/reference")).unwrap();
        let folders = folders.map(|entry| entry.unwrap().path()).filter(|folder| folder.join(store::CELLS).exists());
        let mut simulated = 0;
        for folder in folders {
            let (records, _) = store::read(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
            assert!(records.iter().all(|record| record.schema == SCHEMA), "{}", folder.display());
            for usage in records.iter().filter_map(|record| record.serving.as_ref()) {
                let sum =
                    usage.token_fraction + usage.reserved_fraction + usage.internal_fraction + usage.external_fraction;
                assert!((sum - 1.0).abs() < 1e-9, "{sum}");
                simulated += 1;
            }
        }
        assert!(simulated > 0, "the run paging-waste is one of them");
    }
}
