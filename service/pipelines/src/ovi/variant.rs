//! The variants that are published. Their weights have the same names and shapes, so what tells them apart is what is declared:
//! the name of the file, or the setting in the model's folder.

use std::fmt;

use serde::Deserialize;

/// A variant of the model, by what it was trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Variant {
    /// Ovi 1.0.
    #[serde(rename = "720x720_5s")]
    Of720For5s,
    /// Ovi 1.1.
    #[serde(rename = "960x960_5s")]
    Of960For5s,
    /// Ovi 1.1, of ten seconds.
    #[serde(rename = "960x960_10s")]
    Of960For10s,
}

/// How a prompt says what is heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SoundCaption {
    /// `<AUDCAP>...<ENDAUDCAP>`, anywhere.
    Tagged,
    /// `Audio: ...`, at the end.
    Labelled,
}

impl Variant {
    /// All variants.
    pub const ALL: [Variant; 3] = [Variant::Of720For5s, Variant::Of960For5s, Variant::Of960For10s];

    /// The authors' name.
    pub fn name(self) -> &'static str {
        match self {
            Variant::Of720For5s => "720x720_5s",
            Variant::Of960For5s => "960x960_5s",
            Variant::Of960For10s => "960x960_10s",
        }
    }

    /// The variant of this name.
    pub fn of_name(name: &str) -> Option<Variant> {
        Variant::ALL.into_iter().find(|variant| variant.name() == name)
    }

    /// The variant that a file's name declares: one of the names that the authors, and ComfyUI's users, have published.
    /// `None` for any other name, such as the `model.safetensors` of the authors' first file outside of their repository.
    pub fn of_file_name(file: &str) -> Option<Variant> {
        let file = file.to_lowercase().replace('-', "_");
        let stem = file.rsplit_once('.').map_or(file.as_str(), |(stem, _)| stem);
        let is_ovi = stem.split('_').any(|word| word.starts_with("ovi"));
        if stem.contains("960x960") {
            return match (
                stem.contains("10s"),
                stem == "model_960x960" || stem.contains("5s"),
            ) {
                (true, _) => Some(Variant::Of960For10s),
                (false, true) => Some(Variant::Of960For5s),
                (false, false) => None,
            };
        }
        // The first version's files name no size: `Ovi-11B-bf16`, `Wan_2_1_Ovi_video_model_bf16`.
        let is_first = stem.contains("720x720") || stem.contains("11b") || stem.contains("ovi_video_model");
        (is_ovi && is_first).then_some(Variant::Of720For5s)
    }

    /// Pixels of a frame: frames of other sizes are outside of what it was trained on.
    pub fn area(self) -> u32 {
        match self {
            Variant::Of720For5s => 720 * 720,
            Variant::Of960For5s | Variant::Of960For10s => 960 * 960,
        }
    }

    /// Latent frames of a film.
    pub fn video_latents(self) -> usize {
        match self {
            Variant::Of720For5s | Variant::Of960For5s => 31,
            Variant::Of960For10s => 61,
        }
    }

    /// Latent frames of its sound.
    pub fn audio_latents(self) -> usize {
        match self {
            Variant::Of720For5s | Variant::Of960For5s => 157,
            Variant::Of960For10s => 314,
        }
    }

    /// How its prompts say what is heard.
    pub fn sound_caption(self) -> SoundCaption {
        match self {
            Variant::Of720For5s => SoundCaption::Tagged,
            Variant::Of960For5s | Variant::Of960For10s => SoundCaption::Labelled,
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What to do about a model whose variant is not declared.
pub(super) fn undeclared() -> String {
    let names = Variant::ALL.map(Variant::name).join(", ");
    format!(
        "the variant of this Ovi model is not declared, and its weights do not tell it: write {{\"variant\": \"...\"}} with one of \
         {names} into moored.json beside it, or give the file the name under which it was published"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_published_files_declare_the_variant() {
        for (file, variant) in [
            ("model_960x960.safetensors", Some(Variant::Of960For5s)),
            ("model_960x960_10s.safetensors", Some(Variant::Of960For10s)),
            ("Ovi-11B-bf16.safetensors", Some(Variant::Of720For5s)),
            ("Ovi-11B-fp8.safetensors", Some(Variant::Of720For5s)),
            ("Ovi-960x960-5s.safetensors", Some(Variant::Of960For5s)),
            ("Ovi-960x960-10s.safetensors", Some(Variant::Of960For10s)),
            (
                "Wan_2_1_Ovi_video_model_bf16.safetensors",
                Some(Variant::Of720For5s),
            ),
            (
                "Wan2_2-5B-Ovi_960x960_10s_fp8_e4m3fn_scaled_KJ.safetensors",
                Some(Variant::Of960For10s),
            ),
            ("model.safetensors", None),
            ("model_fp8_e4m3fn.safetensors", None),
            ("my-ovi.safetensors", None),
            ("ovi-960x960.safetensors", None),
        ] {
            assert_eq!(Variant::of_file_name(file), variant, "{file}");
        }
    }

    #[test]
    fn variants_are_known_by_the_authors_names() {
        for variant in Variant::ALL {
            assert_eq!(Variant::of_name(variant.name()), Some(variant));
            let written: Variant = serde_json::from_value(variant.name().into()).expect("a variant");
            assert_eq!(written, variant);
            assert!(undeclared().contains(variant.name()));
        }
        assert_eq!(Variant::of_name("720x720"), None);
    }
}
