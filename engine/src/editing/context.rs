//! Facts in the context, for an edited model to be compared with: all of them, in a cache that is full or that a policy has
//! evicted from before it sees a question; or those nearest to the question alone.

use super::{EditError, Encoder, Fact, Informed, Maps};
use crate::episodic::matrix::cosine;
use crate::memory::Arena;
use crate::model::{Decoder, Eviction, Setup, likeliest};
use crate::tensor::DType;

/// Questions that go through the model together, behind one context.
const TOGETHER: usize = 8;
/// Tokens of a context that do.
const CHUNK_TOKENS: usize = 512;

/// A model that has read every fact.
pub struct InContext<'a> {
    encoder: &'a Encoder<'a>,
    eviction: Option<Eviction<'a>>,
    facts: Vec<Fact>,
    decoder: Decoder<'a>,
}

impl<'a> InContext<'a> {
    /// Before it has read anything; context and question will be at most `most_tokens` long together.
    ///
    /// # Errors
    /// When the model cannot read so many tokens, or the arena has no room.
    pub fn new(
        encoder: &'a Encoder<'a>,
        eviction: Option<Eviction<'a>>,
        most_tokens: usize,
        arena: &'a Arena,
    ) -> Result<Self, EditError> {
        encoder.model.check_length(most_tokens)?;
        let setup = Setup {
            batch: 1 + TOGETHER,
            chunk_tokens: CHUNK_TOKENS.min(most_tokens),
            columns: eviction.map_or(&[], |eviction| eviction.policy.columns()),
            ..Setup::of(most_tokens, DType::F32)
        };
        let decoder = Decoder::new(encoder.model, setup, encoder.cpu, arena)?;
        Ok(InContext { encoder, eviction, facts: Vec::new(), decoder })
    }

    /// Tokens of these facts as a context.
    ///
    /// # Errors
    /// When the tokenizer has no token for a part of them.
    pub fn tokens(encoder: &Encoder<'_>, facts: &[Fact]) -> Result<Vec<u32>, EditError> {
        encoder.prompt(&facts.iter().map(Fact::statement).collect::<String>())
    }

    /// Reads all facts from the first on, and lets the policy evict.
    fn reread(&mut self) -> Result<(), EditError> {
        self.decoder.clear();
        let context = Self::tokens(self.encoder, &self.facts)?;
        if let Some(eviction) = self.eviction.filter(|_| !self.facts.is_empty()) {
            self.decoder.evict(eviction, &[context.len(); 1 + TOGETHER])?;
        }
        let mut tokens = [&[][..]; 1 + TOGETHER];
        tokens[0] = &context;
        Ok(self.decoder.prefill(&tokens, |_, _, _| ())?)
    }
}

impl Informed for InContext<'_> {
    fn write(&mut self, facts: &[Fact]) -> Result<(), EditError> {
        let is_new = self.facts.is_empty();
        self.facts.extend_from_slice(facts);
        // What was evicted by the facts before is not what these would have had evicted.
        if is_new || self.eviction.is_some() {
            return self.reread();
        }
        let statements: String = facts.iter().map(Fact::statement).collect();
        let mut tokens = [&[][..]; 1 + TOGETHER];
        let read = self.encoder.piece(&statements)?;
        tokens[0] = &read;
        Ok(self.decoder.follow(&tokens, |_, _, _| ())?)
    }

    fn forget(&mut self, facts: &[Fact]) -> Result<(), EditError> {
        self.facts.retain(|fact| !facts.contains(fact));
        self.reread()
    }

    fn answer(&mut self, questions: &[String], _scoped: bool) -> Result<Vec<u32>, EditError> {
        let mut answers = Vec::with_capacity(questions.len());
        for questions in questions.chunks(TOGETHER) {
            let read = questions.iter().map(|text| self.encoder.piece(text)).collect::<Result<Vec<_>, _>>()?;
            let mut tokens = [&[][..]; 1 + TOGETHER];
            for (slot, read) in read.iter().enumerate() {
                self.decoder.fork(0, 1 + slot)?;
                tokens[1 + slot] = read;
            }
            let mut answered: [_; 1 + TOGETHER] = std::array::from_fn(|_| Ok(0));
            self.decoder.follow(&tokens, |sequence, _, logits| answered[sequence] = likeliest(logits))?;
            (1..=TOGETHER).for_each(|slot| self.decoder.free(slot));
            for answer in answered.into_iter().skip(1).take(questions.len()) {
                answers.push(answer?);
            }
        }
        Ok(answers)
    }

    fn has_scope(&self) -> bool {
        false
    }

    fn held_bytes(&self) -> u64 {
        self.decoder.sequence_kv_bytes(0)
    }
}

/// A model that reads the facts nearest to each question, found by the encoder of a memory's maps.
pub struct Retrieval<'a> {
    encoder: &'a Encoder<'a>,
    maps: &'a Maps,
    count: usize,
    facts: Vec<(Vec<f64>, Fact)>,
}

impl<'a> Retrieval<'a> {
    /// Before it was told anything; it reads `count` facts with a question.
    pub fn new(encoder: &'a Encoder<'a>, maps: &'a Maps, count: usize) -> Self {
        Retrieval { encoder, maps, count, facts: Vec::new() }
    }
}

impl Informed for Retrieval<'_> {
    fn write(&mut self, facts: &[Fact]) -> Result<(), EditError> {
        let encoded = self.encoder.facts(facts)?;
        self.facts.extend(encoded.iter().map(|encoded| self.maps.encoding(encoded)).zip(facts.iter().cloned()));
        Ok(())
    }

    fn forget(&mut self, facts: &[Fact]) -> Result<(), EditError> {
        self.facts.retain(|(_, fact)| !facts.contains(fact));
        Ok(())
    }

    fn answer(&mut self, questions: &[String], scoped: bool) -> Result<Vec<u32>, EditError> {
        let prompt = |(cue, question): (Vec<f64>, &String)| {
            let distances = self.facts.iter().map(|(encoding, fact)| (1.0 - cosine(encoding, &cue), fact));
            let mut near: Vec<_> = distances.filter(|(far, _)| !scoped || *far <= self.maps.threshold).collect();
            // The nearest one last, just before the question.
            near.sort_by(|a, b| b.0.total_cmp(&a.0));
            let read = near.iter().skip(near.len().saturating_sub(self.count)).map(|(_, fact)| fact.statement());
            self.encoder.prompt(&format!("{}{question}", read.collect::<String>()))
        };
        let cues = self.encoder.questions(questions)?;
        let cues = cues.iter().map(|cue| self.maps.encoding(cue));
        let prompts = cues.zip(questions).map(prompt).collect::<Result<Vec<_>, _>>()?;
        self.encoder.answers(&prompts, &vec![None; prompts.len()])
    }

    fn has_scope(&self) -> bool {
        true
    }

    fn held_bytes(&self) -> u64 {
        let of = |(encoding, fact): &(Vec<f64>, Fact)| 8 * encoding.len() + fact.statement().len();
        self.facts.iter().map(of).sum::<usize>() as u64
    }
}
