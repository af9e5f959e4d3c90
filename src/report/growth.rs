//! Caches that grow while tokens are decoded: what a policy that evicts once holds then is no longer what its budget says, and it
//! is compared with those that hold as much.

use crate::experiment::record::Record;

/// A cache grows where it ends with more than so many times its bytes behind prefill.
const GROWTH: f64 = 1.5;
/// How many times as much as the least that any holds at the end is too much to be compared with it.
const TOO_MUCH: f64 = 2.0;

/// KV bytes in use at the end of decoding; `None` without an eviction or without steps.
pub fn end_bytes(record: &Record) -> Option<u64> {
    Some(record.eviction.as_ref()?.steps.last()?.kv_bytes_live)
}

/// Mean KV bytes in use while decoding, or, without steps, behind prefill.
pub fn mean_bytes(record: &Record) -> Option<f64> {
    let eviction = record.eviction.as_ref()?;
    let steps = eviction.steps.iter().map(|step| step.kv_bytes_live as f64);
    let count = eviction.steps.len();
    Some(if count == 0 { eviction.kv_bytes_live as f64 } else { steps.sum::<f64>() / count as f64 })
}

/// Whether a cache grows and ends with far more bytes than that of some other of `rivals`.
pub fn outgrows<'a>(record: &Record, mut rivals: impl Iterator<Item = &'a Record>) -> bool {
    let (Some(end), Some(eviction)) = (end_bytes(record).map(|bytes| bytes as f64), &record.eviction) else {
        return false;
    };
    let is_far_less = |rival: &Record| end_bytes(rival).is_some_and(|bytes| end > TOO_MUCH * bytes as f64);
    end > GROWTH * eviction.kv_bytes_live as f64 && rivals.any(is_far_less)
}
