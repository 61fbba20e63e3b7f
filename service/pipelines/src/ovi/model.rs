//! An open Ovi checkpoint: its answers to a planner, and the stages of a request.

use std::path::Path;
use std::sync::Arc;

use gpu::CheckpointFile;
use model::bounds::{MAX_SIDE, common_problems, start_problem};
use model::{Field, LeftOut, Reads, smaller_sides};

use super::checkpoint::{is_transformer_file, own_layout};
use super::config::{BranchConfig, FusionConfig};
use super::plan::{DECODE, DECODE_SOUND, DENOISE, ENCODE_IMAGE, ENCODE_TEXT};
use super::prompts::Texts;
use super::sizes::{PIXELS, size_near};
use super::sound_embedding;
use super::variant::Variant;
use crate::attention::AttentionPrecision;
use crate::autoencoders::mmaudio::MmAudioConfig;
use crate::autoencoders::mmaudio::vocoder::VocoderConfig;
use crate::autoencoders::wan::{Chunking, WanVaeConfig};
use crate::film_lengths;
use crate::stage::Stage;
use crate::text::t5::T5Config;
use crate::text::tokenizers::{T5Tokenizer, TokenizeError};
use crate::text::umt5;
use crate::{
    Family, Medium, Model, ModelError, ModelParts, Observer, OwnLayout, Precision, Request, RequestError,
    Sound, StageError, StagePlan, StageRun, ValueShape, Values, Video,
};

/// Names of the components.
pub(super) use super::transformer::TRANSFORMER;
pub(super) const TEXT_ENCODER: &str = "text_encoder";
pub(super) const VAE: &str = "vae";
pub(super) use crate::autoencoders::mmaudio::COMPONENT as AUDIO_VAE;
pub(super) use crate::autoencoders::mmaudio::vocoder::COMPONENT as VOCODER;

/// Name of the family.
pub(super) const FAMILY: &str = "ovi";

/// Frames of a film per second: its sound is timed to them.
pub(super) const RATE: f32 = 24.0;

/// Samples per second of the sound.
const SAMPLES: u32 = 16_000;

/// Latent frames of sound per second.
const SOUND_RATE: f64 = 31.25;

/// The Ovi family.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ovi;

impl Family for Ovi {
    fn name(&self) -> &'static str {
        FAMILY
    }

    fn title(&self) -> Option<&'static str> {
        Some("Ovi 1.0 and 1.1")
    }

    fn own_layout(&self, files: &[&str]) -> Option<OwnLayout> {
        own_layout(files)
    }

    fn is_transformer_file(&self, names: &[&str]) -> bool {
        is_transformer_file(names)
    }

    fn open(
        &self,
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<Arc<dyn Model>>, ModelError> {
        Ok(OviModel::of(path, file, precision)?.map(|model| Arc::new(model) as Arc<dyn Model>))
    }
}

/// An Ovi checkpoint.
#[derive(Clone, Debug)]
pub struct OviModel {
    pub(super) variant: Variant,
    pub(super) transformer: FusionConfig,
    pub(super) text: T5Config,
    pub(super) tokenizer: Arc<T5Tokenizer>,
    pub(super) vae: WanVaeConfig,
    pub(super) audio_vae: MmAudioConfig,
    pub(super) vocoder: VocoderConfig,
    pub(super) parts: ModelParts,
}

/// The optional fields of a request that the model reads.
pub(super) const READS: Reads = Reads::of(&[
    Field::NegativePrompt,
    Field::TrueGuidance,
    Field::InitImage,
    Field::Fp8Attention,
]);

/// Most frames of a variant's films.
pub(super) fn most_frames(variant: Variant) -> u32 {
    4 * (variant.video_latents() as u32 - 1) + 1
}

/// All fields of a request that are out of bounds.
pub(super) fn problems(variant: Variant, request: &Request) -> Vec<RequestError> {
    let Medium::Video(video) = &request.medium else {
        return vec![RequestError::other_medium(&request.medium, "video")];
    };
    let mut problems = size_problems(variant, (video.width, video.height));
    problems.extend(common_problems(request));
    let mut refuse = |field: &str, problem: String| problems.push(RequestError::new(field, problem));
    if video.frames_per_second != RATE {
        let rate = video.frames_per_second;
        refuse(
            "frames_per_second",
            format!("is {rate}; {RATE} is expected, to which the sound is timed"),
        );
    }
    if let Some(problem) = film_lengths::problem(video.frames, most_frames(variant)) {
        refuse("frames", problem);
    } else if video.init_image.is_some() && video.frames == 1 {
        let problem = "is 1; with a picture, which is the first frame, at least 5 are expected";
        refuse("frames", problem.to_owned());
    }
    let tokens = request.max_sequence_length;
    if tokens as usize > umt5::MOST_TOKENS {
        let problem = format!("is {tokens}; at most {} is expected", umt5::MOST_TOKENS);
        refuse("max_sequence_length", problem);
    }
    if let Some(image) = &video.init_image {
        problems.extend(start_problem(image, (video.width, video.height)));
    }
    problems
}

/// Width and height that are out of bounds. Far larger frames than those that a variant was trained on are noise.
fn size_problems(variant: Variant, (width, height): (u32, u32)) -> Vec<RequestError> {
    let is_wrong = |side: u32| !(PIXELS..=MAX_SIDE).contains(&side) || !side.is_multiple_of(PIXELS);
    let sides = [("width", width), ("height", height)].into_iter();
    let wrong = sides.filter(|(_, side)| is_wrong(*side)).map(|(field, side)| {
        let expected = format!("a multiple of {PIXELS} from {PIXELS} to {MAX_SIDE}");
        RequestError::new(field, format!("is {side}; {expected} is expected"))
    });
    let wrong: Vec<RequestError> = wrong.collect();
    let most = u64::from(variant.area()) * 11 / 10;
    if wrong.is_empty() && u64::from(width) * u64::from(height) > most {
        let (near_width, near_height) = size_near((width, height), variant.area());
        let problem = format!(
            "times height, {width}x{height}, is more than this variant ({variant}) makes; {near_width}x{near_height} is near"
        );
        return vec![RequestError::new("width", problem)];
    }
    wrong
}

impl OviModel {
    /// What the model was trained on.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// Rows and columns of a film's latents.
    pub(super) fn sides(&self, video: &Video) -> (usize, usize) {
        self.vae.latent_sides(video.width, video.height)
    }

    /// Latent frames of the sound of a film of so many frames: of five seconds 157, of ten 314.
    pub(super) fn sound_latents(frames: u32) -> usize {
        let seconds = f64::from(frames.saturating_sub(1)) / f64::from(RATE);
        (seconds * SOUND_RATE + 1.0).round_ties_even() as usize
    }

    /// The sound of a film.
    pub(super) fn sound(&self, video: &Video) -> Sound {
        let frames = MmAudioConfig::FRAMES * OviModel::sound_latents(video.frames);
        Sound {
            samples_per_second: SAMPLES,
            channels: 1,
            samples: (frames * self.vocoder.hop()) as u64,
        }
    }

    /// Most tokens of the texts of a request.
    fn most_tokens(&self, request: &Request) -> usize {
        let most = self.transformer.video.text_len;
        most.min(request.max_sequence_length as usize)
    }

    /// The token ids of a text of a request.
    pub(super) fn tokens(&self, request: &Request, text: &str) -> Result<Vec<u32>, TokenizeError> {
        let ids = self.tokenizer.encode_unpadded(text, self.most_tokens(request))?;
        self.tokenizer
            .check_known(&ids, TEXT_ENCODER, self.text.vocab_size)?;
        Ok(ids)
    }

    /// The film whose decode takes a latent of this shape.
    fn video_of(&self, shape: &[usize]) -> Option<Video> {
        let &[1, channels, latents, h, w] = shape else {
            return None;
        };
        let side = |cells: usize| u32::try_from(cells.checked_mul(self.vae.factor())?).ok();
        let defaults = self.parts.defaults.video().ok()?;
        (channels == self.vae.z_dim && latents > 0).then_some(Video {
            width: side(w)?,
            height: side(h)?,
            frames: u32::try_from(self.vae.frames(latents)).ok()?,
            ..defaults.clone()
        })
    }
}

impl Model for OviModel {
    fn parts(&self) -> &ModelParts {
        &self.parts
    }

    fn reads(&self) -> Reads {
        READS
    }

    fn stages_of(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let problems = problems(self.variant, request);
        match (&request.medium, problems.is_empty()) {
            (Medium::Video(video), true) => self
                .stages(request, video)
                .map_err(|error| vec![RequestError::new("prompt", error.to_string())]),
            _ => Err(problems),
        }
    }

    fn request_of(&self, values: &[ValueShape]) -> Option<Request> {
        let of = |name: &str| values.iter().find(|value| value.name == name);
        let video = self.video_of(&of(super::plan::LATENT)?.shape)?;
        let sound = [
            1,
            OviModel::sound_latents(video.frames),
            self.transformer.audio.in_dim,
        ];
        let is_whole = values.len() == 2 && of(super::plan::SOUND)?.shape == sound;
        is_whole.then(|| Request {
            medium: Medium::Video(video),
            ..self.defaults()
        })
    }

    fn size_near(&self, width: u32, height: u32) -> (u32, u32) {
        let side = |side: u32| (side / PIXELS * PIXELS).clamp(PIXELS, MAX_SIDE);
        let near = (side(width), side(height));
        match size_problems(self.variant, near).is_empty() {
            true => near,
            false => size_near((width, height), self.variant.area()),
        }
    }

    fn frames_of(&self, seconds: f32, _frames_per_second: f32) -> u32 {
        film_lengths::nearest_of_latents(seconds, RATE).min(most_frames(self.variant))
    }

    fn left_out(&self, request: &Request) -> Vec<LeftOut> {
        let texts = Texts::of(request, self.variant);
        let most = self.most_tokens(request);
        let tokens = |text: &String| self.tokenizer.left_out(text, most).ok();
        let told = |field: &'static str, texts: &[String]| {
            let tokens = texts.iter().filter_map(tokens).sum();
            let left_out = LeftOut::of_prompt(Some(tokens), request)?;
            Some(LeftOut {
                field: field.into(),
                ..left_out
            })
        };
        let of_prompt = told("prompt", std::slice::from_ref(&texts.prompt));
        let of_negative = texts
            .negative
            .and_then(|negative| told("negative_prompt", &negative));
        of_prompt.into_iter().chain(of_negative).collect()
    }

    fn smaller(&self, request: &Request) -> Vec<(String, Request)> {
        [smaller_sides(request, PIXELS), film_lengths::shorter(request)].concat()
    }

    fn smallest(&self) -> Request {
        let mut request = self.defaults();
        (request.prompt, request.steps) = ("the smallest film".to_owned(), 1);
        if let Medium::Video(video) = &mut request.medium {
            (video.width, video.height, video.frames) = (2 * PIXELS, 2 * PIXELS, 5);
        }
        request
    }

    fn planned(&self, stage: &str, request: &Request) -> Vec<ops::Planned> {
        let Ok(video) = request.video() else {
            return Vec::new();
        };
        let (sides, dtype) = (self.sides(video), self.parts.dtype());
        let sound = OviModel::sound_latents(video.frames);
        match stage {
            ENCODE_TEXT => {
                let texts = Texts::of(request, self.variant);
                let tokens = self.tokens(request, &texts.prompt).map(|ids| ids.len());
                let planned = tokens.map(|tokens| self.text.planned(tokens, dtype));
                planned.into_iter().collect()
            }
            ENCODE_IMAGE => self.vae.planned_to_encode(sides, 1, Chunking::Whole, dtype),
            DENOISE => {
                let config = &self.transformer;
                let [film, sound] = self.film_tokens(video).all();
                let attention = AttentionPrecision::asked(request);
                let attended = |branch: &BranchConfig, tokens: usize| {
                    branch
                        .blocks()
                        .planned(1, tokens, branch.text_len, (dtype, attention))
                };
                let mut all = sound_embedding::planned(config, sound, dtype);
                all.extend(attended(&config.audio, sound));
                all.extend(attended(&config.video, film));
                all
            }
            DECODE_SOUND => {
                let frames = MmAudioConfig::FRAMES * sound;
                let mut all = self.audio_vae.planned_to_decode(sound, dtype);
                all.extend(self.vocoder.planned_to_vocode(frames, dtype));
                all
            }
            DECODE => {
                let latents = self.vae.latents(video.frames as usize);
                self.vae.planned_to_decode(sides, latents, Chunking::Whole, dtype)
            }
            _ => Vec::new(),
        }
    }

    fn run(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError> {
        Stage::new(self, stage, observer).run()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_sound_are_those_of_the_variants() {
        for variant in Variant::ALL {
            let frames = most_frames(variant);
            assert_eq!(OviModel::sound_latents(frames), variant.audio_latents());
        }
        assert_eq!([1, 5].map(OviModel::sound_latents), [1, 6]);
    }

    #[test]
    fn refusals_offer_what_is_near() {
        let refused = |change: &dyn Fn(&mut Video)| {
            let mut video = Video {
                width: 960,
                height: 544,
                frames: 121,
                frames_per_second: RATE,
                ..Video::default()
            };
            change(&mut video);
            let request = Request::of(Medium::Video(video), 10, 0.0, 512);
            let problems = problems(Variant::Of720For5s, &request);
            problems
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join("; ")
        };
        assert_eq!(refused(&|_| {}), "");
        for (change, named) in [
            (
                &(|v: &mut Video| v.frames = 120) as &dyn Fn(&mut Video),
                "117 or 121",
            ),
            (&|v| v.frames = 241, "at most 121"),
            (&|v| v.width = 720, "is 720; a multiple of 32"),
            (&|v| (v.width, v.height) = (1280, 704), "960x544 is near"),
            (&|v| v.frames_per_second = 16.0, "24 is expected"),
        ] {
            let found = refused(change);
            assert!(found.contains(named), "{found}");
        }
    }
}
