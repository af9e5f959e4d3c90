//! Which tokens of a sequence each rank holds.

use super::RankError;
use std::ops::Range;

/// How tokens are dealt to ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// One chunk for each rank, in order.
    Contiguous,
    /// `2 N` chunks for `N` ranks, of which rank `r` holds chunks `r` and `2 N - 1 - r`: under a causal mask each rank has as much
    /// to compute as any other, in every step of a ring (zig-zag, as in zhuzilin's ring-flash-attention and Megatron-LM's
    /// context parallelism).
    ZigZag,
}

/// The tokens of a sequence, dealt to ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shards {
    tokens: usize,
    ranks: usize,
    placement: Placement,
}

impl Shards {
    /// Deals `tokens` to `ranks`. Chunks differ by a token where they do not divide.
    ///
    /// # Errors
    /// When a chunk would be empty.
    pub fn new(tokens: usize, ranks: usize, placement: Placement) -> Result<Self, RankError> {
        let shards = Shards { tokens, ranks, placement };
        let least = shards.chunks();
        if ranks == 0 || tokens < least {
            return Err(RankError::Unsupported(format!(
                "{tokens} tokens cannot be shared by {ranks} ranks; at least {least} tokens and 1 rank are needed"
            )));
        }
        Ok(shards)
    }

    fn chunks(&self) -> usize {
        match self.placement {
            Placement::Contiguous => self.ranks,
            Placement::ZigZag => 2 * self.ranks,
        }
    }

    fn chunk(&self, index: usize) -> Range<usize> {
        let start = |index: usize| (index as u128 * self.tokens as u128 / self.chunks() as u128) as usize;
        start(index)..start(index + 1)
    }

    /// Tokens of the sequence.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The tokens of a rank, as ascending ranges; they lie one behind another in its tensors.
    pub fn of(&self, rank: usize) -> Vec<Range<usize>> {
        let first = self.chunk(rank);
        let last = self.chunk(self.chunks() - 1 - rank);
        match self.placement {
            Placement::Contiguous => vec![first],
            // The chunks in the middle are neighbours.
            Placement::ZigZag if first.end == last.start => {
                let both = first.start..last.end;
                vec![both]
            }
            Placement::ZigZag => vec![first, last],
        }
    }

    /// How many tokens a rank holds.
    pub fn len(&self, rank: usize) -> usize {
        self.of(rank).iter().map(Range::len).sum()
    }

    /// The most that any rank holds.
    pub fn most(&self) -> usize {
        (0..self.ranks).map(|rank| self.len(rank)).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::pieces::pieces;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_token_is_dealt_once_and_evenly(tokens in 1usize..500, ranks in 1usize..9, zigzag: bool) {
            let placement = if zigzag { Placement::ZigZag } else { Placement::Contiguous };
            let Ok(shards) = Shards::new(tokens, ranks, placement) else {
                prop_assert!(tokens < 2 * ranks);
                return Ok(());
            };
            let mut dealt: Vec<usize> = (0..ranks).flat_map(|rank| shards.of(rank)).flatten().collect();
            dealt.sort_unstable();
            prop_assert_eq!(dealt, (0..tokens).collect::<Vec<_>>());
            for rank in 0..ranks {
                prop_assert!(shards.len(rank).abs_diff(tokens / ranks) <= 2 && shards.len(rank) > 0);
                prop_assert!(shards.of(rank).windows(2).all(|pair| pair[0].end < pair[1].start));
            }
        }
    }

    /// Pairs of queries and keys that a rank computes in each step differ by no more than the diagonals do.
    #[test]
    fn zigzag_balances_causal_work() {
        let (tokens, ranks) = (4096, 4);
        let shards = Shards::new(tokens, ranks, Placement::ZigZag).unwrap();
        let work = |rank: usize, source: usize| -> usize {
            let pieces = pieces(true, [tokens; 2], &shards.of(rank), &shards.of(source));
            let pairs = |piece: &crate::ranks::pieces::Piece| match piece.causal {
                true => (0..piece.q.len()).map(|i| (i + 1 + piece.k.len()).saturating_sub(piece.q.len())).sum(),
                false => piece.q.len() * piece.k.len(),
            };
            pieces.iter().map(pairs).sum()
        };
        for step in 0..ranks {
            let of_ranks: Vec<usize> = (0..ranks).map(|rank| work(rank, (rank + ranks - step) % ranks)).collect();
            assert!(of_ranks.iter().all(|&pairs| pairs == of_ranks[0]), "step {step}: {of_ranks:?}");
        }
    }
}
