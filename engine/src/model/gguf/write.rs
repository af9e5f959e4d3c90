//! The header of a file that is written: metadata key by key, and where each tensor will lie.

use super::Gguf;
use super::container::ALIGNMENT;
use serde_json::Value;

/// Metadata as bytes.
pub struct Keys {
    count: u64,
    bytes: Vec<u8>,
}

impl Keys {
    pub fn new() -> Self {
        Keys { count: 0, bytes: Vec::new() }
    }

    /// Those of another file, to the bit, without some.
    pub fn of_file(file: &Gguf, without: &[&str]) -> Self {
        let mut keys = Keys::new();
        for (key, bytes) in file.raw_keys().iter().filter(|(key, _)| !without.contains(&key.as_str())) {
            keys.count += 1;
            text(&mut keys.bytes, key);
            keys.bytes.extend(*bytes);
        }
        keys
    }

    /// Adds a key. Whole numbers become u32, in lists i32, and others f32.
    pub fn put(&mut self, key: &str, value: &Value) {
        self.count += 1;
        text(&mut self.bytes, key);
        self.bytes.extend(kind(value).to_le_bytes());
        put(&mut self.bytes, value);
    }
}

fn text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

/// The number of a value's kind.
fn kind(value: &Value) -> u32 {
    match value {
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        value if value.is_u64() => 4,
        _ => 6,
    }
}

fn put(to: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Bool(flag) => to.push(u8::from(*flag)),
        Value::String(string) => text(to, string),
        Value::Array(values) => {
            let of = values.first().map_or(5, |first| if first.is_u64() { 5 } else { kind(first) });
            to.extend(of.to_le_bytes());
            to.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| put(to, value));
        }
        value => match value.as_u64() {
            Some(count) => to.extend((count as u32).to_le_bytes()),
            None => to.extend((value.as_f64().unwrap_or_default() as f32).to_le_bytes()),
        },
    }
}

/// All before the first tensor's bytes. Tensors have a name, extents with the rows first, the number of their type and their
/// bytes; each begins at a multiple of the alignment, the first at the end of what is returned.
pub fn header(keys: &Keys, tensors: &[(String, Vec<usize>, u32, usize)]) -> Vec<u8> {
    let mut to = b"GGUF".to_vec();
    to.extend(3u32.to_le_bytes());
    to.extend((tensors.len() as u64).to_le_bytes());
    to.extend(keys.count.to_le_bytes());
    to.extend(&keys.bytes);
    let mut offset = 0;
    for (name, shape, number, bytes) in tensors {
        text(&mut to, name);
        to.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&extent| to.extend((extent as u64).to_le_bytes()));
        to.extend(number.to_le_bytes());
        to.extend((offset as u64).to_le_bytes());
        offset = padded(offset + bytes);
    }
    to.resize(padded(to.len()), 0);
    to
}

/// Up to the next multiple of the alignment.
pub fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT as usize)
}
