//! The models that have a short name: sizes, licences and memory needs, also of models that are not downloaded. Service and command line
//! take short names wherever they take a model.

use std::sync::LazyLock;

use figment::Figment;
use figment::providers::{Format as _, Toml};
use model::{Medium, Preset};
use residency::Bytes;
use serde::Deserialize;

/// Id of the model that ships with the project, and is the default where no other is configured.
pub const SHIPPED_ID: &str = "moored/demo";
/// Id of the film model that ships with it.
pub const SHIPPED_FILM_ID: &str = "moored/demo-film";

/// Id of the sound model that ships with it.
pub const SHIPPED_SOUND_ID: &str = "moored/demo-sound";

/// The medium that a model generates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Makes {
    Image,
    Video,
    Audio,
}

impl Makes {
    /// The kind of a request's medium.
    pub fn of(medium: &Medium) -> Makes {
        match medium {
            Medium::Image(_) => Makes::Image,
            Medium::Video(_) => Makes::Video,
            Medium::Audio(_) => Makes::Audio,
        }
    }

    /// Its name in lists of models: `image`, `video`, `audio`.
    pub fn as_str(self) -> &'static str {
        match self {
            Makes::Image => "image",
            Makes::Video => "video",
            Makes::Audio => "audio",
        }
    }

    /// For people: `pictures`, `films`, `music`.
    pub fn in_words(self) -> &'static str {
        match self {
            Makes::Image => "pictures",
            Makes::Video => "films",
            Makes::Audio => "music",
        }
    }
}

/// Sizes in MiB by preset, in the order of [`Preset::ALL`].
type ByPreset = [u64; Preset::ALL.len()];

/// One model of the catalogue.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Short name.
    pub name: String,
    /// `owner/name` on the hub.
    pub id: String,
    /// Repositories with parts of it, that are pulled with it.
    #[serde(default)]
    pub with: Vec<String>,
    pub licence: String,
    /// Whether the hub requires a login and accepted terms.
    pub needs_terms: bool,
    pub download_gb: f64,
    /// Weights of all components on a card that computes in bf16.
    memory_mib: ByPreset,
    /// The most that a stage of its default request needs on such a card.
    need_mib: ByPreset,
    /// The same on a card that computes in f32.
    need_f32_mib: ByPreset,
    /// The medium that it generates.
    #[serde(rename = "medium")]
    pub makes: Makes,
    pub about: String,
}

/// The memory of a card, as far as it decides what fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes for a stage when nothing else is in the card's memory.
    pub bytes: Bytes,
    /// Whether the card computes in f32.
    pub is_f32: bool,
}

impl Room {
    /// The estimated room on a card that computes in bf16, by its size alone: `headroom` bytes stay free,
    /// and the driver and its libraries take some.
    pub fn expected(total: Bytes, headroom: Bytes) -> Room {
        const CONTEXT: Bytes = Bytes::mib(768);
        Room {
            bytes: total - CONTEXT - headroom,
            is_f32: false,
        }
    }
}

/// Every model of the catalogue.
pub fn all() -> &'static [Model] {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        models: Vec<Model>,
    }
    static ALL: LazyLock<Vec<Model>> = LazyLock::new(|| {
        let file: Result<File, _> = Figment::from(Toml::string(include_str!("catalogue.toml"))).extract();
        match file {
            Ok(file) => file.models,
            Err(problem) => {
                tracing::error!(%problem, "the catalogue cannot be read"); // a test rules it out
                Vec::new()
            }
        }
    });
    &ALL
}

/// The model of this short name or hub name.
pub fn find(name: &str) -> Option<&'static Model> {
    let is_it = |model: &&Model| model.name.eq_ignore_ascii_case(name) || model.id.eq_ignore_ascii_case(name);
    all().iter().find(is_it)
}

/// The hub name of a short name; `None` for any other name.
pub fn id_of(short: &str) -> Option<&'static str> {
    let model = all()
        .iter()
        .find(|model| model.name.eq_ignore_ascii_case(short))?;
    Some(&model.id)
}

/// The catalogue's model of an entry's name, which may say a revision and formats (`flux-schnell+4-bit`).
pub fn find_entry(name: &str) -> Option<&'static Model> {
    find(name.split(['+', '@', '&']).next().unwrap_or_default())
}

/// Most names that are suggested for an unknown one.
const MOST_SUGGESTED: usize = 3;
/// Least Jaro-Winkler similarity of two names for one to be suggested for the other.
const LEAST_LIKENESS: f64 = 0.8;

/// Suggestions for an unknown name, the likeliest first: among short names and `others`.
pub fn similar<'a>(name: &str, others: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let name = name
        .split(['+', '@', '&'])
        .next()
        .unwrap_or_default()
        .to_lowercase();
    let mut likely: Vec<(f64, &str)> = all()
        .iter()
        .map(|model| model.name.as_str())
        .chain(others)
        .map(|known| (likeness(&name, known), known))
        .filter(|(likeness, _)| *likeness >= LEAST_LIKENESS)
        .collect();
    likely.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    likely.dedup_by_key(|(_, known)| *known);
    likely.truncate(MOST_SUGGESTED);
    likely.into_iter().map(|(_, known)| known.to_owned()).collect()
}

/// Similarity of a written name to a known one, to its beginning, or to its last part, as people write `flux`, or `demo`.
fn likeness(written: &str, known: &str) -> f64 {
    let known = known.to_lowercase();
    let beginning: String = known.chars().take(written.chars().count()).collect();
    let last = known.rsplit('/').next().unwrap_or_default();
    let each = [known.as_str(), beginning.as_str(), last].map(|known| strsim::jaro_winkler(written, known));
    each.into_iter().fold(0.0, f64::max)
}

/// `; did you mean flux-schnell or flux-dev?`, or nothing where no name is like this one.
pub fn did_you_mean<'a>(name: &str, others: impl IntoIterator<Item = &'a str>) -> String {
    match similar(name, others).as_slice() {
        [] => String::new(),
        names => format!("; did you mean {}?", names.join(" or ")),
    }
}

/// The first model of this medium that fits, with the preset in which it does.
pub fn first_that_fits(makes: Makes, room: &Room) -> Option<(&'static Model, Preset)> {
    let fitting = |model: &'static Model| Some((model, model.best_in(room)?));
    all()
        .iter()
        .filter(|model| model.makes == makes)
        .find_map(fitting)
}

/// A model of this medium that fits, to suggest in place of the model with this id, in words.
pub fn fitting_instead(makes: Makes, room: &Room, id: &str) -> Option<String> {
    let (model, preset) = first_that_fits(makes, room)?;
    (model.id != id).then(|| format!("{} fits this card in {}", model.name, preset.as_str()))
}

impl Model {
    /// Weights of all components in a preset, on a card that computes in bf16.
    pub fn memory(&self, preset: Preset) -> Bytes {
        of_preset(&self.memory_mib, preset)
    }

    /// The most that a stage of its default request needs.
    pub fn need(&self, preset: Preset, is_f32: bool) -> Bytes {
        let by_preset = if is_f32 {
            &self.need_f32_mib
        } else {
            &self.need_mib
        };
        of_preset(by_preset, preset)
    }

    /// The least that any preset needs.
    pub fn least_need(&self, is_f32: bool) -> (Preset, Bytes) {
        let needs = Preset::ALL.map(|preset| (preset, self.need(preset, is_f32)));
        let least = needs.into_iter().min_by_key(|(_, need)| *need);
        least.unwrap_or((Preset::Full, Bytes::ZERO))
    }

    /// The most accurate preset that fits, by the planner's own numbers.
    pub fn best_in(&self, room: &Room) -> Option<Preset> {
        let fits = |preset: &Preset| self.need(*preset, room.is_f32) <= room.bytes;
        Preset::ALL.into_iter().find(fits)
    }
}

fn of_preset(sizes: &ByPreset, preset: Preset) -> Bytes {
    let index = Preset::ALL.iter().position(|each| *each == preset);
    Bytes::mib(index.map_or(0, |index| sizes[index]))
}

#[cfg(test)]
mod planned;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reference;

    #[test]
    fn the_catalogue_is_valid() {
        assert!(all().len() >= 3);
        for model in all() {
            model.id.parse::<Reference>().unwrap();
            for part in &model.with {
                part.parse::<Reference>().unwrap();
            }
            assert!(model.memory_mib.is_sorted_by(|a, b| a > b), "{}", model.name);
            assert!(model.need_mib.is_sorted_by(|a, b| a >= b), "{}", model.name);
            assert_eq!(find(&model.name).unwrap().id, model.id);
            assert_eq!(find(&model.id.to_uppercase()).unwrap().id, model.id);
        }
        let mut names: Vec<&str> = all().iter().map(|model| model.name.as_str()).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count, "a name means one model");
    }

    #[test]
    fn short_names_stand_for_hub_names() {
        assert_eq!(id_of("flux-schnell"), Some("black-forest-labs/FLUX.1-schnell"));
        assert_eq!(id_of("me/mine"), None);
        assert_eq!(find_entry("flux-schnell+4-bit").unwrap().name, "flux-schnell");
        assert_eq!(
            find_entry("Tongyi-MAI/Z-Image-Turbo@main").unwrap().name,
            "z-image-turbo"
        );
    }

    #[test]
    fn names_like_a_mistyped_one_are_suggested() {
        assert!(
            similar("fluks", []).contains(&"flux-schnell".to_owned()),
            "{:?}",
            similar("fluks", [])
        );
        let of_family = similar("flux", []);
        assert!(
            ["flux-schnell", "flux-dev"]
                .iter()
                .all(|name| of_family.iter().any(|n| n == name))
        );
        assert_eq!(similar("z-image", []), ["z-image-turbo"]);
        assert_eq!(similar("moored/dem", ["moored/demo"])[0], "moored/demo");
        assert!(similar("qwertz", []).is_empty());
    }

    /// The two tables of the README.
    fn tables() -> String {
        let mut lines = vec![
            "| name | what it is | licence | download | memory full / 8-bit / 4-bit |".to_owned(),
            "|---|---|---|---|---|".to_owned(),
        ];
        for model in all() {
            let login = if model.needs_terms { "; needs a login" } else { "" };
            let gib =
                Preset::ALL.map(|preset| format!("{:.1}", model.memory(preset).0 as f64 / (1 << 30) as f64));
            lines.push(format!(
                "| `{}` | {} | {}{login} | {:.0} GB | {} GiB |",
                model.name,
                model.about,
                model.licence,
                model.download_gb,
                gib.join(" / ")
            ));
        }
        let columns: Vec<&Model> = [
            "z-image-turbo",
            "flux-dev",
            "framepack",
            "hunyuan-video",
            "ace-step",
        ]
        .into_iter()
        .filter_map(find)
        .collect();
        lines.push(String::new());
        lines.push("| card | pictures: Z-Image | pictures: FLUX.1 | film from a picture: FramePack | film from text: HunyuanVideo | music: ACE-Step |".to_owned());
        lines.push("|---|---|---|---|---|---|".to_owned());
        for gib in [48, 24, 16, 12, 8, 6, 4] {
            let room = Room::expected(Bytes::gib(gib), Bytes::mib(256));
            let fits = columns
                .iter()
                .map(|model| model.best_in(&room).map_or("no", Preset::as_str));
            lines.push(format!("| {gib} GB | {} |", fits.collect::<Vec<_>>().join(" | ")));
        }
        lines.join("\n")
    }

    #[test]
    fn the_readmes_tables_are_the_catalogues() {
        let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md");
        let readme = std::fs::read_to_string(readme).unwrap();
        for table in tables().split("\n\n") {
            assert!(readme.contains(table), "the README is to have:\n{}", tables());
        }
    }

    #[test]
    fn the_best_preset_is_chosen_by_the_memory_of_the_card() {
        let flux = find("flux-dev").unwrap();
        let on = |gib| {
            let room = Room {
                bytes: Bytes::gib(gib),
                is_f32: false,
            };
            flux.best_in(&room).map(Preset::as_str)
        };
        assert_eq!(on(80), Some("full"));
        assert_eq!(on(16), Some("8-bit"));
        assert_eq!(on(10), Some("4-bit"));
        assert_eq!(on(5), None);
    }
}
