//! The requested quantization of a model: a format per component that is not in full precision.

use std::collections::BTreeMap;
use std::fmt;

use gpu::{WeightFormat, WeightFormatError};
use serde::{Deserialize, Serialize};

/// Public name of the preset without quantization.
pub const FULL: &str = "full";

/// Components that a preset quantizes, in every family: those with most of a model's bytes. The others are small, and
/// lose quality out of proportion.
const LARGE_COMPONENTS: [&str; 2] = ["transformer", LARGE_TEXT_ENCODER];

/// Preset name of the large text encoder, which is its name where there are two.
const LARGE_TEXT_ENCODER: &str = "text_encoder_2";
/// Its name where there is only one.
const ONLY_TEXT_ENCODER: &str = "text_encoder";

/// Named sets of formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Preset {
    /// Everything as stored.
    Full,
    /// `int8`: half the bytes of bf16, at the smallest loss.
    EightBit,
    /// `nf4`: 28% of the bytes of bf16.
    FourBit,
}

impl Preset {
    /// Every preset, the most accurate first.
    pub const ALL: [Preset; 3] = [Preset::Full, Preset::EightBit, Preset::FourBit];

    /// Public name: `full`, `8-bit`, `4-bit`.
    pub fn as_str(self) -> &'static str {
        match self {
            Preset::Full => FULL,
            Preset::EightBit => "8-bit",
            Preset::FourBit => "4-bit",
        }
    }

    /// Format of a large component.
    pub fn format(self) -> Option<WeightFormat> {
        match self {
            Preset::Full => None,
            Preset::EightBit => Some(WeightFormat::Int8),
            Preset::FourBit => Some(WeightFormat::Nf4),
        }
    }

    /// The preset of this name; empty for `full`.
    pub fn named(name: &str) -> Option<Preset> {
        match name {
            "" => Some(Preset::Full),
            name => Preset::ALL.into_iter().find(|preset| preset.as_str() == name),
        }
    }
}

/// Formats to which components are quantized at load, normalized so that equivalent requests are equal. A checkpoint
/// that is stored quantized needs none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Quantization {
    formats: BTreeMap<String, WeightFormat>,
    /// Whether a single text encoder is explicitly left as stored, whatever the preset.
    only_text_encoder_is_full: bool,
}

impl Quantization {
    /// Everything as stored.
    pub const NONE: Quantization = Quantization {
        formats: BTreeMap::new(),
        only_text_encoder_is_full: false,
    };

    /// From a preset, and formats by component that override it: `full` or a format that [`WeightFormat`] parses.
    ///
    /// # Errors
    /// The component, and why its format is invalid.
    pub fn of<'a>(
        preset: Preset,
        components: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Quantization, (String, WeightFormatError)> {
        let large = LARGE_COMPONENTS.into_iter();
        let mut formats: BTreeMap<String, WeightFormat> = large
            .filter_map(|name| Some((name.to_owned(), preset.format()?)))
            .collect();
        let mut only_text_encoder_is_full = false;
        for (component, format) in components {
            if format == FULL {
                formats.remove(component);
                only_text_encoder_is_full |= component == ONLY_TEXT_ENCODER && preset != Preset::Full;
                continue;
            }
            let format = format.parse().map_err(|e| (component.to_owned(), e))?;
            formats.insert(component.to_owned(), format);
        }
        Ok(Quantization {
            formats,
            only_text_encoder_is_full,
        })
    }

    /// This, with the large components among `components` in `format` where they would otherwise have a more accurate
    /// one.
    #[must_use]
    pub fn reduced<'a>(
        &self,
        format: WeightFormat,
        components: impl IntoIterator<Item = &'a str>,
    ) -> Quantization {
        let place = |format| {
            WeightFormat::MADE_AT_LOAD
                .iter()
                .position(|other| *other == format)
        };
        let large = components
            .into_iter()
            .filter(|name| LARGE_COMPONENTS.contains(name));
        let less_faithful = large.filter(|name| {
            self.format_of(name)
                .is_none_or(|held| place(held) < place(format))
        });
        let mut formats = self.formats.clone();
        formats.extend(less_faithful.map(|name| (name.to_owned(), format)));
        Quantization {
            formats,
            only_text_encoder_is_full: self.only_text_encoder_is_full,
        }
    }

    /// This, for a model with one text encoder: that is the large one, and its own name takes precedence.
    #[must_use]
    pub(crate) fn with_one_text_encoder(&self) -> Quantization {
        let mut formats = self.formats.clone();
        if let Some(format) = formats.remove(LARGE_TEXT_ENCODER)
            && !self.only_text_encoder_is_full
        {
            formats.entry(ONLY_TEXT_ENCODER.to_owned()).or_insert(format);
        }
        Quantization {
            formats,
            only_text_encoder_is_full: false,
        }
    }

    /// The format of a component; `None` if it is left as stored.
    pub fn format_of(&self, component: &str) -> Option<WeightFormat> {
        self.formats.get(component).copied()
    }

    /// Components and formats, ordered by name.
    pub fn formats(&self) -> impl Iterator<Item = (&str, WeightFormat)> {
        self.formats.iter().map(|(name, format)| (name.as_str(), *format))
    }
}

impl fmt::Display for Quantization {
    /// `full`, or `text_encoder_2=nf4,transformer=nf4`: part of an entry's key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.formats.is_empty() {
            return f.write_str(FULL);
        }
        for (index, (component, format)) in self.formats.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{component}={format}")?;
        }
        match self.only_text_encoder_is_full {
            true => write!(f, ",{ONLY_TEXT_ENCODER}={FULL}"),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equivalent_quantizations_are_equal() {
        let preset = Quantization::of(Preset::FourBit, []).unwrap();
        let said =
            Quantization::of(Preset::Full, [("transformer", "nf4"), ("text_encoder_2", "nf4")]).unwrap();
        assert_eq!(preset, said);
        assert_eq!(preset.to_string(), "text_encoder_2=nf4,transformer=nf4");
        let undone = Quantization::of(
            Preset::EightBit,
            [("transformer", "full"), ("text_encoder_2", "full")],
        );
        assert_eq!(undone.unwrap().to_string(), "full");
        assert!(Quantization::of(Preset::Full, [("vae", "int7")]).is_err());
        assert_eq!(Preset::named("3-bit"), None);
    }

    #[test]
    fn a_single_text_encoder_counts_as_the_large_one() {
        let read = |formats: &[(&str, &str)]| {
            let said = Quantization::of(Preset::EightBit, formats.iter().copied()).unwrap();
            said.with_one_text_encoder().to_string()
        };
        assert_eq!(read(&[]), "text_encoder=int8,transformer=int8");
        assert_eq!(
            read(&[("text_encoder", "nf4")]),
            "text_encoder=nf4,transformer=int8"
        );
        assert_eq!(read(&[("text_encoder", "full")]), "transformer=int8");
        assert_eq!(read(&[("text_encoder_2", "full")]), "transformer=int8");
        let said = Quantization::of(Preset::EightBit, [("text_encoder", "full")]).unwrap();
        assert_ne!(said, Quantization::of(Preset::EightBit, []).unwrap());
        assert_eq!(said.format_of("text_encoder_2"), Some(WeightFormat::Int8));
    }

    #[test]
    fn reducing_never_selects_a_more_accurate_format() {
        let mixed = Quantization::of(Preset::Full, [("transformer", "nf4"), ("vae", "int8")]).unwrap();
        let names = ["transformer", "text_encoder", "text_encoder_2", "vae"];
        let to = |format| mixed.reduced(format, names).to_string();
        assert_eq!(
            to(WeightFormat::Int8),
            "text_encoder_2=int8,transformer=nf4,vae=int8"
        );
        assert_eq!(
            to(WeightFormat::Nf4Double),
            "text_encoder_2=nf4-double,transformer=nf4-double,vae=int8"
        );
        let alone = Quantization::NONE.reduced(WeightFormat::Nf4, ["transformer", "vae"]);
        assert_eq!(alone.to_string(), "transformer=nf4");
    }
}
