//! `paged`: pages taken as tokens come, anywhere in the pool (vLLM, arXiv 2309.06180).
//!
//! Any free page is as good as any other, so the allocator is the number of free pages. A request starts when there are
//! pages for its prompt and one token more and a share of the pool still stays free, so that those who run can grow, as
//! in vLLM, whose share is rounded down to whole pages.

use super::{Holding, Pool, Request, Strategy, StrategyEntry};
use crate::named::Parameter;

/// Tokens of a page where nothing else is said: vLLM's default.
pub const DEFAULT_PAGE_TOKENS: usize = 16;

/// At least one of so many pages stays free when a request starts: vLLM's watermark of 1%.
const WATERMARK: usize = 100;

/// The registry entry.
pub const ENTRY: StrategyEntry = StrategyEntry {
    name: "paged",
    about: "Pages taken as tokens come, anywhere in the pool (vLLM)",
    parameters: &[Parameter { name: "page", default: "16", about: "tokens of a page" }],
    build: |named, Pool { slots, .. }| {
        let page_tokens = named.count("page", DEFAULT_PAGE_TOKENS, 1)?;
        let pages = slots / page_tokens;
        Ok(Box::new(Paged { page_tokens, watermark: pages / WATERMARK, free: pages }))
    },
};

struct Paged {
    page_tokens: usize,
    /// Pages that a request leaves free when it starts.
    watermark: usize,
    /// Pages that are free.
    free: usize,
}

impl Paged {
    fn take(&mut self, pages: usize, spare: usize) -> bool {
        let enough = pages + spare <= self.free;
        self.free -= if enough { pages } else { 0 };
        enough
    }
}

impl Strategy for Paged {
    fn admit(&mut self, request: Request) -> Option<Holding> {
        let pages = (request.prompt_tokens + 1).div_ceil(self.page_tokens);
        let slots = pages * self.page_tokens;
        self.take(pages, self.watermark).then_some(Holding { granted_tokens: slots, taken_slots: slots, first_slot: 0 })
    }

    fn grow(&mut self, holding: &mut Holding, tokens: usize) -> bool {
        let pages = tokens.saturating_sub(holding.granted_tokens).div_ceil(self.page_tokens);
        if !self.take(pages, 0) {
            return false;
        }
        let slots = holding.taken_slots + pages * self.page_tokens;
        *holding = Holding { granted_tokens: slots, taken_slots: slots, first_slot: 0 };
        true
    }

    fn release(&mut self, holding: Holding) {
        self.free += holding.taken_slots / self.page_tokens;
    }

    fn reserves(&self) -> bool {
        false
    }
}
