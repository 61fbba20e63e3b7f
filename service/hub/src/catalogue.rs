//! The models that have a short name: sizes, licences and memory needs, also of models that are not downloaded. Service and command line
//! take short names wherever they take a model.

mod needs;

use std::sync::LazyLock;

use figment::Figment;
use figment::providers::{Format as _, Toml};
use model::{Medium, Preset};
use residency::Bytes;
use serde::Deserialize;

pub use needs::{Extent, Fit, Needs};

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
    /// The medium that it generates.
    #[serde(rename = "medium")]
    pub makes: Makes,
    /// Its full name.
    pub title: String,
    /// What distinguishes it, in a few words.
    pub about: String,
    /// Smaller downloads of it, as the file has them: [`Model::forms`] has them as models.
    #[serde(default)]
    forms: Vec<Form>,
    /// The short name of the model that it is a form of.
    #[serde(skip)]
    form_of: Option<String>,
}

/// A smaller download of a model: its transformer in 4 bits, in one file, which is pulled with the other parts of the model.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    /// What follows the colon of its short name: `q4` of `flux-dev:q4`.
    name: String,
    /// `owner/name:file` on the hub.
    id: String,
    /// Of the file and of the other parts.
    download_gb: f64,
}

impl Form {
    /// It as a model of its own.
    fn of(&self, model: &Model) -> Model {
        Model {
            name: format!("{}:{}", model.name, self.name),
            id: self.id.clone(),
            with: std::iter::once(&model.id).chain(&model.with).cloned().collect(),
            download_gb: self.download_gb,
            forms: Vec::new(),
            form_of: Some(model.name.clone()),
            ..model.clone()
        }
    }
}

/// The memory of a card, as far as it decides what fits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes for a stage when nothing else is in the card's memory.
    pub bytes: Bytes,
    /// Whether the card computes in f32.
    pub is_f32: bool,
    /// Whether it is the processor, which computes far slower than a GPU.
    pub is_cpu: bool,
}

impl Room {
    /// The estimated room on a card that computes in bf16, by its size alone: `headroom` bytes stay free,
    /// and the driver and its libraries take some.
    pub fn expected(total: Bytes, headroom: Bytes) -> Room {
        const CONTEXT: Bytes = Bytes::mib(768);
        Room {
            bytes: total - CONTEXT - headroom,
            ..Room::default()
        }
    }

    /// Of several cards, models are compared with the one of the highest rank: the largest GPU, or the processor if it is the
    /// only one.
    pub fn rank(&self) -> (bool, Bytes) {
        (!self.is_cpu, self.bytes)
    }
}

/// Every model of the catalogue, without the forms of models.
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

/// The forms of all models.
fn forms() -> &'static [Model] {
    static FORMS: LazyLock<Vec<Model>> = LazyLock::new(|| {
        let of_model = |model: &'static Model| model.forms.iter().map(|form| form.of(model));
        all().iter().flat_map(of_model).collect()
    });
    &FORMS
}

/// The model, or the form of a model, of this short name or hub name.
pub fn find(name: &str) -> Option<&'static Model> {
    let is_it = |model: &&Model| model.name.eq_ignore_ascii_case(name) || model.id.eq_ignore_ascii_case(name);
    all().iter().chain(forms()).find(is_it)
}

/// The hub name of a short name; `None` for any other name.
pub fn id_of(short: &str) -> Option<&'static str> {
    let is_it = |model: &&Model| model.name.eq_ignore_ascii_case(short);
    let model = all().iter().chain(forms()).find(is_it)?;
    Some(&model.id)
}

/// The catalogue's model of an entry's name, which may say a revision and formats (`flux-schnell+4-bit`).
pub fn find_entry(name: &str) -> Option<&'static Model> {
    find(name.split(['+', '@', '&']).next().unwrap_or_default())
}

/// Most names that are suggested for an unknown one.
const MOST_SUGGESTED: usize = 5;
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

/// A model of this medium that fits, with the preset and the way in which it does: the first of which no weights are streamed,
/// else the first that fits.
pub fn first_that_fits(makes: Makes, room: &Room) -> Option<(&'static Model, Preset, Fit)> {
    let fitting = all().iter().filter(|model| model.makes == makes);
    let fitting = fitting.filter_map(|model| {
        let (preset, fit) = model.best_in(room)?;
        Some((model, preset, fit))
    });
    fitting.min_by_key(|(_, _, fit)| *fit != Fit::Whole)
}

/// A model of this medium that fits, to suggest in place of the model with this id, in words.
pub fn fitting_instead(makes: Makes, room: &Room, id: &str) -> Option<String> {
    let (model, preset, fit) = first_that_fits(makes, room)?;
    (model.id != id).then(|| format!("{} fits this card in {}", model.name, fit.in_words(preset)))
}

impl Fit {
    /// The preset, and whether weights are streamed: `8-bit`, `8-bit, streamed`.
    pub fn in_words(self, preset: Preset) -> String {
        match self {
            Fit::Whole => preset.as_str().to_owned(),
            Fit::Streamed { .. } => format!("{}, streamed", preset.as_str()),
        }
    }
}

impl Model {
    /// Its needs in a preset; `None` if they are not known. Those of a form are its model's in 4-bit.
    pub fn needs(&self, preset: Preset, is_f32: bool) -> Option<&'static Needs> {
        match &self.form_of {
            None => needs::needs_of(&self.name, preset, is_f32),
            Some(model) if preset == Preset::FourBit => needs::needs_of(model, preset, is_f32),
            Some(_) => None,
        }
    }

    /// Its forms, each as a model of its own.
    pub fn forms(&self) -> impl Iterator<Item = &'static Model> {
        let is_of_it = |form: &&Model| form.form_of.as_ref() == Some(&self.name);
        forms().iter().filter(is_of_it)
    }

    /// How its default request runs on a card in a preset; `None` if it does not.
    pub fn fit(&self, preset: Preset, room: &Room) -> Option<Fit> {
        self.needs(preset, room.is_f32)?.on(room)
    }

    /// The preset with the least need, and that need.
    pub fn least_need(&self, is_f32: bool) -> Option<(Preset, Bytes)> {
        let need = |preset: Preset| Some((preset, self.needs(preset, is_f32)?.least()));
        let needs = Preset::ALL.into_iter().filter_map(need);
        needs.min_by_key(|(_, need)| *need)
    }

    /// The preset that `auto` takes on a card with nothing else on it: the most accurate in which no step waits for streamed
    /// weights; where there is none, the one of which the fewest bytes are streamed. `None` if its default request fits in none.
    pub fn best_in(&self, room: &Room) -> Option<(Preset, Fit)> {
        let fitting = |preset: Preset| Some((preset, self.fit(preset, room)?));
        let fitting = Preset::ALL.into_iter().filter_map(fitting);
        fitting.min_by_key(|(_, fit)| fit.streamed())
    }

    /// Its full name and what distinguishes it: `Z-Image-Turbo, 8 steps`.
    pub fn in_words(&self) -> String {
        format!("{}, {}", self.title, self.about)
    }

    /// Whether a request of this extent runs on a card in this preset, or in any; as far as one that is no smaller is known to.
    pub fn runs(&self, asked: Extent, preset: Option<Preset>, room: &Room) -> bool {
        self.needs_of(preset, room.is_f32)
            .any(|needs| needs.runs_on(asked, room))
    }

    /// Where its default request does not fit in this preset, or in any: the size or length closest to it that does.
    pub fn smaller_in(&self, preset: Option<Preset>, room: &Room) -> Option<&'static str> {
        let fitting = self
            .needs_of(preset, room.is_f32)
            .filter_map(|needs| needs.smaller_on(room));
        let closest = fitting.min_by_key(|(index, _)| *index)?;
        Some(closest.1)
    }

    /// Its needs in this preset, or in each.
    fn needs_of(&self, preset: Option<Preset>, is_f32: bool) -> impl Iterator<Item = &'static Needs> {
        let presets = Preset::ALL.into_iter();
        let presets = presets.filter(move |each| preset.is_none_or(|preset| preset == *each));
        presets.filter_map(move |preset| self.needs(preset, is_f32))
    }
}

#[cfg(test)]
mod planned;
#[cfg(test)]
mod published;
#[cfg(test)]
mod tables;

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
            for is_f32 in [false, true] {
                let needs = Preset::ALL.map(|preset| model.needs(preset, is_f32).unwrap());
                assert!(
                    needs.is_sorted_by(|a, b| a.weights() > b.weights()),
                    "{}",
                    model.name
                );
                assert!(
                    needs.is_sorted_by(|a, b| a.whole() >= b.whole()),
                    "{}",
                    model.name
                );
                assert!(
                    needs.iter().all(|needs| needs.least() <= needs.whole()),
                    "{}",
                    model.name
                );
            }
            assert_eq!(find(&model.name).unwrap().id, model.id);
            assert_eq!(find(&model.id.to_uppercase()).unwrap().id, model.id);
        }
        let mut names: Vec<&str> = all()
            .iter()
            .chain(forms())
            .map(|model| model.name.as_str())
            .collect();
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
    fn a_form_of_a_model_is_one_file_that_is_pulled_with_the_models_other_parts() {
        assert!(forms().len() >= 3);
        for form in forms() {
            let (short, _) = form.name.split_once(':').unwrap();
            let model = find(short).unwrap();
            assert!(model.forms().any(|of_model| of_model.name == form.name));
            let reference: Reference = form.name.parse().unwrap();
            assert_eq!(reference.listed_id(), form.id);
            assert!(reference.file.is_some(), "{}", form.name);
            assert_eq!(Reference::asked(&form.name, "").unwrap(), reference);
            assert_eq!(
                Reference::of_entry(&format!("{}+4-bit", form.name)).unwrap(),
                reference
            );
            assert_eq!(find(&form.id).unwrap().name, form.name);
            assert_eq!(form.with[0], model.id);
            assert!(form.download_gb < model.download_gb);
            let room = Room {
                bytes: Bytes::gib(80),
                ..Room::default()
            };
            assert_eq!(form.best_in(&room), Some((Preset::FourBit, Fit::Whole)));
            assert_eq!(form.needs(Preset::Full, false).map(Needs::whole), None);
        }
        assert!("flux-dev:q3".parse::<Reference>().is_err());
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
        assert_eq!(similar("z-image", []), ["z-image-turbo", "z-image-base"]);
        assert_eq!(similar("moored/dem", ["moored/demo"])[0], "moored/demo");
        assert!(similar("qwertz", []).is_empty());
    }

    #[test]
    fn auto_takes_the_most_accurate_preset_that_is_not_streamed_else_the_one_that_is_streamed_least() {
        let flux = find("flux-dev").unwrap();
        let on = |mib| {
            let room = Room {
                bytes: Bytes::mib(mib),
                ..Room::default()
            };
            let best = flux.best_in(&room);
            best.map(|(preset, fit)| fit.in_words(preset))
        };
        assert_eq!(on(80 << 10).as_deref(), Some("full"));
        assert_eq!(
            on(20 << 10).as_deref(),
            Some("full"),
            "its modulation is streamed once, and no step waits"
        );
        assert_eq!(on(10 << 10).as_deref(), Some("8-bit"));
        assert_eq!(on(6 << 10).as_deref(), Some("4-bit"));
        assert_eq!(on(3 << 10).as_deref(), Some("4-bit, streamed"));
        assert_eq!(on(300), None);
        assert_eq!(on(0), None);
    }

    #[test]
    fn a_model_that_is_not_streamed_is_suggested_before_one_that_is() {
        let room = |mib| Room {
            bytes: Bytes::mib(mib),
            ..Room::default()
        };
        for mib in (0..64 << 10).step_by(512) {
            let room = room(mib);
            for makes in [Makes::Image, Makes::Video, Makes::Audio] {
                let any = || all().iter().filter(|model| model.makes == makes);
                let is_whole =
                    |model: &&Model| model.best_in(&room).is_some_and(|(_, fit)| fit == Fit::Whole);
                let found = first_that_fits(makes, &room);
                assert_eq!(found.is_some(), any().any(|model| model.best_in(&room).is_some()));
                assert_eq!(
                    found.is_some_and(|(_, _, fit)| fit == Fit::Whole),
                    any().any(|model| is_whole(&model)),
                    "{mib} MiB"
                );
            }
        }
    }

    #[test]
    fn more_memory_never_makes_a_model_fit_worse() {
        for model in all() {
            for preset in Preset::ALL {
                let mut before: Option<Fit> = None;
                for mib in (0..48 << 10).step_by(256) {
                    let room = Room {
                        bytes: Bytes::mib(mib),
                        ..Room::default()
                    };
                    let fit = model.fit(preset, &room);
                    let needs = model.needs(preset, false).unwrap();
                    assert_eq!(fit.is_some(), room.bytes >= needs.least(), "{} {mib}", model.name);
                    if let Some(before) = before {
                        assert!(
                            fit.unwrap().streamed() <= before.streamed(),
                            "{} {mib}",
                            model.name
                        );
                    }
                    before = fit;
                }
                assert_eq!(before, Some(Fit::Whole));
            }
        }
    }

    #[test]
    fn a_size_that_was_asked_for_is_compared_instead_of_the_default() {
        let film = find("hunyuan-video").unwrap();
        let room = Room {
            bytes: Bytes::mib(5 << 10),
            ..Room::default()
        };
        let runs = |pixels, frames| {
            let asked = Extent {
                pixels,
                frames,
                seconds: None,
            };
            film.runs(asked, None, &room)
        };
        assert!(!runs(None, None), "the default is too large");
        let label = film.smaller_in(None, &room).unwrap();
        let (width, height) = label.split_once('x').unwrap();
        let pixels: u64 = width.parse::<u64>().unwrap() * height.parse::<u64>().unwrap();
        assert!(runs(Some(pixels), None));
        assert!(runs(Some(pixels), Some(1)));
        assert!(!runs(Some(pixels), Some(10_000)), "no such film is known to run");
        assert!(!runs(Some(4 * pixels), None));
        for preset in Preset::ALL {
            let smaller = film.smaller_in(Some(preset), &room);
            let asked = Extent {
                pixels: Some(pixels),
                ..Extent::default()
            };
            assert_eq!(
                film.runs(asked, Some(preset), &room),
                smaller == Some(label),
                "{preset:?}"
            );
        }
    }

    #[test]
    fn a_gpu_goes_before_a_larger_processor() {
        let room = |gib, is_cpu| Room {
            bytes: Bytes::gib(gib),
            is_f32: is_cpu,
            is_cpu,
        };
        let rooms = [room(12, false), room(64, true), room(24, false), room(8, false)];
        assert_eq!(rooms.iter().max_by_key(|room| room.rank()), Some(&rooms[2]));
        assert_eq!(rooms[1..2].iter().max_by_key(|room| room.rank()), Some(&rooms[1]));
    }
}
