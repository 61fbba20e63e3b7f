//! Requests, independent of any protocol.

mod pictures;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::adapter::AdapterUse;
use crate::media::{MediaFormat, SOUND_OF_FILM, Sound};
use crate::sampler::Sampler;

pub use pictures::{Picture, PictureMut, PictureSlot};

/// A picture supplied by the client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitImage {
    pub width: u32,
    pub height: u32,
    /// RGB, 8 bits each, row-major; empty where only its size counts ([`Request::without_media_data`]).
    pub rgb: Bytes,
}

/// Default strength of image to image.
const IMAGE_STRENGTH: f32 = 0.6;

/// A request that does not say otherwise is sampled on one card.
const fn one_card() -> u32 {
    1
}

/// Which part of a picture changes, of the picture's size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mask {
    pub width: u32,
    pub height: u32,
    /// A byte for each pixel, row-major: 0 keeps the pixel, 255 changes it. Sampling treats 128 and more as changing. In
    /// between, the result is mixed with the picture that it started from. Empty where only the mask's size counts.
    pub grey: Bytes,
}

/// The approximation in the decoded latent of a request with a mask.
const NOT_PASTED: &str = "what the mask kept is as the autoencoder rebuilds it: the picture's own pixels are in the picture of the latent's job alone";

/// A film or a track supplied by the client, whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Clip {
    pub format: MediaFormat,
    /// All units, in the format of [`MediaFormat`]; empty where only the format counts ([`Request::without_media_data`]).
    pub data: Bytes,
}

impl Clip {
    /// Whether its data fits its format, or is left out.
    pub fn is_whole(&self) -> bool {
        self.data.is_empty() || self.format.bytes() == Some(self.data.len() as u64)
    }
}

/// One result to generate. All defaults are filled in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    pub prompt: String,
    pub steps: u32,
    /// Guidance scale; ignored by models without it.
    pub guidance: f32,
    /// Text that the result is led away from, by a second pass of the model in every step: see [`Request::negative`].
    pub negative_prompt: Option<String>,
    /// Scale of the difference between the pass of the prompt and that of the negative prompt; 1: one pass.
    pub true_guidance: f32,
    /// How noise is removed from step to step; `None`: as the checkpoint says.
    pub sampler: Option<Sampler>,
    /// Leaves out passes that hardly differ from an earlier one: the change of the first block, relative to that of the last pass
    /// that was computed, up to which a pass is estimated from that one. 0: every pass is computed.
    #[serde(default)]
    pub step_cache: f32,
    /// Whether attention is computed in e4m3, where the card has it.
    #[serde(default)]
    pub fp8_attention: bool,
    /// How many cards sample together, each a part of the tokens: 1 or 2.
    #[serde(default = "one_card")]
    pub cards: u32,
    /// Seed of the starting noise.
    pub seed: u64,
    /// Maximum prompt length in tokens; a family may pad to this length.
    pub max_sequence_length: u32,
    /// Fraction of the schedule to run from a starting point, from 0 to 1.
    pub strength: f32,
    /// Whether to send previews while denoising.
    pub preview: bool,
    /// Whether sampling starts from the values of an earlier job, instead of from noise.
    pub from_values: bool,
    /// Adapters, in the order in which their terms are added.
    pub adapters: Vec<AdapterUse>,
    /// Most requests whose steps are computed in one pass of the model, if its family supports shared passes. 1: the request is
    /// sampled alone, and its result is the same to the bit whatever else runs. More: the result is the same within rounding.
    pub slots: u32,
    pub medium: Medium,
}

/// The medium to generate; a family supports one of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Medium {
    Image(Image),
    Video(Video),
    Audio(Audio),
}

/// Parameters of a picture.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Image {
    pub width: u32,
    pub height: u32,
    /// Image to image: the starting picture, already of `width` x `height`.
    pub init_image: Option<InitImage>,
    /// Inpainting: the part of the start that changes, already of `width` x `height`.
    pub mask: Option<Mask>,
    /// Editing: pictures that the prompt is about, in sizes that the model takes ([`Model::reference_fit`]).
    ///
    /// [`Model::reference_fit`]: crate::Model::reference_fit
    pub references: Vec<InitImage>,
    /// ControlNets, in order.
    pub controls: Vec<ControlUse>,
    /// Editing: the references once more, in the size in which a text encoder sees them, for models that scale them twice
    /// ([`ReferenceFit::seen`](crate::ReferenceFit::seen)); else none.
    #[serde(default)]
    pub seen: Vec<InitImage>,
}

/// A ControlNet in a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ControlUse {
    /// Name of the ControlNet, as in [`AdapterFile::name`](crate::AdapterFile::name).
    pub name: String,
    /// The control picture, already of the picture's `width` x `height`.
    pub image: InitImage,
    /// Factor of the residuals that the ControlNet adds.
    pub scale: f32,
    /// The part of the steps in which it acts, from 0 to 1.
    pub start: f32,
    pub end: f32,
    /// The mode of a union ControlNet.
    pub mode: Option<u32>,
}

/// Parameters of a video.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Video {
    pub width: u32,
    pub height: u32,
    pub frames: u32,
    pub frames_per_second: f32,
    /// Most frames that are delivered at a time; 0: as they are decoded. It never changes a pixel.
    pub frames_at_a_time: u32,
    /// Image to video: the first frame; already of `width` x `height`.
    pub init_image: Option<InitImage>,
    /// The picture that the film ends with; already of `width` x `height`.
    pub end_image: Option<InitImage>,
    /// Video to video: the film to start from, in its own size and length.
    pub init_video: Option<Clip>,
}

/// Parameters of a track.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Audio {
    pub seconds: f32,
    /// Lyrics; empty for an instrumental.
    pub lyrics: String,
    /// Audio to audio: the track to start from, in its own rate and length: the source of [`AudioTask`].
    pub init_audio: Option<Clip>,
    /// A track whose timbre the result takes, in its own rate and length.
    pub reference: Option<Clip>,
    pub task: AudioTask,
    /// Tempo; `None`: the model's choice.
    pub beats_per_minute: Option<u32>,
    /// Key and scale: `C major`; empty: the model's choice.
    pub key: String,
    /// Beats in a bar: `4`; empty: the model's choice.
    pub time_signature: String,
    /// Language of the lyrics: `en`; empty: the model's default.
    pub language: String,
    /// With a source: a separate strength for each part of the track, as points between which it changes linearly; empty:
    /// [`Request::strength`] everywhere. A frame stays the source's until the schedule reaches its strength.
    pub strengths: Vec<StrengthPoint>,
    /// Where decoding begins, in seconds: the part before it follows at the end.
    pub decode_from_seconds: f32,
}

/// The strength of a frame of a track.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StrengthPoint {
    pub seconds: f32,
    /// From 0 (the source) to 1 (all of the schedule).
    pub strength: f32,
}

/// The task of a track. Windows are in seconds of the track; names of tracks are the model's (`vocals`, `drums`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum AudioTask {
    /// A new track.
    #[default]
    TextToMusic,
    /// The source with a window generated anew.
    Repaint { start_seconds: f32, end_seconds: f32 },
    /// The source's melody and rhythm in another style.
    Cover,
    /// Extracts one track of the source.
    Extract { track: String },
    /// Adds a track to the source, within a window.
    Lego {
        track: String,
        start_seconds: f32,
        end_seconds: f32,
    },
    /// The source with further tracks.
    Complete { tracks: Vec<String> },
}

impl AudioTask {
    /// Name of the task: `text2music`, `repaint`, `cover`, `extract`, `lego`, `complete`.
    pub fn name(&self) -> &'static str {
        match self {
            AudioTask::TextToMusic => "text2music",
            AudioTask::Repaint { .. } => "repaint",
            AudioTask::Cover => "cover",
            AudioTask::Extract { .. } => "extract",
            AudioTask::Lego { .. } => "lego",
            AudioTask::Complete { .. } => "complete",
        }
    }
}

impl Medium {
    /// Name of the medium: `image`, `video`, `audio`.
    pub fn name(&self) -> &'static str {
        match self {
            Medium::Image(_) => "image",
            Medium::Video(_) => "video",
            Medium::Audio(_) => "audio",
        }
    }

    /// Width and height in pixels; `None` for a track.
    pub fn size(&self) -> Option<(u32, u32)> {
        match self {
            Medium::Image(image) => Some((image.width, image.height)),
            Medium::Video(video) => Some((video.width, video.height)),
            Medium::Audio(_) => None,
        }
    }

    /// Whether whole results of these formats, each with the name of its track, are what the request asks for: one or several, and
    /// of a film the sound that it says it has, and no other.
    pub fn is_made_of<'a>(&self, tracks: impl Iterator<Item = (&'a str, MediaFormat)> + Clone) -> bool {
        let sound = tracks.clone().find_map(|(_, format)| format.sound());
        let mut others = tracks.clone().filter(|(name, _)| !name.is_empty());
        let has_its_sound = match self {
            Medium::Video(_) => others.eq(sound.map(|sound| (SOUND_OF_FILM, sound.track()))),
            Medium::Image(_) => others.next().is_none(),
            Medium::Audio(_) => true,
        };
        let mut formats = tracks.map(|(_, format)| format).peekable();
        formats.peek().is_some() && has_its_sound && formats.all(|format| self.is_made_as(&format))
    }

    /// Whether a whole result of this format satisfies the request. The length of a track need not be exact.
    pub fn is_made_as(&self, format: &MediaFormat) -> bool {
        match (self, format) {
            (Medium::Image(image), MediaFormat::Image { width, height }) => {
                (image.width, image.height) == (*width, *height)
            }
            (
                Medium::Video(video),
                MediaFormat::Video {
                    width,
                    height,
                    frames,
                    ..
                },
            ) => (video.width, video.height, video.frames) == (*width, *height, *frames),
            (
                Medium::Audio(_) | Medium::Video(_),
                MediaFormat::Audio {
                    samples_per_second, ..
                },
            ) => *samples_per_second > 0,
            _ => false,
        }
    }

    /// The starting picture.
    pub fn init_image(&self) -> Option<&InitImage> {
        match self {
            Medium::Image(image) => image.init_image.as_ref(),
            Medium::Video(video) => video.init_image.as_ref(),
            Medium::Audio(_) => None,
        }
    }

    /// The starting film or track.
    pub fn init_clip(&self) -> Option<&Clip> {
        match self {
            Medium::Image(_) => None,
            Medium::Video(video) => video.init_video.as_ref(),
            Medium::Audio(audio) => audio.init_audio.as_ref(),
        }
    }

    /// Whether it starts from a picture, a film or a track.
    pub fn has_start(&self) -> bool {
        self.init_image().is_some() || self.init_clip().is_some()
    }
}

impl Request {
    /// Whether the strength of an adapter changes over the steps.
    pub fn has_curves(&self) -> bool {
        self.adapters.iter().any(|each| !each.strength.is_constant())
    }

    /// The negative prompt, if steps take two passes: the prompt is set, even if empty, and the true guidance is over 1, as in
    /// diffusers' pipelines. Either has no effect without the other.
    pub fn negative(&self) -> Option<&str> {
        self.negative_prompt
            .as_deref()
            .filter(|_| self.true_guidance > 1.0)
    }

    /// A default request: no prompt, seed 0, no starting point, no previews. From a picture, a picture runs 0.6 of its
    /// schedule, as diffusers' pipelines do; other media run all of it.
    pub fn of(medium: Medium, steps: u32, guidance: f32, max_sequence_length: u32) -> Request {
        Request {
            prompt: String::new(),
            steps,
            guidance,
            negative_prompt: None,
            true_guidance: 1.0,
            sampler: None,
            step_cache: 0.0,
            fp8_attention: false,
            cards: one_card(),
            seed: 0,
            max_sequence_length,
            strength: match medium {
                Medium::Image(_) => IMAGE_STRENGTH,
                Medium::Video(_) | Medium::Audio(_) => 1.0,
            },
            preview: false,
            from_values: false,
            adapters: Vec::new(),
            slots: 1,
            medium,
        }
    }

    /// The request with the formats and sizes of its pictures, films and tracks, without their data.
    #[must_use]
    pub fn without_media_data(&self) -> Request {
        let mut request = self.clone();
        for picture in request.medium.pictures_mut() {
            picture.data.clear();
        }
        let clips = match &mut request.medium {
            Medium::Image(_) => [None, None],
            Medium::Video(video) => [video.init_video.as_mut(), None],
            Medium::Audio(audio) => [audio.init_audio.as_mut(), audio.reference.as_mut()],
        };
        for clip in clips.into_iter().flatten() {
            clip.data.clear();
        }
        request
    }

    /// Whether the data of a picture, film or track is left out: such a request can be planned but not run.
    pub fn lacks_media_data(&self) -> bool {
        let reference = match &self.medium {
            Medium::Audio(audio) => audio.reference.as_ref(),
            Medium::Image(_) | Medium::Video(_) => None,
        };
        let mut clips = self.medium.init_clip().into_iter().chain(reference);
        let pictures = self.medium.pictures();
        pictures.iter().any(|picture| picture.data.is_empty()) || clips.any(|clip| clip.data.is_empty())
    }

    /// How the result differs if it is decoded later from the request's latent; `None`: it does not. With a mask, the request's
    /// own result has pixels of the start, which no latent has.
    pub fn approximation_of_latent(&self) -> Option<&'static str> {
        match &self.medium {
            Medium::Image(image) if image.mask.is_some() && image.init_image.is_some() => Some(NOT_PASTED),
            Medium::Image(_) | Medium::Video(_) | Medium::Audio(_) => None,
        }
    }

    /// The request of one of several items: `item` is added to the seed.
    #[must_use]
    pub fn of_item(&self, item: u32) -> Request {
        let seed = self.seed.wrapping_add(u64::from(item));
        Request { seed, ..self.clone() }
    }

    /// The requested picture.
    ///
    /// # Errors
    /// When the request is for another medium.
    pub fn image(&self) -> Result<&Image, RequestError> {
        match &self.medium {
            Medium::Image(image) => Ok(image),
            other => Err(RequestError::other_medium(other, "image")),
        }
    }

    /// The requested film.
    ///
    /// # Errors
    /// When the request is for another medium.
    pub fn video(&self) -> Result<&Video, RequestError> {
        match &self.medium {
            Medium::Video(video) => Ok(video),
            other => Err(RequestError::other_medium(other, "video")),
        }
    }

    /// Adds all of it to a hash: its fields, and the data of its pictures, films and tracks.
    pub fn hash_into(&self, hash: &mut blake3::Hasher) {
        // Numbers that are not finite are equal in JSON; such requests are refused.
        let fields = serde_json::to_vec(&self.without_media_data()).unwrap_or_default();
        let pictures = self.medium.pictures();
        let reference = match &self.medium {
            Medium::Audio(audio) => audio.reference.as_ref(),
            Medium::Image(_) | Medium::Video(_) => None,
        };
        let clips = self.medium.init_clip().into_iter().chain(reference);
        let data = pictures.iter().map(|picture| &picture.data[..]);
        let data = data.chain(clips.map(|clip| &clip.data[..]));
        for part in std::iter::once(&fields[..]).chain(data) {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    }

    /// A request with only the prompts, their longest length, and `medium`, for a stage that reads nothing else. A negative
    /// prompt is included where it has an effect.
    pub fn of_prompt(&self, medium: Medium) -> Request {
        Request {
            prompt: self.prompt.clone(),
            negative_prompt: self.negative().map(str::to_owned),
            // The scale does not change the encodings of the prompts.
            true_guidance: if self.negative().is_some() { 2.0 } else { 1.0 },
            ..Request::of(medium, 1, 0.0, self.max_sequence_length)
        }
    }

    /// Bytes of the pictures, films and tracks that it contains.
    pub fn input_bytes(&self) -> u64 {
        let pictures = self.medium.pictures();
        let reference = match &self.medium {
            Medium::Audio(audio) => audio.reference.as_ref(),
            Medium::Image(_) | Medium::Video(_) => None,
        };
        let clips = self.medium.init_clip().into_iter().chain(reference);
        let clips = clips.map(|clip| &clip.data);
        let all = pictures.iter().map(|picture| picture.data).chain(clips);
        all.map(|data| data.len() as u64).sum()
    }
}

impl Video {
    /// The format of the film that is asked for, with this sound.
    pub fn format(&self, sound: Option<Sound>) -> MediaFormat {
        MediaFormat::Video {
            width: self.width,
            height: self.height,
            frames: self.frames,
            frames_per_second: self.frames_per_second,
            sound,
        }
    }
}

impl Image {
    /// A picture of this size, without a starting picture.
    pub fn of(width: u32, height: u32) -> Image {
        Image {
            width,
            height,
            ..Image::default()
        }
    }

    /// Restores the start's pixels where the mask keeps them. Does nothing without a mask, or where the start is a latent.
    pub fn keep_unmasked(&self, generated: &mut [u8]) {
        if let (Some(mask), Some(start)) = (&self.mask, &self.init_image) {
            mask.keep_unmasked(start, generated);
        }
    }
}

impl Mask {
    /// A mask of this size, without its data.
    pub fn of_size((width, height): (u32, u32)) -> Mask {
        Mask {
            width,
            height,
            grey: Bytes::new(),
        }
    }

    /// Bytes of its data when complete.
    fn whole_bytes(&self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }

    /// Whether its data fits its size, or is left out.
    pub fn is_whole(&self) -> bool {
        self.grey.is_empty() || self.grey.len() as u64 == self.whole_bytes()
    }

    /// Mixes a generated picture with the one that it started from, RGB of this size: unmasked pixels are the start's.
    pub fn keep_unmasked(&self, start: &InitImage, generated: &mut [u8]) {
        let pixels = generated.chunks_exact_mut(3).zip(start.rgb.chunks_exact(3));
        for ((pixel, before), &mask) in pixels.zip(&self.grey) {
            let mask = u32::from(mask);
            for (now, &before) in pixel.iter_mut().zip(before) {
                *now = ((u32::from(*now) * mask + u32::from(before) * (255 - mask) + 127) / 255) as u8;
            }
        }
    }
}

impl InitImage {
    /// A picture of this size, without its data.
    pub fn of_size((width, height): (u32, u32)) -> InitImage {
        InitImage {
            width,
            height,
            rgb: Bytes::new(),
        }
    }

    /// Bytes of its data when complete.
    fn whole_bytes(&self) -> u64 {
        3 * u64::from(self.width) * u64::from(self.height)
    }

    /// Whether its data fits its size, or is left out.
    pub fn is_whole(&self) -> bool {
        self.rgb.is_empty() || self.rgb.len() as u64 == self.whole_bytes()
    }
}

/// An invalid field of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct RequestError {
    /// Name of the field in the public API.
    pub field: String,
    /// The problem, and the valid values.
    pub problem: String,
}

impl RequestError {
    /// From a field and its problem.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> RequestError {
        RequestError {
            field: field.into(),
            problem: problem.into(),
        }
    }

    /// Error for a request of one medium to a model of another.
    pub fn other_medium(asked: &Medium, made: &str) -> RequestError {
        let problem = format!(
            "generates {made}, and {} was asked for; `moored models` lists what each generates",
            asked.name()
        );
        RequestError::new("model", problem)
    }
}
