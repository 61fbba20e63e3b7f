//! The scale of an adapter's pairs: alpha by the rank, where there is an alpha.
//!
//! An alpha stands beside its pair (kohya), in the metadata of the file (diffusers, `lora_adapter_metadata`), or in the
//! configuration of peft's folder (`adapter_config.json`). Without one the scale is 1.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use gpu::{Stored, TensorEntry};
use half::{bf16, f16};
use regex::Regex;
use serde::Deserialize;
use serde_json::Value;

use super::AdapterError;

/// Maximum length of a configuration in bytes.
const MAX_CONFIGURATION: u64 = 1 << 20;

/// The configuration of peft for the adapters of one component.
#[derive(Debug, Default, Deserialize)]
struct PeftConfiguration {
    peft_type: Option<String>,
    r: Option<f64>,
    lora_alpha: Option<f64>,
    #[serde(default)]
    rank_pattern: HashMap<String, f64>,
    #[serde(default)]
    alpha_pattern: HashMap<String, f64>,
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

/// Alphas from a configuration.
#[derive(Debug, Default)]
pub(super) struct Configured {
    alpha: Option<f64>,
    /// By pattern of a layer's name.
    patterns: Vec<(Regex, f64)>,
    by_square_root: bool,
}

impl Configured {
    /// From `adapter_config.json` of peft.
    ///
    /// # Errors
    /// When it cannot be read, or asks for what is not supported.
    pub(super) fn of_folder(path: &Path) -> Result<Configured, AdapterError> {
        let refused = |problem: String| AdapterError::Scale(format!("{}: {problem}", path.display()));
        let file = File::open(path).map_err(|e| refused(e.to_string()))?;
        let mut text = String::new();
        let read = file.take(MAX_CONFIGURATION).read_to_string(&mut text);
        read.map_err(|e| refused(e.to_string()))?;
        let configuration = serde_json::from_str(&text).map_err(|e| refused(e.to_string()))?;
        Configured::of(configuration)
    }

    /// From the metadata of a file that diffusers wrote, for the component of this name; nothing where there is none.
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
        let all: serde_json::Map<String, Value> = serde_json::from_str(text).map_err(refused)?;
        let of_component = all.into_iter().filter_map(|(key, value)| {
            let key = key.strip_prefix(component)?.strip_prefix('.')?;
            Some((key.to_owned(), value))
        });
        let configuration = Value::Object(of_component.collect());
        Configured::of(serde_json::from_value(configuration).map_err(refused)?)
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
        let patterns = configuration.alpha_pattern.into_iter().map(pattern);
        let _ = (configuration.r, configuration.rank_pattern); // the tensors say what the ranks are
        Ok(Configured {
            alpha: configuration.lora_alpha,
            patterns: patterns.collect::<Result<_, _>>()?,
            by_square_root: configuration.use_rslora,
        })
    }

    /// The scale of a pair of this rank for the layer that the file calls `layer`. An alpha of the pair's own counts
    /// first.
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

/// A number that is stored as a tensor of one element, of any type.
///
/// # Errors
/// When it is something else, or cannot be read.
pub(super) fn read_number(path: &Path, tensor: &str, entry: &TensorEntry) -> Result<f64, AdapterError> {
    let width = entry.stored.width();
    if entry.elements() != 1 || width > 8 {
        return Err(AdapterError::Shape {
            tensor: tensor.to_owned(),
            found: entry.shape.clone(),
            expected: "one number".to_owned(),
        });
    }
    let mut bytes = [0u8; 8];
    let mut read = || {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::Start(entry.range.offset))?;
        file.read_exact(&mut bytes[..width])
    };
    read().map_err(|e| AdapterError::File(format!("{} cannot be read: {e}", path.display())))?;
    let [a, b, c, d, ..] = bytes;
    match entry.stored {
        Stored::F64 => Ok(f64::from_le_bytes(bytes)),
        Stored::F32 => Ok(f64::from(f32::from_le_bytes([a, b, c, d]))),
        Stored::F16 => Ok(f64::from(f16::from_le_bytes([a, b]))),
        Stored::Bf16 => Ok(f64::from(bf16::from_le_bytes([a, b]))),
        Stored::I64 => Ok(i64::from_le_bytes(bytes) as f64),
        Stored::I32 => Ok(f64::from(i32::from_le_bytes([a, b, c, d]))),
        Stored::I8 => Ok(f64::from(a as i8)),
        Stored::U8 => Ok(f64::from(a)),
        Stored::F8E4M3 | Stored::Gguf(_) => Err(AdapterError::Scale(format!(
            "tensor {tensor} is stored as {:?} where a number is expected",
            entry.stored
        ))),
    }
}
