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
