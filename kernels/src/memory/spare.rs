//! Small mappings that an arena got back, for the next allocation of their size.
//!
//! A judgement after each token takes scratch of the same sizes every time; to map and unmap that costs more than the
//! judgement's own work. What is kept is at most 4 MiB of resident memory that no label counts.

use memmap2::{MmapMut, MmapOptions};

/// Bytes at most that are kept.
const SPARE_BYTES: usize = 4 << 20;
/// Larger mappings go back to the system at once.
const LARGEST_BYTES: usize = 1 << 20;
const PAGE_BYTES: usize = 4096;

/// Mappings that were given back, the latest last.
#[derive(Default)]
pub(super) struct Spare {
    mappings: Vec<MmapMut>,
    bytes: usize,
}

impl Spare {
    /// At least `bytes` zeroed bytes that were kept; `None` where none of their size are.
    pub fn take(&mut self, bytes: usize) -> Option<MmapMut> {
        let bytes = whole_pages(bytes);
        let at = self.mappings.iter().rposition(|mapping| mapping.len() == bytes)?;
        self.bytes -= bytes;
        let mut mapping = self.mappings.remove(at);
        mapping.fill(0);
        Some(mapping)
    }

    /// Keeps a mapping, and lets the oldest go that there is no room for then.
    pub fn give(&mut self, mapping: MmapMut) {
        if mapping.len() > LARGEST_BYTES {
            return;
        }
        self.bytes += mapping.len();
        self.mappings.push(mapping);
        while self.bytes > SPARE_BYTES {
            self.bytes -= self.mappings.remove(0).len();
        }
    }
}

/// At least so many zeroed bytes from the system, all resident.
pub(super) fn map(bytes: usize) -> std::io::Result<MmapMut> {
    MmapOptions::new().len(whole_pages(bytes)).populate().map_anon()
}

fn whole_pages(bytes: usize) -> usize {
    bytes.max(1).div_ceil(PAGE_BYTES).saturating_mul(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_was_used_before_is_zero_and_little_of_it_is_kept() {
        let mut spare = Spare::default();
        for bytes in [1, PAGE_BYTES + 1, LARGEST_BYTES, LARGEST_BYTES + 1] {
            let mut mapping = map(bytes).unwrap();
            mapping.fill(7);
            spare.give(mapping);
            let again = spare.take(bytes);
            assert_eq!(again.is_some(), bytes <= LARGEST_BYTES, "{bytes}");
            assert!(again.iter().flat_map(|mapping| mapping.iter()).all(|&byte| byte == 0), "{bytes}");
        }
        assert_eq!((spare.mappings.len(), spare.bytes), (0, 0));
        (0..6).for_each(|_| spare.give(map(LARGEST_BYTES).unwrap()));
        assert_eq!((spare.mappings.len(), spare.bytes), (SPARE_BYTES / LARGEST_BYTES, SPARE_BYTES));
    }
}
