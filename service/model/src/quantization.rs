//! The requested quantization of a model: a format per component that is not in full precision.

use std::collections::BTreeMap;
use std::fmt;

use gpu::{Fp8Scales, Int8Scales, Rotation, WeightFormat, WeightFormatError};
use serde::{Deserialize, Serialize};

/// Public name of the preset without quantization.
pub const FULL: &str = "full";

/// Named sets of formats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Preset {
    /// Everything as stored.
    #[default]
    Full,
    /// `int8-convrot`: half the bytes of bf16, at the smallest loss, and multiplied in int8 on most cards.
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
            Preset::EightBit => Some(WeightFormat::Int8Scaled(Int8Scales::Rows, Rotation::By256)),
            Preset::FourBit => Some(WeightFormat::Nf4),
        }
    }

    /// The format that stands for [`Preset::format`] where the service chooses it for a card that multiplies in fp8: of the same
    /// size, and of faster steps. `None` if there is none, or if nothing is multiplied in fp8 by the settings of this process.
    pub fn format_of_fp8_products(self) -> Option<WeightFormat> {
        let fp8 = WeightFormat::Fp8(Fp8Scales::Rows);
        (self == Preset::EightBit && ops::is_multiplied_in_fp8(fp8)).then_some(fp8)
    }

    /// The preset of this name; empty for `full`.
    pub fn named(name: &str) -> Option<Preset> {
        match name {
            "" => Some(Preset::Full),
            name => Preset::ALL.into_iter().find(|preset| preset.as_str() == name),
        }
    }
}

/// The requested quantization: a preset, and components whose format differs from it. The family states which components a
/// preset quantizes: those with most of a model's bytes ([`Quantization::formats`]). A checkpoint that is stored quantized
/// needs no preset.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Quantization {
    preset: Preset,
    /// `None`: as stored.
    components: BTreeMap<String, Option<WeightFormat>>,
}

impl Quantization {
    /// Everything as stored.
    pub const NONE: Quantization = Quantization {
        preset: Preset::Full,
        components: BTreeMap::new(),
    };

    /// A quantization from a preset, and formats by component that override it: `full`, or a format that [`WeightFormat`]
    /// parses.
    ///
    /// # Errors
    /// The component, and why its format is invalid.
    pub fn of<'a>(
        preset: Preset,
        components: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Quantization, (String, WeightFormatError)> {
        let mut overrides = BTreeMap::new();
        for (component, format) in components {
            let format = match format {
                FULL => None,
                format => Some(format.parse().map_err(|e| (component.to_owned(), e))?),
            };
            overrides.insert(component.to_owned(), format);
        }
        if preset == Preset::Full {
            overrides.retain(|_, format: &mut Option<WeightFormat>| format.is_some());
        }
        Ok(Quantization {
            preset,
            components: overrides,
        })
    }

    /// A preset alone.
    pub fn preset(preset: Preset) -> Quantization {
        Quantization {
            preset,
            ..Quantization::NONE
        }
    }

    /// The preset, if no component differs from it.
    pub fn as_preset(&self) -> Option<Preset> {
        self.components.is_empty().then_some(self.preset)
    }

    /// Preset, and the components whose format differs from it: `None` is as stored.
    pub fn parts(&self) -> (Preset, impl Iterator<Item = (&str, Option<WeightFormat>)>) {
        let components = self.components.iter();
        let components = components.map(|(name, format)| (name.as_str(), *format));
        (self.preset, components)
    }

    /// The formats of the components of a model with these large components: the format of a component that is named here, else
    /// for large components that of the preset.
    #[must_use]
    pub fn formats(&self, large: &[&str]) -> Formats {
        let by_preset = large
            .iter()
            .map(|name| ((*name).to_owned(), self.preset.format()));
        let mut all: BTreeMap<String, Option<WeightFormat>> = by_preset.collect();
        all.extend(self.components.clone());
        let quantized = all.into_iter().filter_map(|(name, format)| Some((name, format?)));
        Formats(quantized.collect())
    }

    /// The canonical form of the quantization for a model with these large components, in which all equal requests are written:
    /// a preset where the formats are those of the preset, else component by component.
    #[must_use]
    pub fn canonical(&self, large: &[&str]) -> Quantization {
        let formats = self.formats(large);
        let presets = Preset::ALL.into_iter().map(Quantization::preset);
        let mut presets = presets.filter(|preset| preset.formats(large) == formats);
        presets.next().unwrap_or_else(|| Quantization {
            preset: Preset::Full,
            components: formats
                .0
                .into_iter()
                .map(|(name, format)| (name, Some(format)))
                .collect(),
        })
    }

    /// This quantization, with these components in `format` where their present format is more accurate. `large` are the
    /// model's large components; `reducible` are those of them that may be quantized.
    #[must_use]
    pub fn reduced(&self, format: WeightFormat, large: &[&str], reducible: &[&str]) -> Quantization {
        let place = |format| {
            WeightFormat::MADE_AT_LOAD
                .iter()
                .position(|other| *other == format)
        };
        let now = self.formats(large);
        let is_more_accurate = |name: &&&str| now.of(name).is_none_or(|held| place(held) < place(format));
        let changed: Vec<&str> = reducible.iter().filter(is_more_accurate).copied().collect();
        let preset = Preset::ALL
            .into_iter()
            .find(|preset| preset.format() == Some(format));
        if let Some(preset) = preset
            && self.components.is_empty()
            && large.iter().all(|name| changed.contains(name))
        {
            return Quantization::preset(preset);
        }
        let mut reduced = self.clone();
        let changed = changed.into_iter().map(|name| (name.to_owned(), Some(format)));
        reduced.components.extend(changed);
        reduced
    }
}

/// Formats to which the components of one model are quantized at load, by name. Others are as stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Formats(BTreeMap<String, WeightFormat>);

impl Formats {
    /// The format of a component; `None` if it is left as stored.
    pub fn of(&self, component: &str) -> Option<WeightFormat> {
        self.0.get(component).copied()
    }

    /// Components and formats, ordered by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, WeightFormat)> {
        self.0.iter().map(|(name, format)| (name.as_str(), *format))
    }
}

impl fmt::Display for Quantization {
    /// `full`, `4-bit`, `transformer=nf4` or `4-bit,vae=int8`: part of an entry's key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.preset != Preset::Full || self.components.is_empty() {
            f.write_str(self.preset.as_str())?;
        }
        for (index, (component, format)) in self.components.iter().enumerate() {
            let comma = match index {
                0 if self.preset == Preset::Full => "",
                _ => ",",
            };
            match format {
                Some(format) => write!(f, "{comma}{component}={format}")?,
                None => write!(f, "{comma}{component}={FULL}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_ENCODERS: [&str; 2] = ["transformer", "text_encoder_2"];
    const ONE_ENCODER: [&str; 2] = ["transformer", "text_encoder"];

    fn listed(formats: &Formats) -> String {
        let each: Vec<String> = formats
            .iter()
            .map(|(name, format)| format!("{name}={format}"))
            .collect();
        each.join(",")
    }

    #[test]
    fn a_preset_quantizes_the_large_components_of_a_family() {
        let preset = Quantization::preset(Preset::FourBit);
        assert_eq!(
            listed(&preset.formats(&TWO_ENCODERS)),
            "text_encoder_2=nf4,transformer=nf4"
        );
        assert_eq!(
            listed(&preset.formats(&ONE_ENCODER)),
            "text_encoder=nf4,transformer=nf4"
        );
        assert_eq!(listed(&Quantization::NONE.formats(&TWO_ENCODERS)), "");
    }

    #[test]
    fn a_component_that_is_named_differs_from_the_preset() {
        let of = |formats: &[(&str, &str)]| {
            let asked = Quantization::of(Preset::EightBit, formats.iter().copied()).unwrap();
            listed(&asked.formats(&ONE_ENCODER))
        };
        assert_eq!(
            of(&[("text_encoder", "nf4")]),
            "text_encoder=nf4,transformer=int8-convrot"
        );
        assert_eq!(of(&[("text_encoder", "full")]), "transformer=int8-convrot");
        assert_eq!(
            of(&[("vae", "fp8")]),
            "text_encoder=int8-convrot,transformer=int8-convrot,vae=fp8"
        );
        assert!(Quantization::of(Preset::Full, [("vae", "int7")]).is_err());
        assert_eq!(Preset::named("3-bit"), None);
    }

    #[test]
    fn a_quantization_is_written_as_it_was_asked_for() {
        let written = |preset, formats: &[(&str, &str)]| {
            let asked = Quantization::of(preset, formats.iter().copied()).unwrap();
            asked.to_string()
        };
        assert_eq!(written(Preset::Full, &[]), "full");
        assert_eq!(written(Preset::Full, &[("vae", "full")]), "full");
        assert_eq!(written(Preset::FourBit, &[]), "4-bit");
        assert_eq!(written(Preset::FourBit, &[("vae", "fp8")]), "4-bit,vae=fp8");
        assert_eq!(
            written(Preset::EightBit, &[("text_encoder", "full")]),
            "8-bit,text_encoder=full"
        );
        let both = [("transformer", "nf4"), ("text_encoder_2", "int8")];
        assert_eq!(
            written(Preset::Full, &both),
            "text_encoder_2=int8,transformer=nf4"
        );
    }

    #[test]
    fn equal_requests_have_one_canonical_form() {
        let canonical = |preset, formats: &[(&str, &str)]| {
            let asked = Quantization::of(preset, formats.iter().copied()).unwrap();
            asked.canonical(&TWO_ENCODERS).to_string()
        };
        let of = |format| [("transformer", format), ("text_encoder_2", format)];
        assert_eq!(canonical(Preset::FourBit, &of("full")), "full");
        assert_eq!(canonical(Preset::Full, &of("nf4")), "4-bit");
        assert_eq!(canonical(Preset::EightBit, &of("nf4")), "4-bit");
        assert_eq!(
            canonical(Preset::FourBit, &[("text_encoder_2", "fp8")]),
            "text_encoder_2=fp8,transformer=nf4"
        );
        assert_eq!(
            canonical(Preset::FourBit, &[("transformer", "full")]),
            "text_encoder_2=nf4"
        );
    }

    #[test]
    fn reducing_never_selects_a_more_accurate_format() {
        let mixed = Quantization::of(Preset::Full, [("transformer", "nf4"), ("vae", "int8")]).unwrap();
        let to = |format| mixed.reduced(format, &TWO_ENCODERS, &TWO_ENCODERS).to_string();
        assert_eq!(
            to(WeightFormat::Int8),
            "text_encoder_2=int8,transformer=nf4,vae=int8"
        );
        assert_eq!(
            to(WeightFormat::Nf4Double),
            "text_encoder_2=nf4-double,transformer=nf4-double,vae=int8"
        );
    }

    #[test]
    fn reducing_all_large_components_is_a_preset() {
        let to = |format, reducible: &[&str]| {
            Quantization::NONE
                .reduced(format, &ONE_ENCODER, reducible)
                .to_string()
        };
        assert_eq!(to(WeightFormat::Nf4, &ONE_ENCODER), "4-bit");
        assert_eq!(
            to(WeightFormat::Nf4Double, &ONE_ENCODER),
            "text_encoder=nf4-double,transformer=nf4-double"
        );
        // The transformer is stored quantized.
        assert_eq!(to(WeightFormat::Nf4, &["text_encoder"]), "text_encoder=nf4");
        let eight = Quantization::preset(Preset::EightBit);
        assert_eq!(
            eight
                .reduced(WeightFormat::Nf4, &ONE_ENCODER, &ONE_ENCODER)
                .to_string(),
            "4-bit"
        );
        assert_eq!(
            eight.reduced(
                WeightFormat::Int8Scaled(Int8Scales::Rows, Rotation::By256),
                &ONE_ENCODER,
                &ONE_ENCODER
            ),
            eight
        );
    }
}
