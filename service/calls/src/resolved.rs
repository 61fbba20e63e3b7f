//! A model as a request resolved it.

use std::collections::BTreeMap;

use engine::library::{Entry, OpenModel};
use model::{AdapterReport, FULL};
use serde::{Deserialize, Serialize};

/// The model that a request resolved to, with its revision, its formats and its adapters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ResolvedModel {
    /// Identifies the model completely: `owner/name@revision+formats&adapters`.
    pub key: String,
    pub id: String,
    pub revision: String,
    pub family: String,
    /// The format that each component is held in: `full`, `nf4`, `Q4_K`.
    pub formats: BTreeMap<String, String>,
    /// The formats that the service chose, and why; empty where the client named them.
    pub choice: String,
    pub adapters: Vec<AdapterReport>,
}

impl ResolvedModel {
    /// An entry as it was opened.
    pub(crate) fn of(entry: &Entry, open: &OpenModel, choice: String) -> ResolvedModel {
        ResolvedModel {
            key: entry.key.clone(),
            id: entry.id.clone(),
            revision: entry.revision.clone(),
            family: open.model.family().to_owned(),
            formats: formats_of(open),
            choice,
            adapters: open.model.adapters(),
        }
    }
}

/// The format that each component is held in: `full`, `nf4`, `Q4_K`.
pub(crate) fn formats_of(open: &OpenModel) -> BTreeMap<String, String> {
    let format = |name: &str| open.model.format_of(name).map(|format| format.to_string());
    let components = open.components.iter();
    components
        .map(|component| {
            let format = format(&component.name).unwrap_or_else(|| FULL.to_owned());
            (component.name.clone(), format)
        })
        .collect()
}
