//! The models that have a short name, with their sizes and licences before they are downloaded.

use figment::Figment;
use figment::providers::{Format as _, Toml};
use residency::Bytes;
use serde::Deserialize;

use super::CliError;
use super::arguments::MediumChoice;
use crate::hub::Reference;

/// Presets, the most faithful first: the order of [`Model::memory_gib`].
pub(super) const PRESETS: [&str; 3] = ["full", "8-bit", "4-bit"];

/// One model of the catalogue.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Model {
    /// Short name.
    pub(super) name: String,
    /// `owner/name` on the hub.
    pub(super) id: String,
    pub(super) licence: String,
    /// Whether the hub requires a login and accepted terms.
    pub(super) needs_terms: bool,
    pub(super) download_gb: f64,
    /// GiB of all components, by preset.
    pub(super) memory_gib: [f64; 3],
    /// GiB of the largest component, by preset.
    largest_gib: [f64; 3],
    /// GiB of working memory of its default request, and of what the driver takes.
    work_gib: f64,
    /// What it generates.
    pub(super) medium: MediumChoice,
    pub(super) about: String,
}

/// Every model of the catalogue.
///
/// # Errors
/// When the shipped file is damaged, which a test rules out.
pub(super) fn all() -> Result<Vec<Model>, CliError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        models: Vec<Model>,
    }
    let file: Result<File, _> = Figment::from(Toml::string(include_str!("catalogue.toml"))).extract();
    let file =
        file.map_err(|problem| CliError::Failed(format!("the catalogue cannot be read: {problem}")))?;
    Ok(file.models)
}

/// The model of this short name or hub name.
pub(super) fn find(name: &str) -> Result<Option<Model>, CliError> {
    let name = name.to_lowercase();
    Ok(all()?
        .into_iter()
        .find(|model| model.name == name || model.id.to_lowercase() == name))
}

/// The hub name of a short name, with its formats (`flux-schnell+4-bit`); another name is returned unchanged.
pub(super) fn full_name(name: &str) -> Result<String, CliError> {
    let (short, formats) = match name.split_once('+') {
        Some((short, formats)) => (short, Some(formats)),
        None => (name, None),
    };
    let Some(model) = find(short)? else {
        return Ok(name.to_owned());
    };
    Ok(match formats {
        Some(formats) => format!("{}+{formats}", model.id),
        None => model.id,
    })
}

/// The reference that a short name or a hub name stands for.
pub(super) fn reference(name: &str) -> Result<Reference, CliError> {
    if let Some(model) = find(name)? {
        return Ok(model.id.parse()?);
    }
    Ok(name.parse()?)
}

impl Model {
    /// The most faithful preset that a card of so many bytes can run, one large component at a time.
    pub(super) fn best_on(&self, card: Bytes, is_cpu: bool) -> Option<&'static str> {
        let gib = |size: f64| Bytes((size * f64::from(1 << 30)) as u64);
        let fits = |index: &usize| {
            // A CPU computes in f32, so that what is not quantized takes twice as much.
            let factor = if is_cpu && *index == 0 { 2.0 } else { 1.0 };
            gib(self.largest_gib[*index] * factor + self.work_gib) <= card
        };
        (0..PRESETS.len()).find(fits).map(|index| PRESETS[index])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_catalogue_is_valid() {
        let models = all().unwrap();
        assert!(models.len() >= 3);
        for model in &models {
            model.id.parse::<Reference>().unwrap();
            assert!(model.memory_gib.is_sorted_by(|a, b| a > b), "{}", model.name);
            assert!(std::iter::zip(model.largest_gib, model.memory_gib).all(|(largest, all)| largest < all));
            assert_eq!(find(&model.name).unwrap().unwrap().id, model.id);
            assert_eq!(find(&model.id.to_uppercase()).unwrap().unwrap().id, model.id);
        }
        let mut names: Vec<&String> = models.iter().map(|model| &model.name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count, "a name means one model");
    }

    #[test]
    fn short_names_stand_for_hub_names() {
        assert_eq!(
            full_name("flux-schnell+4-bit").unwrap(),
            "black-forest-labs/FLUX.1-schnell+4-bit"
        );
        assert_eq!(full_name("me/mine").unwrap(), "me/mine");
        assert_eq!(
            reference("flux-schnell").unwrap().to_string(),
            "black-forest-labs/FLUX.1-schnell"
        );
        assert_eq!(reference("me/mine@v1").unwrap().to_string(), "me/mine@v1");
        let told = reference("sdxl").unwrap_err().to_string();
        assert!(told.contains("moored models --available"), "{told}");
    }

    #[test]
    fn the_best_preset_is_chosen_by_the_memory_of_the_card() {
        let flux = find("flux-dev").unwrap().unwrap();
        let on = |gib| flux.best_on(Bytes::gib(gib), false);
        assert_eq!(on(80), Some("full"));
        assert_eq!(on(24), Some("8-bit"));
        assert_eq!(on(12), Some("4-bit"));
        assert_eq!(on(6), None);
        assert_eq!(flux.best_on(Bytes::gib(32), true), Some("8-bit"));
    }
}
