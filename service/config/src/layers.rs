//! The layers of the configuration, laid over each other. A value that has the wrong shape for its table or setting is
//! reported once and left out: it would hide every setting of the layers below it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use figment::providers::{Format as _, Toml};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider, Source};

use super::reader::{EMBEDDED, ENVIRONMENT, meant, not_there, variable};
use super::{DEFAULTS, Flags, environment};

/// Settings of a client that belong to the endpoint that they are set beside.
const BOUND: [&str; 3] = ["token_file", "fingerprint", "certificate"];

/// The endpoints that settings of the client belong to: each to the one that is in force where it is set. The layers above may name
/// another endpoint, and would lead a token there.
#[derive(Debug, Default)]
pub(super) struct Bound(BTreeMap<&'static str, String>);

impl Bound {
    /// The endpoint that a setting belongs to; `None` where it is not set.
    pub(super) fn endpoint_of(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }
}

/// Layers, and their mistakes.
pub(super) struct Layers {
    pub(super) bound: Bound,
    /// Settings of [`BOUND`] in the layer that is being laid.
    set_now: BTreeSet<&'static str>,
    pub(super) figment: Figment,
    pub(super) mistakes: Vec<String>,
    /// Every table with its settings.
    known: Dict,
}

/// A layer of values.
struct Layer {
    metadata: Metadata,
    values: Map<Profile, Dict>,
}

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        self.metadata.clone()
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(self.values.clone())
    }
}

impl Layers {
    /// The defaults alone.
    pub(super) fn new() -> Layers {
        let mut layers = Layers {
            bound: Bound::default(),
            set_now: BTreeSet::new(),
            figment: Figment::new(),
            mistakes: Vec::new(),
            known: Dict::new(),
        };
        let defaults = Toml::string(DEFAULTS);
        if let Ok(values) = defaults.data() {
            layers.known = values.into_values().next().unwrap_or_default();
        }
        layers.figment = layers.figment.merge(Layer {
            metadata: Metadata::named("defaults").source(Source::Custom(EMBEDDED.to_owned())),
            values: Map::from([(Profile::Default, layers.known.clone())]),
        });
        layers
    }

    /// Lays the text of a file over the rest.
    ///
    /// # Errors
    /// When it is no TOML.
    pub(super) fn add_file(&mut self, path: &Path, text: &str) -> Result<(), String> {
        let source = path.display().to_string();
        let metadata = Metadata::named("file").source(Source::File(path.to_owned()));
        self.add(metadata, &Toml::string(text), |_| source.clone())?;
        self.bind();
        Ok(())
    }

    /// Lays the variables of the environment over the rest.
    pub(super) fn add_environment(&mut self) {
        let metadata = Metadata::named("variables").source(Source::Custom(ENVIRONMENT.to_owned()));
        if let Err(problem) = self.add(metadata, &environment(), variable) {
            self.mistakes.push(problem);
        }
        self.bind();
    }

    /// Lays flags over the rest, the last over all.
    pub(super) fn add_flags(&mut self, flags: Flags) {
        for (name, value) in flags {
            let problem = match (keys_of(&name), value) {
                _ if name.is_empty() => "names no setting; write --set NAME=VALUE".to_owned(),
                (None, _) => {
                    let settings = names_in("", &self.known);
                    not_there("setting", meant(&name, settings.iter().map(String::as_str)))
                }
                (_, None) => format!("has no value; write --set {name}=VALUE"),
                (Some(keys), Some(value)) => {
                    let metadata = Metadata::named("flag");
                    let values = Map::from([(Profile::Default, nested(keys, value))]);
                    let told = |_: &str| "flag".to_owned();
                    let layer = Layer {
                        metadata: metadata.clone(),
                        values,
                    };
                    match self.add(metadata, &layer, told) {
                        Ok(()) => continue,
                        Err(problem) => problem,
                    }
                }
            };
            self.mistakes.push(format!("{name} (flag): {problem}"));
        }
        self.bind();
    }

    /// Ends a layer: what it sets belongs to the endpoint that is in force now. All flags are one layer, in any order.
    fn bind(&mut self) {
        let endpoint = self
            .figment
            .find_value("client.endpoint")
            .ok()
            .and_then(Value::into_string);
        for name in std::mem::take(&mut self.set_now) {
            self.bound.0.insert(name, endpoint.clone().unwrap_or_default());
        }
    }

    fn add(
        &mut self,
        metadata: Metadata,
        layer: &impl Provider,
        source: impl Fn(&str) -> String,
    ) -> Result<(), String> {
        let mut values = layer.data().map_err(|problem| problem.kind.to_string())?;
        for dict in values.values_mut() {
            let mut misshapen = Vec::new();
            leave_out_misshapen("", dict, &self.known, &mut misshapen);
            let told = misshapen
                .iter()
                .map(|(name, problem)| format!("{name} ({}): {problem}", source(name)));
            self.mistakes.extend(told);
            if let Some(Value::Dict(_, client)) = dict.get("client") {
                let set = BOUND.into_iter().filter(|name| client.contains_key(*name));
                self.set_now.extend(set);
            }
        }
        let layer = Layer { metadata, values };
        self.figment = std::mem::take(&mut self.figment).merge(layer);
        Ok(())
    }
}

/// The place of the `=` between a flag's name and its value: the first that is not in quotes.
pub fn name_and_value(set: &str) -> (&str, Option<&str>) {
    let mut quote = None;
    for (at, character) in set.char_indices() {
        match (quote, character) {
            (None, '=') => return (&set[..at], Some(&set[at + 1..])),
            (None, '"' | '\'') => quote = Some(character),
            (Some(open), close) if open == close => quote = None,
            _ => {}
        }
    }
    // A quote that is never closed is part of the value.
    match set.split_once('=') {
        Some((name, value)) if quote.is_some() => (name, Some(value)),
        _ => (set, None),
    }
}

/// The keys of a setting's name, as in TOML: `a.b`, or `a."b.c"` where a key has dots. `None` if one is empty, or quotes are not closed.
fn keys_of(name: &str) -> Option<Vec<String>> {
    let (mut keys, mut rest) = (Vec::new(), name);
    loop {
        let quote = rest.chars().next().filter(|first| matches!(first, '"' | '\''));
        let (key, after) = match quote {
            Some(quote) => {
                let (key, after) = rest[1..].split_once(quote)?;
                (key, after)
            }
            None => rest.split_at(rest.find('.').unwrap_or(rest.len())),
        };
        if key.is_empty() {
            return None;
        }
        keys.push(key.to_owned());
        match after.strip_prefix('.') {
            Some(more) => rest = more,
            None if after.is_empty() => return Some(keys),
            None => return None,
        }
    }
}

/// A value below these keys.
fn nested(keys: Vec<String>, value: Value) -> Dict {
    let mut keys = keys.into_iter().rev();
    let last = keys.next().unwrap_or_default();
    let innermost = Dict::from([(last, value)]);
    keys.fold(innermost, |inner, key| Dict::from([(key, Value::from(inner))]))
}

/// Removes values of a layer that stand in place of a table, and tables that stand in place of a setting. Adds each to `found`,
/// with its name and the problem.
fn leave_out_misshapen(prefix: &str, values: &mut Dict, known: &Dict, found: &mut Vec<(String, String)>) {
    values.retain(|key, value| {
        let name = below(prefix, key);
        match (known.get(key), value) {
            (Some(Value::Dict(_, known)), Value::Dict(_, values)) => {
                leave_out_misshapen(&name, values, known, found);
                true
            }
            (Some(Value::Dict(_, known)), _) => {
                let example = names_in(&name, known).into_iter().next();
                let of = example.map_or_else(String::new, |example| format!(" such as {example}"));
                found.push((
                    name,
                    format!("is a table, and has no value itself: name a setting in it{of}"),
                ));
                false
            }
            (Some(_), Value::Dict(..)) => {
                found.push((name, "is a setting, and has no others in it".to_owned()));
                false
            }
            (Some(_) | None, _) => true,
        }
    });
}

/// The names of all settings in a table.
fn names_in(prefix: &str, table: &Dict) -> Vec<String> {
    let names = table.iter().flat_map(|(key, value)| {
        let name = below(prefix, key);
        match value {
            Value::Dict(_, table) => names_in(&name, table),
            _ => vec![name],
        }
    });
    names.collect()
}

/// The name of a setting in a table.
pub(super) fn below(prefix: &str, key: &str) -> String {
    match prefix.is_empty() {
        true => key.to_owned(),
        false => format!("{prefix}.{key}"),
    }
}
