//! The settings of a result, as they are stored in its file.

use model::{AdapterUse, Audio, AudioTask, Image, Medium, Request, Sampler, Sampling, Video};
use serde::{Deserialize, Serialize};

/// The model with which a request is run.
#[derive(Clone, Copy, Debug)]
pub struct MadeWith<'a> {
    /// Id of the model.
    pub model: &'a str,
    /// Key of its entry without adapters: revision and quantization too.
    pub model_key: &'a str,
    /// Adapters whose tensors are ignored where the model has no such layer.
    pub ignores_unknown: &'a [&'a str],
}

/// Settings of a result: enough to reproduce it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    pub prompt: String,
    pub seed: u64,
    pub width: u32,
    pub height: u32,
    pub steps: u32,
    pub guidance: f32,
    /// Where it had an effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub negative_prompt: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub true_guidance: Option<f32>,
    /// Where the request named one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampler: Option<Sampler>,
    /// Where the request left passes out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_cache: Option<f32>,
    /// Where attention was asked for in fp8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8_attention: Option<bool>,
    pub max_sequence_length: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strength: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frames: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frames_per_second: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f32>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub lyrics: String,
    /// The task on the source: `repaint`, `cover`, `extract`, `lego` or `complete`; empty for a new track.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub task: String,
    /// Tracks that the task names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tracks: Vec<String>,
    /// Seconds and strengths of the parts of a track; empty for one strength.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub strengths: Vec<(f32, f32)>,
    /// Start and end of the part that was made anew, in seconds; without an end it reaches to the end of the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<(f32, Option<f32>)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bpm: Option<u32>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub key: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub time_signature: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub language: String,
    /// Id of the model.
    pub model: String,
    /// Entry key: revision and quantization too.
    pub model_key: String,
    /// Adapters, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<RecipeAdapter>,
    /// Pictures of the request besides the start picture, which the recipe does not contain: `mask`, `reference`, `control`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pictures: Vec<String>,
    /// Tracks of the request, which the recipe does not contain: `source`, `reference`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sounds: Vec<String>,
    /// Version of the service.
    pub version: String,
}

/// An adapter in a [`Recipe`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecipeAdapter {
    pub id: String,
    /// In every step; with a curve, that of the first.
    pub strength: f32,
    /// Points of position and strength; empty for one strength.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub curve: Vec<(f32, f32)>,
    /// Absent: as `strength`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_strength: Option<f32>,
    /// Tensors for layers that the model lacks were ignored.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ignore_unknown: bool,
}

impl RecipeAdapter {
    fn of(each: &AdapterUse, with: &MadeWith<'_>) -> RecipeAdapter {
        let strength = each.strength.first();
        RecipeAdapter {
            id: each.name.clone(),
            strength,
            curve: match each.strength.is_constant() {
                true => Vec::new(),
                false => each.strength.points().to_vec(),
            },
            text_strength: (each.text_strength != strength).then_some(each.text_strength),
            ignore_unknown: with.ignores_unknown.contains(&each.name.as_str()),
        }
    }
}

impl Recipe {
    /// The recipe of a request to a model. Every field of a request is named here, so that the compiler asks for a decision
    /// about a new one.
    pub fn of(request: &Request, with: &MadeWith<'_>, from_latent: bool) -> Recipe {
        let Request {
            prompt,
            steps,
            guidance,
            negative_prompt: _,
            true_guidance,
            sampler,
            step_cache,
            fp8_attention,
            cards: _, // the result is the same on one
            seed,
            max_sequence_length,
            strength,
            preview: _,
            from_values: _,
            adapters,
            slots: _,
            medium,
        } = request;
        let (width, height) = medium.size().unwrap_or_default();
        let adapters = adapters.iter().map(|each| RecipeAdapter::of(each, with));
        let mut recipe = Recipe {
            prompt: prompt.clone(),
            seed: *seed,
            width,
            height,
            steps: *steps,
            guidance: *guidance,
            negative_prompt: request.negative().map(str::to_owned),
            true_guidance: request.negative().map(|_| *true_guidance),
            sampler: *sampler,
            step_cache: Some(*step_cache).filter(|change| *change > 0.0),
            fp8_attention: fp8_attention.then_some(true),
            max_sequence_length: *max_sequence_length,
            model: with.model.to_owned(),
            model_key: with.model_key.to_owned(),
            adapters: adapters.collect(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Recipe::default()
        };
        let starts = match medium {
            Medium::Image(image) => recipe.set_picture(image),
            Medium::Video(video) => recipe.set_film(video),
            Medium::Audio(audio) => recipe.set_track(audio),
        };
        recipe.strength = (starts || from_latent).then_some(*strength);
        recipe
    }

    /// The sampling settings, as far as the recipe has them. An empty recipe, which was read from no file, has only zeros.
    pub fn sampling(&self) -> Sampling {
        let number = |value: u32| (value > 0).then_some(value);
        let is_read = self.steps > 0;
        Sampling {
            steps: number(self.steps),
            guidance: is_read.then_some(self.guidance),
            negative_prompt: self.negative_prompt.clone(),
            true_guidance: self.true_guidance,
            sampler: self.sampler,
            step_cache: self.step_cache,
            fp8_attention: self.fp8_attention,
            cards: None,
            seed: is_read.then_some(self.seed),
            max_sequence_length: number(self.max_sequence_length),
            strength: self.strength,
        }
    }

    /// Takes the fields that only pictures have. Returns whether the request starts from a picture.
    fn set_picture(&mut self, image: &Image) -> bool {
        let Image {
            width: _,
            height: _,
            init_image,
            mask,
            references,
            seen: _, // the same pictures
            controls,
        } = image;
        self.pictures = input_names([
            ("mask", mask.is_some()),
            ("reference", !references.is_empty()),
            ("control", !controls.is_empty()),
        ]);
        init_image.is_some()
    }

    /// Takes the fields that only films have. Returns whether the request starts from a picture or a film.
    fn set_film(&mut self, video: &Video) -> bool {
        let Video {
            width: _,
            height: _,
            frames,
            frames_per_second,
            frames_at_a_time: _,
            init_image,
            end_image,
            init_video,
        } = video;
        self.pictures = input_names([("end", end_image.is_some())]);
        self.frames = Some(*frames);
        self.frames_per_second = Some(*frames_per_second);
        init_image.is_some() || init_video.is_some()
    }

    /// Takes the fields that only tracks have. Returns whether the request starts from a track.
    fn set_track(&mut self, audio: &Audio) -> bool {
        let Audio {
            seconds,
            lyrics,
            init_audio,
            reference,
            task,
            beats_per_minute,
            key,
            time_signature,
            language,
            strengths,
            decode_from_seconds: _,
        } = audio;
        self.seconds = Some(*seconds);
        self.lyrics.clone_from(lyrics);
        (self.bpm, self.key) = (*beats_per_minute, key.clone());
        (self.time_signature, self.language) = (time_signature.clone(), language.clone());
        let points = strengths.iter().map(|point| (point.seconds, point.strength));
        self.strengths = points.collect();
        if *task != AudioTask::TextToMusic {
            task.name().clone_into(&mut self.task);
        }
        match task {
            AudioTask::TextToMusic | AudioTask::Cover => {}
            &AudioTask::Repaint {
                start_seconds,
                end_seconds,
            } => self.window = Some(window_of(start_seconds, end_seconds)),
            AudioTask::Extract { track } => self.tracks = vec![track.clone()],
            AudioTask::Lego {
                track,
                start_seconds,
                end_seconds,
            } => {
                self.tracks = vec![track.clone()];
                self.window = Some(window_of(*start_seconds, *end_seconds));
            }
            AudioTask::Complete { tracks } => self.tracks.clone_from(tracks),
        }
        self.sounds = input_names([
            ("source", init_audio.is_some()),
            ("reference", reference.is_some()),
        ]);
        init_audio.is_some()
    }
}

/// A window as a recipe has it: JSON has no infinite number.
fn window_of(start_seconds: f32, end_seconds: f32) -> (f32, Option<f32>) {
    (start_seconds, Some(end_seconds).filter(|end| end.is_finite()))
}

/// The names of the inputs that the request has.
fn input_names<const N: usize>(named: [(&str, bool); N]) -> Vec<String> {
    let input_names = named.into_iter().filter(|(_, is_given)| *is_given);
    input_names.map(|(name, _)| name.to_owned()).collect()
}

/// The name of a sampler in web UIs for Stable Diffusion; without one, Euler's.
pub fn sampler_of(sampler: Option<Sampler>) -> &'static str {
    match sampler {
        None | Some(Sampler::Euler) => "Euler",
        Some(Sampler::EulerAncestral) => "Euler a",
        Some(Sampler::Dpmpp2mKarras) => "DPM++ 2M Karras",
    }
}

/// The recipe as other tools read it, in the form of web UIs for Stable Diffusion: the prompt, the negative prompt, and
/// a line of settings. With a negative prompt, the scale is that of true guidance, as other tools understand it. The Python client
/// writes the same (`client-py/src/moored/_saving.py`).
pub(crate) fn parameters(recipe: &Recipe) -> String {
    let (width, height) = (recipe.width, recipe.height);
    let settings = [
        ("Steps", Some(recipe.steps.to_string())),
        ("Sampler", Some(sampler_of(recipe.sampler).to_owned())),
        (
            "CFG scale",
            Some(recipe.true_guidance.unwrap_or(recipe.guidance).to_string()),
        ),
        ("Seed", Some(recipe.seed.to_string())),
        ("Size", (width > 0).then(|| format!("{width}x{height}"))),
        ("Model", (!recipe.model.is_empty()).then(|| recipe.model.clone())),
        (
            "Denoising strength",
            recipe.strength.map(|strength| strength.to_string()),
        ),
        (
            "Version",
            (!recipe.version.is_empty()).then(|| format!("moored {}", recipe.version)),
        ),
    ];
    let settings: Vec<String> = settings
        .into_iter()
        .filter_map(|(name, value)| Some(format!("{name}: {}", quoted(value?))))
        .collect();
    let line = settings.join(", ");
    let negative = recipe.negative_prompt.as_ref().filter(|text| !text.is_empty());
    let prompts = [
        Some(recipe.prompt.clone()).filter(|text| !text.is_empty()),
        negative.map(|text| format!("Negative prompt: {text}")),
        Some(line),
    ];
    let lines: Vec<String> = prompts.into_iter().flatten().collect();
    let text = lines.join("\n");
    text.replace('\0', "") // a text of PNG has none
}

/// A value, as a JSON string where a reader would take a part of it for the next setting.
fn quoted(value: String) -> String {
    match value.contains([',', ':', '"', '\n']) {
        true => serde_json::Value::String(value).to_string(),
        false => value,
    }
}
