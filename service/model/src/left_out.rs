//! Text that a model does not read.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::request::Request;

/// The end of a text that a model does not read: the text is longer than its limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// The field of the text: `prompt`, `lyrics`.
    pub field: Cow<'static, str>,
    /// Tokens that are left out.
    pub tokens: usize,
    /// Tokens that are read, with those that the model adds.
    pub limit: usize,
    /// The field that sets the limit; `None` for one of the model.
    pub set_by: Option<Cow<'static, str>>,
}

impl LeftOut {
    /// The end of a prompt that the model does not read: `tokens` beyond the request's limit. `None` for 0 tokens, or where
    /// they were not counted.
    pub fn of_prompt(tokens: Option<usize>, request: &Request) -> Option<LeftOut> {
        let tokens = tokens.filter(|tokens| *tokens > 0)?;
        Some(LeftOut {
            field: "prompt".into(),
            tokens,
            limit: request.max_sequence_length as usize,
            set_by: Some("max_sequence_length".into()),
        })
    }
}

impl std::fmt::Display for LeftOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (last, are) = match self.tokens {
            1 => ("last token".to_owned(), "is"),
            several => (format!("last {several} tokens"), "are"),
        };
        write!(
            f,
            "the {last} of the {} {are} left out: the model reads {}",
            self.field, self.limit
        )?;
        match &self.set_by {
            Some(field) => write!(f, " ({field})"),
            None => Ok(()),
        }
    }
}
