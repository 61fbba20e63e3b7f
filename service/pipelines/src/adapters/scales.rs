//! The scale of an adapter's pairs: alpha by the rank, where there is an alpha.
//!
//! An alpha is stored beside its pair (kohya), in the metadata of the file (diffusers, `lora_adapter_metadata`), or in the
//! configuration of peft's folder (`adapter_config.json`). Without one the scale is 1.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use gpu::TensorEntry;
use regex::Regex;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::AdapterError;
use crate::checkpoint::number_of;
use crate::files::count_as_read;

/// Maximum length of a configuration in bytes.
const MAX_CONFIGURATION: u64 = 1 << 20;

/// The configuration of peft for the adapters of one component.
#[derive(Debug, Default, Deserialize)]
struct PeftConfiguration {
    peft_type: Option<String>,
    r: Option<f64>,
    lora_alpha: Option<f64>,
    #[serde(default)]
    rank_pattern: Patterns,
    #[serde(default)]
    alpha_pattern: Patterns,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    lora_bias: bool,
    #[serde(default)]
    fan_in_fan_out: bool,
    #[serde(default)]
    modules_to_save: Option<Vec<String>>,
}

/// Numbers by pattern of a layer's name, in the order of the file: of those that match a layer, peft takes the first.
#[derive(Debug, Default)]
struct Patterns(Vec<(String, f64)>);

impl<'de> Deserialize<'de> for Patterns {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Patterns, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Patterns;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("numbers by pattern")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Patterns, M::Error> {
                let mut patterns = Vec::new();
                while let Some(pattern) = map.next_entry()? {
                    patterns.push(pattern);
                }
                Ok(Patterns(patterns))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

/// The configuration of one component in a file's metadata, whose keys begin with the component's name and a dot.
struct OfComponent<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for OfComponent<'_> {
    type Value = PeftConfiguration;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<PeftConfiguration, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for OfComponent<'_> {
    type Value = PeftConfiguration;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a configuration of peft for each component")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<PeftConfiguration, M::Error> {
        // A JSON value keeps no order, which patterns have.
        let (mut others, mut alphas) = (serde_json::Map::new(), None);
        while let Some(key) = map.next_key::<String>()? {
            match key.strip_prefix(self.0).and_then(|own| own.strip_prefix('.')) {
                Some("alpha_pattern") => alphas = Some(map.next_value::<Patterns>()?),
                Some(own) => {
                    others.insert(own.to_owned(), map.next_value()?);
                }
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let configuration = PeftConfiguration::deserialize(Value::Object(others));
        let mut configuration = configuration.map_err(serde::de::Error::custom)?;
        configuration.alpha_pattern = alphas.unwrap_or_default();
        Ok(configuration)
    }
}

/// Alphas from a configuration.
#[derive(Debug, Default)]
pub(super) struct Configured {
    alpha: Option<f64>,
    /// By pattern of a layer's name; the first that matches counts.
    patterns: Vec<(Regex, f64)>,
    by_square_root: bool,
}

impl Configured {
    /// The alphas in peft's `adapter_config.json`.
    ///
    /// # Errors
    /// When it cannot be read, or asks for an unsupported setting.
    pub(super) fn of_folder(path: &Path) -> Result<Configured, AdapterError> {
        let refused = |problem: String| AdapterError::Scale(format!("{}: {problem}", path.display()));
        let text = gpu::text_bounded(path, MAX_CONFIGURATION).map_err(|e| refused(e.to_string()))?;
        count_as_read(path, &text);
        let configuration = serde_json::from_str(&text).map_err(|e| refused(e.to_string()))?;
        Configured::of(configuration)
    }

    /// The alphas in the metadata of a file that diffusers wrote, for the component of this name; empty where there is none.
    ///
    /// # Errors
    /// As [`Configured::of_folder`].
    pub(super) fn of_metadata(
        metadata: &HashMap<String, String>,
        component: &str,
    ) -> Result<Configured, AdapterError> {
        const KEY: &str = "lora_adapter_metadata";
        let Some(text) = metadata.get(KEY) else {
            return Ok(Configured::default());
        };
        let refused = |e: serde_json::Error| AdapterError::Scale(format!("its {KEY} cannot be read: {e}"));
        let mut text = serde_json::Deserializer::from_str(text);
        let configuration = OfComponent(component).deserialize(&mut text).map_err(refused)?;
        text.end().map_err(refused)?;
        Configured::of(configuration)
    }

    fn of(configuration: PeftConfiguration) -> Result<Configured, AdapterError> {
        let unsupported = |kind| AdapterError::Unsupported {
            kind,
            tensor: "in its configuration".to_owned(),
        };
        let kinds = [
            (configuration.use_dora, "DoRA"),
            (configuration.lora_bias, "a bias beside its pairs"),
            (configuration.fan_in_fan_out, "transposed weights"),
            (
                configuration
                    .modules_to_save
                    .is_some_and(|whole| !whole.is_empty()),
                "whole weights",
            ),
            (
                configuration.peft_type.is_some_and(|kind| kind != "LORA"),
                "another kind of adapter than LoRA",
            ),
        ];
        if let Some((_, kind)) = kinds.into_iter().find(|(is_asked, _)| *is_asked) {
            return Err(unsupported(kind));
        }
        let pattern =
            |(pattern, alpha): (String, f64)| match Regex::new(&format!("^(?:.*\\.)?(?:{pattern})$")) {
                Ok(regex) => Ok((regex, alpha)),
                Err(error) => Err(AdapterError::Scale(format!(
                    "its alpha_pattern {pattern:?}: {error}"
                ))),
            };
        let patterns = configuration.alpha_pattern.0.into_iter().map(pattern);
        let _ = (configuration.r, configuration.rank_pattern); // the tensors say what the ranks are
        Ok(Configured {
            alpha: configuration.lora_alpha,
            patterns: patterns.collect::<Result<_, _>>()?,
            by_square_root: configuration.use_rslora,
        })
    }

    /// The scale of a pair of this rank for the layer that the file calls `layer`. An alpha of the pair itself takes
    /// precedence.
    ///
    /// # Errors
    /// When it is not finite.
    pub(super) fn scale(&self, layer: &str, rank: usize, own: Option<f64>) -> Result<f64, AdapterError> {
        let of_pattern = || {
            let mut patterns = self.patterns.iter();
            patterns.find_map(|(pattern, alpha)| pattern.is_match(layer).then_some(*alpha))
        };
        let Some(alpha) = own.or_else(of_pattern).or(self.alpha) else {
            return Ok(1.0);
        };
        let rank = rank as f64;
        let scale = alpha / if self.by_square_root { rank.sqrt() } else { rank };
        match scale.is_finite() {
            true => Ok(scale),
            false => Err(AdapterError::Scale(format!("the alpha of {layer} is {alpha}"))),
        }
    }
}

/// A number that is stored in a file as a tensor of one element, of any type.
///
/// # Errors
/// When it is no such tensor, or cannot be read.
pub(super) fn read_number(file: &File, tensor: &str, entry: &TensorEntry) -> Result<f64, AdapterError> {
    let width = entry.stored.width();
    if entry.elements() != 1 || width > 8 {
        return Err(AdapterError::Shape {
            tensor: tensor.to_owned(),
            found: entry.shape.clone(),
            expected: "one number".to_owned(),
        });
    }
    let mut bytes = [0u8; 8];
    file.read_exact_at(&mut bytes[..width], entry.range.offset)
        .map_err(|e| AdapterError::File(format!("tensor {tensor} cannot be read: {e}")))?;
    number_of(entry.stored, &bytes).ok_or_else(|| {
        let stored = entry.stored;
        AdapterError::Scale(format!(
            "tensor {tensor} is stored as {stored:?} where a number is expected"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: &str = "transformer_blocks.0.attn.to_q";

    /// Patterns that all match [`LAYER`], the first with an alpha of 8, the others with less.
    fn overlapping() -> String {
        let patterns = [
            "to_q",
            "attn.to_q",
            "attn..*",
            ".*to_q",
            ".*",
            "0.attn.to_q",
            "to_.",
            "t.*",
        ];
        let patterns = patterns.iter().zip([8, 7, 6, 5, 4, 3, 2, 1]);
        let patterns: Vec<String> = patterns
            .map(|(pattern, alpha)| format!("\"{pattern}\":{alpha}"))
            .collect();
        format!("{{{}}}", patterns.join(","))
    }

    #[test]
    fn the_first_of_overlapping_patterns_sets_the_alpha() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("adapter_config.json");
        let configuration = format!(r#"{{"peft_type":"LORA","alpha_pattern":{}}}"#, overlapping());
        std::fs::write(&path, configuration).unwrap();
        let of_folder = Configured::of_folder(&path).unwrap();
        let text = format!(
            r#"{{"text_encoder.lora_alpha":9,"transformer.r":4,"transformer.alpha_pattern":{}}}"#,
            overlapping()
        );
        let metadata = HashMap::from([("lora_adapter_metadata".to_owned(), text)]);
        let of_metadata = Configured::of_metadata(&metadata, "transformer").unwrap();
        for configured in [of_folder, of_metadata] {
            assert_eq!(configured.scale(LAYER, 1, None).unwrap(), 8.0);
        }
        let of_other = Configured::of_metadata(&metadata, "text_encoder").unwrap();
        assert_eq!(of_other.scale(LAYER, 1, None).unwrap(), 9.0);
    }

    #[test]
    fn a_configuration_that_is_too_long_is_refused_and_not_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("adapter_config.json");
        // A configuration within the bound is read whole.
        let whole = r#"{"lora_alpha":8}"#;
        std::fs::write(&path, format!("{whole}{}", " ".repeat(1 << 20))).unwrap();
        let refused = Configured::of_folder(&path).unwrap_err().to_string();
        assert!(refused.contains("more than 1.0 MiB"), "{refused}");
    }

    #[test]
    fn metadata_that_is_no_configuration_is_refused() {
        for text in [
            "[]",
            r#"{"transformer.alpha_pattern":[]}"#,
            "{} {}",
            r#"{"transformer.r":"x"}"#,
        ] {
            let metadata = HashMap::from([("lora_adapter_metadata".to_owned(), text.to_owned())]);
            let refused = Configured::of_metadata(&metadata, "transformer");
            assert!(refused.is_err(), "{text}");
        }
    }
}
