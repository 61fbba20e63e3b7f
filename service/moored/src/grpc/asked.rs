//! A request to generate, whatever its medium: the same checks and defaults for all three calls.

mod track;

use engine::Error;
use pipelines::{Clip, InitImage, MediaFormat, Medium, Request, RequestError};

use track::{AskedTrack, seconds_of};

use super::status::invalid;
use super::stream::Encoding;
use crate::films::FilmFormat;
use crate::proto::v1;

/// Longest prompt, and longest lyrics, in characters. T5 reads 512 tokens at the most: what is longer is a mistake.
const LONGEST_PROMPT_CHARACTERS: usize = 10_000;
/// Longest side of what is generated or encoded, in pixels; a model may take less.
pub(super) const LONGEST_SIDE_PIXELS: u32 = 4096;
/// Items of one request.
const MOST_ITEMS: u32 = 64;
/// ControlNets of one request.
const MOST_CONTROLS: usize = 4;
/// Reference pictures of one request.
const MOST_REFERENCES: usize = 8;
/// Longest film that is asked for by its seconds; a model may take less.
const LONGEST_FILM_SECONDS: f32 = 3600.0;
/// Least time between previews.
const LEAST_PREVIEW_INTERVAL_MS: u32 = 100;

/// The decoded start of a request.
#[derive(Debug, Default)]
pub(super) enum StartFrom {
    /// Noise, or a latent of the service.
    #[default]
    Nothing,
    Picture(InitImage),
    Clip(Clip),
}

/// The request of a client. Fields that it leaves open are zero, empty or `None`.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// Name of the call in lists of jobs, such as `GenerateImage`.
    pub(super) call: &'static str,
    pub(super) model: Option<v1::ModelRef>,
    pub(super) prompt: String,
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) steps: u32,
    pub(super) guidance: Option<f32>,
    pub(super) seed: Option<u64>,
    pub(super) max_sequence_length: u32,
    pub(super) strength: Option<f32>,
    pub(super) count: u32,
    /// A file in PNG, JPEG or WebP; empty for none.
    pub(super) init_image: bytes::Bytes,
    pub(super) init_latent: Option<String>,
    /// Id of uploaded media.
    pub(super) init_media: Option<String>,
    /// A track that was brought before, instead of its id.
    pub(super) source: Option<Clip>,
    pub(super) mask: Option<v1::PictureInput>,
    pub(super) references: Vec<v1::PictureInput>,
    pub(super) controls: Vec<v1::Control>,
    pub(super) keep_latent: bool,
    pub(super) latent_only: bool,
    pub(super) preview_interval_ms: u32,
    pub(super) omit_metadata: bool,
    pub(super) encoding: Encoding,
    pub(super) options: Option<v1::JobOptions>,
    of_medium: OfMedium,
}

/// The fields of one medium alone.
#[derive(Debug, Default)]
enum OfMedium {
    #[default]
    Image,
    Video {
        frames: u32,
        frames_per_second: f32,
        /// Instead of frames; 0: open.
        seconds: f32,
        frames_at_a_time: u32,
    },
    Audio(AskedTrack),
}

impl Asked {
    pub(super) fn image(request: v1::GenerateImageRequest) -> Asked {
        let raw = request.output == v1::OutputFormat::RawRgb as i32;
        Asked {
            call: "GenerateImage",
            model: request.model,
            prompt: request.prompt,
            width: request.width,
            height: request.height,
            steps: request.steps,
            guidance: request.guidance,
            seed: request.seed,
            max_sequence_length: request.max_sequence_length,
            strength: request.strength,
            mask: request.mask,
            references: request.references,
            controls: request.controls,
            count: request.count,
            init_image: request.init_image,
            init_latent: Some(request.init_latent_id).filter(|id| !id.is_empty()),
            init_media: Some(request.init_media_id).filter(|id| !id.is_empty()),
            source: None,
            keep_latent: request.keep_latent,
            latent_only: request.latent_only,
            preview_interval_ms: request.preview_interval_ms,
            omit_metadata: request.omit_metadata,
            encoding: if raw { Encoding::Raw } else { Encoding::Png },
            options: request.options,
            of_medium: OfMedium::Image,
        }
    }

    pub(super) fn video(request: v1::GenerateVideoRequest) -> Asked {
        let is_file = request.output == v1::FilmFormat::Mp4 as i32;
        Asked {
            call: "GenerateVideo",
            model: request.model,
            prompt: request.prompt,
            width: request.width,
            height: request.height,
            steps: request.steps,
            guidance: request.guidance,
            seed: request.seed,
            max_sequence_length: request.max_sequence_length,
            strength: request.strength,
            count: request.count,
            init_image: request.init_image,
            init_latent: Some(request.init_latent_id).filter(|id| !id.is_empty()),
            init_media: Some(request.init_media_id).filter(|id| !id.is_empty()),
            source: None,
            keep_latent: request.keep_latent,
            latent_only: request.latent_only,
            preview_interval_ms: request.preview_interval_ms,
            omit_metadata: request.omit_metadata,
            encoding: if is_file { Encoding::Mp4 } else { Encoding::Raw },
            options: request.options,
            mask: None,
            references: Vec::new(),
            controls: Vec::new(),
            of_medium: OfMedium::Video {
                frames: request.frames,
                frames_per_second: request.frames_per_second,
                seconds: request.seconds,
                frames_at_a_time: request.frames_at_a_time,
            },
        }
    }

    pub(super) fn audio(mut request: v1::GenerateAudioRequest) -> Asked {
        let of_medium = OfMedium::Audio(AskedTrack::take_of(&mut request));
        Asked {
            call: "GenerateAudio",
            model: request.model,
            prompt: request.prompt,
            steps: request.steps,
            guidance: request.guidance,
            seed: request.seed,
            max_sequence_length: request.max_sequence_length,
            strength: request.strength,
            count: request.count,
            init_latent: Some(request.init_latent_id).filter(|id| !id.is_empty()),
            init_media: Some(request.init_media_id).filter(|id| !id.is_empty()),
            keep_latent: request.keep_latent,
            latent_only: request.latent_only,
            omit_metadata: request.omit_metadata,
            encoding: match v1::AudioFormat::try_from(request.output) {
                Ok(v1::AudioFormat::RawS16le) => Encoding::Raw,
                Ok(v1::AudioFormat::Flac) => Encoding::Flac,
                Ok(v1::AudioFormat::Unspecified | v1::AudioFormat::Wav) | Err(_) => Encoding::Wav,
            },
            options: request.options,
            of_medium,
            ..Asked::default()
        }
    }

    /// Checks what does not depend on the model, and reports all wrong fields at once.
    pub(super) fn check(&self) -> Result<(), Error> {
        let mut problems = Vec::new();
        let mut problem = |field: &str, problem: String| problems.push(RequestError::new(field, problem));
        let lyrics = match &self.of_medium {
            OfMedium::Audio(track) => track.lyrics.as_str(),
            OfMedium::Image | OfMedium::Video { .. } => "",
        };
        for (field, text) in [("prompt", self.prompt.as_str()), ("lyrics", lyrics)] {
            let characters = text.chars().count();
            if characters > LONGEST_PROMPT_CHARACTERS {
                problem(
                    field,
                    format!("has {characters} characters; {LONGEST_PROMPT_CHARACTERS} are the most"),
                );
            }
        }
        for (field, value) in [("width", self.width), ("height", self.height)] {
            if !value.is_multiple_of(16) {
                let below = (value / 16 * 16).max(16);
                let above = below.saturating_add(16);
                problem(
                    field,
                    format!("{value} is no multiple of 16; {below} and {above} are"),
                );
            } else if value > LONGEST_SIDE_PIXELS {
                problem(field, format!("{value} is more than {LONGEST_SIDE_PIXELS}"));
            }
        }
        if self.count > MOST_ITEMS {
            problem("count", format!("{} is more than {MOST_ITEMS}", self.count));
        }
        if (1..LEAST_PREVIEW_INTERVAL_MS).contains(&self.preview_interval_ms) {
            problem(
                "preview_interval_ms",
                format!("is less than {LEAST_PREVIEW_INTERVAL_MS}; 0 leaves previews off"),
            );
        }
        if let Some(strength) = self.strength
            && !(strength > 0.0 && strength <= 1.0)
        {
            problem("strength", format!("{strength} is not over 0 and up to 1"));
        }
        if let OfMedium::Video { frames, seconds, .. } = self.of_medium {
            if !(0.0..=LONGEST_FILM_SECONDS).contains(&seconds) {
                problem(
                    "seconds",
                    format!("{seconds} is not from 0 to {LONGEST_FILM_SECONDS}"),
                );
            } else if seconds > 0.0 && frames > 0 {
                problem("seconds", "excludes frames: leave one out".to_owned());
            }
        }
        if self.references.len() > MOST_REFERENCES {
            let count = self.references.len();
            problem(
                "references",
                format!("are {count}; {MOST_REFERENCES} are the most"),
            );
        }
        if self.controls.len() > MOST_CONTROLS {
            let count = self.controls.len();
            problem("controls", format!("are {count}; {MOST_CONTROLS} are the most"));
        }
        for (index, control) in self.controls.iter().enumerate() {
            let image = control.image.clone().unwrap_or_default();
            if image.data.is_empty() == image.media_id.is_empty() {
                problem(
                    &format!("controls[{index}].image"),
                    "needs data or a media_id, and not both".to_owned(),
                );
            }
        }
        for (field, picture) in self
            .mask
            .iter()
            .map(|mask| ("mask", mask))
            .chain(self.references.iter().map(|reference| ("references", reference)))
        {
            if picture.data.is_empty() == picture.media_id.is_empty() {
                problem(field, "needs data or a media_id, and not both".to_owned());
            }
        }
        let starts = [
            ("init_image", !self.init_image.is_empty()),
            ("init_media_id", self.init_media.is_some()),
            ("init_latent_id", self.init_latent.is_some()),
        ];
        let mut starts = starts.iter().filter(|(_, is_given)| *is_given);
        if let (Some((first, _)), Some((second, _))) = (starts.next(), starts.next()) {
            problem(second, format!("excludes {first}: leave one out"));
        }
        if let OfMedium::Audio(track) = &self.of_medium {
            track.check(self.init_media.is_some() || self.source.is_some(), &mut problems);
        }
        if problems.is_empty() {
            Ok(())
        } else {
            Err(Error::Invalid(problems))
        }
    }

    /// Checks that a request can be sent as it asks: before anything is computed.
    pub(super) fn check_output(&self, request: &Request) -> Result<(), Error> {
        check_output("output", self.encoding, request)
    }

    /// Id of the uploaded track whose timbre is taken.
    pub(super) fn reference_media(&self) -> Option<&str> {
        match &self.of_medium {
            OfMedium::Audio(track) => track.reference_media.as_deref(),
            OfMedium::Image | OfMedium::Video { .. } => None,
        }
    }

    /// The length of a film in seconds, where it is asked for so.
    pub(super) fn film_seconds(&self) -> Option<f32> {
        match self.of_medium {
            OfMedium::Video { seconds, .. } => (seconds > 0.0).then_some(seconds),
            OfMedium::Image | OfMedium::Audio(_) => None,
        }
    }

    /// The request, with `defaults` for what is left open. Sides, frames and seconds that are left open are those of what
    /// it starts from.
    ///
    /// # Errors
    /// When the model generates another medium, or does not start from this one.
    pub(super) fn request(&self, defaults: Request, start: StartFrom) -> Result<Request, Error> {
        let named = |value: u32, default: u32| if value == 0 { default } else { value };
        let set = |value: f32, default: f32| if value == 0.0 { default } else { value };
        let (init_image, clip) = match start {
            StartFrom::Nothing => (None, None),
            StartFrom::Picture(image) => (Some(image), None),
            StartFrom::Clip(clip) => (None, Some(clip)),
        };
        let of_image = init_image.as_ref().map(|image| (image.width, image.height));
        let sides =
            |width, height| of_image.unwrap_or((named(self.width, width), named(self.height, height)));
        let mut medium = defaults.medium;
        if let Some(clip) = &clip {
            start_size(&mut medium, &clip.format);
        }
        let wrong_start = |wanted: &str| {
            Error::Invalid(vec![RequestError::new(
                "init_media_id",
                format!("{} needs {wanted}, and that is none", self.call),
            )])
        };
        match (&mut medium, &self.of_medium) {
            (Medium::Image(image), OfMedium::Image) => {
                if clip.is_some() {
                    return Err(wrong_start("a picture"));
                }
                (image.width, image.height) = sides(image.width, image.height);
                image.init_image = init_image;
            }
            (
                Medium::Video(video),
                &OfMedium::Video {
                    frames,
                    frames_per_second,
                    frames_at_a_time,
                    ..
                },
            ) => {
                video.frames_at_a_time = frames_at_a_time;
                (video.width, video.height) = sides(video.width, video.height);
                video.frames_per_second = set(frames_per_second, video.frames_per_second);
                video.frames = named(frames, video.frames);
                video.init_image = init_image;
                if clip
                    .as_ref()
                    .is_some_and(|clip| !matches!(clip.format, MediaFormat::Video { .. }))
                {
                    return Err(wrong_start("a picture or a film"));
                }
                video.init_video = clip;
            }
            (Medium::Audio(audio), OfMedium::Audio(track)) => {
                if init_image.is_some() {
                    return Err(wrong_start("a track"));
                }
                track.fill(audio, clip)?;
            }
            (made, _) => {
                let problem = format!(
                    "generates {}, and {} was called; `moored models` lists what each model generates",
                    made.name(),
                    self.call
                );
                return Err(Error::Invalid(vec![RequestError::new("model", problem)]));
            }
        }
        Ok(Request {
            prompt: self.prompt.clone(),
            steps: named(self.steps, defaults.steps),
            guidance: self.guidance.unwrap_or(defaults.guidance),
            seed: self.seed.unwrap_or_else(|| seed_of(self.options.as_ref())),
            max_sequence_length: named(self.max_sequence_length, defaults.max_sequence_length),
            strength: self.strength.unwrap_or(defaults.strength),
            preview: self.preview_interval_ms > 0,
            from_values: self.init_latent.is_some(),
            adapters: defaults.adapters,
            slots: 1,
            medium,
        })
    }
}

/// Checks that what a request makes can be sent so: an MP4 cannot hold every size and rate.
pub(super) fn check_output(field: &str, encoding: Encoding, request: &Request) -> Result<(), Error> {
    let (Encoding::Mp4, Medium::Video(video)) = (encoding, &request.medium) else {
        return Ok(());
    };
    let film = FilmFormat {
        width: video.width,
        height: video.height,
        frames: video.frames,
        frames_per_second: video.frames_per_second,
    };
    film.check()
        .map_err(|problem| invalid(field, problem.to_string()))
}

/// Gives a request the size of the film, or the length of the track, that it starts from; sides become multiples of 16.
fn start_size(medium: &mut Medium, format: &MediaFormat) {
    match (medium, *format) {
        (
            Medium::Video(video),
            MediaFormat::Video {
                width,
                height,
                frames,
                frames_per_second,
            },
        ) => {
            let side = |side: u32| (side / 16 * 16).clamp(16, LONGEST_SIDE_PIXELS);
            (video.width, video.height) = (side(width), side(height));
            (video.frames, video.frames_per_second) = (frames, frames_per_second);
        }
        (Medium::Audio(audio), track @ MediaFormat::Audio { .. }) => audio.seconds = seconds_of(&track),
        _ => {}
    }
}

/// A seed for a request that names none: random, or derived from the idempotency key, so that a repeated request is the
/// same. Of 32 bits: other tools take no more.
fn seed_of(options: Option<&v1::JobOptions>) -> u64 {
    let key = options.map_or("", |options| options.idempotency_key.as_str());
    if key.is_empty() {
        return (uuid::Uuid::new_v4().as_u128() as u32).into();
    }
    // A hash that is the same in every build, so that a request repeated to a newer service gives the same result.
    let mut seed = [0; 4];
    blake3::Hasher::new()
        .update(key.as_bytes())
        .finalize_xof()
        .fill(&mut seed);
    u32::from_le_bytes(seed).into()
}

#[cfg(test)]
mod tests {
    use pipelines::{Audio, Image, Video};

    use super::*;

    #[test]
    fn all_wrong_fields_are_reported_at_once() {
        let request = v1::GenerateImageRequest {
            prompt: "x".repeat(100_000),
            width: 17,
            height: 130,
            count: 1000,
            strength: Some(f32::NAN),
            preview_interval_ms: 5,
            ..Default::default()
        };
        let Err(Error::Invalid(problems)) = Asked::image(request).check() else {
            panic!("the request was accepted")
        };
        let fields: Vec<&str> = problems.iter().map(|p| p.field.as_str()).collect();
        let expected = [
            "prompt",
            "width",
            "height",
            "count",
            "preview_interval_ms",
            "strength",
        ];
        assert_eq!(fields, expected);
    }

    #[test]
    fn a_request_has_one_start_and_takes_its_size() {
        let request = v1::GenerateVideoRequest {
            init_media_id: "media-1".into(),
            init_latent_id: "latent-1".into(),
            ..Default::default()
        };
        let refused = Asked::video(request).check().unwrap_err().to_string();
        assert!(
            refused.contains("init_latent_id: excludes init_media_id"),
            "{refused}"
        );

        let film = |frames| Clip {
            format: MediaFormat::Video {
                width: 70,
                height: 33,
                frames,
                frames_per_second: 12.0,
            },
            data: bytes::Bytes::new(),
        };
        let defaults = || Request::of(Medium::Video(Video::default()), 8, 2.0, 16);
        let asked = Asked::video(v1::GenerateVideoRequest {
            frames: 5,
            ..Default::default()
        });
        let resolved = asked.request(defaults(), StartFrom::Clip(film(9))).unwrap();
        let Medium::Video(video) = resolved.medium else {
            panic!("it is for a film")
        };
        assert_eq!((video.width, video.height), (64, 32));
        assert_eq!(
            (video.frames, video.frames_per_second),
            (5, 12.0),
            "what is named counts"
        );
        assert_eq!(video.init_video, Some(film(9)));

        let asked = Asked::image(v1::GenerateImageRequest::default());
        let defaults = Request::of(Medium::Image(Image::of(16, 16)), 1, 0.0, 1);
        let refused = asked
            .request(defaults, StartFrom::Clip(film(9)))
            .unwrap_err()
            .to_string();
        assert!(refused.contains("GenerateImage needs a picture"), "{refused}");
    }

    #[test]
    fn the_seed_of_a_key_is_the_same_in_every_build() {
        let of_key = |key: &str| {
            let idempotency_key = key.to_owned();
            seed_of(Some(&v1::JobOptions {
                idempotency_key,
                ..Default::default()
            }))
        };
        // The first four bytes of BLAKE3, little-endian.
        assert_eq!(of_key("abc"), 0xacb3_3764);
        assert_ne!(of_key("abc"), of_key("abd"));
        assert_ne!(seed_of(None), seed_of(None), "without a key it is random");
    }

    #[test]
    fn open_fields_take_the_models_defaults_and_another_medium_is_refused() {
        let request = v1::GenerateAudioRequest {
            seconds: 3.5,
            ..Default::default()
        };
        let asked = Asked::audio(request);
        let track = Medium::Audio(Audio {
            seconds: 60.0,
            lyrics: "la".into(),
            ..Audio::default()
        });
        let resolved = asked
            .request(Request::of(track, 8, 2.0, 16), StartFrom::Nothing)
            .unwrap();
        assert_eq!(
            (resolved.steps, resolved.guidance, resolved.strength),
            (8, 2.0, 1.0)
        );
        assert!(
            matches!(&resolved.medium, Medium::Audio(audio) if audio.seconds == 3.5 && audio.lyrics.is_empty())
        );
        let image = Request::of(Medium::Image(Image::of(16, 16)), 1, 0.0, 1);
        let refused = asked.request(image, StartFrom::Nothing).unwrap_err().to_string();
        assert!(
            refused.contains("generates image") && refused.contains("GenerateAudio"),
            "{refused}"
        );
    }
}
