//! The settings of sampling that a client, a recipe or a model's folder states.

use serde::{Deserialize, Serialize};

use crate::request::{Request, RequestError};
use crate::sampler::Sampler;

/// Maximum of denoising steps.
pub const MAX_STEPS: u32 = 200;
/// Maximum tokens of a prompt, as in the references.
pub const MAX_TOKENS: u32 = 512;
/// Maximum of cards that sample together.
pub const MAX_CARDS: u32 = 2;
/// Maximum length of a prompt in bytes, as UTF-8; far more than its tokens can hold: 10,000 characters of four bytes.
pub const MAX_PROMPT_BYTES: usize = 40_000;

/// The fields of sampling that requests of all media have. [`Sampling::or`] fills a field that is `None` from the next set of
/// defaults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    pub steps: Option<u32>,
    pub guidance: Option<f32>,
    pub negative_prompt: Option<String>,
    pub true_guidance: Option<f32>,
    pub sampler: Option<Sampler>,
    pub step_cache: Option<f32>,
    pub fp8_attention: Option<bool>,
    pub cards: Option<u32>,
    pub seed: Option<u64>,
    pub max_sequence_length: Option<u32>,
    pub strength: Option<f32>,
}

impl Sampling {
    /// The fields that are set in `self`, else those of `other`.
    #[must_use]
    pub fn or(self, other: Sampling) -> Sampling {
        Sampling {
            steps: self.steps.or(other.steps),
            guidance: self.guidance.or(other.guidance),
            negative_prompt: self.negative_prompt.or(other.negative_prompt),
            true_guidance: self.true_guidance.or(other.true_guidance),
            sampler: self.sampler.or(other.sampler),
            step_cache: self.step_cache.or(other.step_cache),
            fp8_attention: self.fp8_attention.or(other.fp8_attention),
            cards: self.cards.or(other.cards),
            seed: self.seed.or(other.seed),
            max_sequence_length: self.max_sequence_length.or(other.max_sequence_length),
            strength: self.strength.or(other.strength),
        }
    }

    /// The request, with the fields that are set in `self` in place of its own.
    #[must_use]
    pub fn over(self, request: Request) -> Request {
        // All fields are named here, so that a new one is not forgotten.
        let Sampling {
            steps,
            guidance,
            negative_prompt,
            true_guidance,
            sampler,
            step_cache,
            fp8_attention,
            cards,
            seed,
            max_sequence_length,
            strength,
        } = self;
        Request {
            steps: steps.unwrap_or(request.steps),
            guidance: guidance.unwrap_or(request.guidance),
            negative_prompt: negative_prompt.or(request.negative_prompt),
            true_guidance: true_guidance.unwrap_or(request.true_guidance),
            sampler: sampler.or(request.sampler),
            step_cache: step_cache.unwrap_or(request.step_cache),
            fp8_attention: fp8_attention.unwrap_or(request.fp8_attention),
            cards: cards.unwrap_or(request.cards),
            seed: seed.unwrap_or(request.seed),
            max_sequence_length: max_sequence_length.unwrap_or(request.max_sequence_length),
            strength: strength.unwrap_or(request.strength),
            ..request
        }
    }

    /// The texts among the fields, by field: a text may be as long as a prompt.
    pub fn texts(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let texts = [("negative_prompt", &self.negative_prompt)];
        texts
            .into_iter()
            .filter_map(|(field, text)| Some((field, text.as_deref()?)))
    }
}

/// Fields of sampling that are out of bounds.
pub(crate) fn sampling_problems(request: &Request) -> Vec<RequestError> {
    let mut problems = Vec::new();
    let mut refuse = |field: &str, problem: String| problems.push(RequestError::new(field, problem));
    if !(1..=MAX_STEPS).contains(&request.steps) {
        let found = request.steps;
        refuse("steps", format!("is {found}; 1 to {MAX_STEPS} is expected"));
    }
    if !(0.0..=1000.0).contains(&request.guidance) {
        let found = request.guidance;
        refuse("guidance", format!("is {found}; 0 to 1000 is expected"));
    }
    if !(0.0..=1000.0).contains(&request.true_guidance) {
        let found = request.true_guidance;
        let expected = "0 to 1000 is expected, and over 1 for two passes";
        refuse("true_guidance", format!("is {found}; {expected}"));
    }
    if !(0.0..=1.0).contains(&request.step_cache) {
        let found = request.step_cache;
        refuse("step_cache", format!("is {found}; 0 to 1 is expected"));
    }
    if !(1..=MAX_CARDS).contains(&request.cards) {
        let found = request.cards;
        refuse("cards", format!("is {found}; 1 to {MAX_CARDS} is expected"));
    }
    if !(1..=MAX_TOKENS).contains(&request.max_sequence_length) {
        let found = request.max_sequence_length;
        refuse(
            "max_sequence_length",
            format!("is {found}; 1 to {MAX_TOKENS} is expected"),
        );
    }
    let negative = request.negative_prompt.as_deref().unwrap_or_default();
    for (field, text) in [("prompt", request.prompt.as_str()), ("negative_prompt", negative)] {
        let found = text.len();
        if found > MAX_PROMPT_BYTES {
            refuse(
                field,
                format!("has {found} bytes; at most {MAX_PROMPT_BYTES} are expected"),
            );
        }
    }
    problems
}
