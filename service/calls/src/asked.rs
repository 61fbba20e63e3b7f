//! A request to generate, of any medium: the same checks and defaults for all three calls.

mod checks;
mod track;

use engine::Error;
use engine::job::Call;
use hub::catalogue::Makes;
use media::films::FilmFormat;
use model::{Clip, InitImage, MediaFormat, Medium, Request, Sampling};

use crate::caller::AskedOptions;
use crate::chunks::Encoding;
use crate::errors::invalid;
use crate::references::{AskedControl, ModelRef, PictureInput};
use track::seconds_of;
pub use track::{AskedTask, AskedTrack};

/// The media that a generation starts from, decoded.
#[derive(Debug, Default)]
pub(crate) enum StartFrom {
    /// Noise, or a latent of the service.
    #[default]
    Nothing,
    Picture(InitImage),
    Clip(Clip),
}

/// The request of a client. Fields that the client does not set are zero, empty or `None`.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// The call of the API that sent it.
    pub call: Call,
    pub model: ModelRef,
    pub prompt: String,
    pub width: u32,
    pub height: u32,
    pub sampling: Sampling,
    pub count: u32,
    /// A file in PNG, JPEG or WebP.
    pub init_image: Option<bytes::Bytes>,
    pub init_latent: Option<String>,
    /// Id of uploaded media.
    pub init_media: Option<String>,
    /// The samples of an uploaded track, instead of its id.
    pub source: Option<Clip>,
    pub mask: Option<PictureInput>,
    pub references: Vec<PictureInput>,
    pub controls: Vec<AskedControl>,
    pub keep_latent: bool,
    pub latent_only: bool,
    pub preview_interval_ms: u32,
    pub omit_metadata: bool,
    /// `None`: the default of the medium.
    pub encoding: Option<Encoding>,
    pub options: Option<AskedOptions>,
    pub of_medium: OfMedium,
}

/// The fields of one medium alone.
#[derive(Clone, Debug, Default)]
pub enum OfMedium {
    #[default]
    Image,
    Video {
        frames: u32,
        frames_per_second: f32,
        /// Length in seconds, in place of `frames`; 0: not set.
        seconds: f32,
        frames_at_a_time: u32,
        /// The picture that it ends with.
        end_image: Option<PictureInput>,
    },
    Audio(AskedTrack),
}

impl Asked {
    /// The encoding of the results.
    pub(crate) fn encoding(&self) -> Encoding {
        self.encoding.unwrap_or(match self.of_medium {
            OfMedium::Image => Encoding::Png,
            OfMedium::Video { .. } => Encoding::Raw,
            OfMedium::Audio(_) => Encoding::Wav,
        })
    }

    /// Bytes of the pictures that the request carries itself.
    pub(crate) fn sent_bytes(&self) -> usize {
        let inputs = self.mask.iter().chain(&self.references).chain(self.end_image());
        let inputs = inputs.chain(self.controls.iter().map(|control| &control.image));
        let inputs = inputs.filter_map(|input| input.data.as_ref());
        inputs.chain(&self.init_image).map(bytes::Bytes::len).sum()
    }

    /// The medium that is requested.
    pub(crate) fn makes(&self) -> Makes {
        match self.of_medium {
            OfMedium::Image => Makes::Image,
            OfMedium::Video { .. } => Makes::Video,
            OfMedium::Audio(_) => Makes::Audio,
        }
    }

    /// Id of the uploaded track whose timbre is taken.
    pub(crate) fn reference_media(&self) -> Option<&str> {
        match &self.of_medium {
            OfMedium::Audio(track) => track.reference_media.as_deref(),
            OfMedium::Image | OfMedium::Video { .. } => None,
        }
    }

    /// The picture that a film ends with.
    pub(crate) fn end_image(&self) -> Option<&PictureInput> {
        match &self.of_medium {
            OfMedium::Video { end_image, .. } => end_image.as_ref(),
            OfMedium::Image | OfMedium::Audio(_) => None,
        }
    }

    /// The length of a film in seconds, if the request has it in seconds.
    pub(crate) fn film_seconds(&self) -> Option<f32> {
        match self.of_medium {
            OfMedium::Video { seconds, .. } => (seconds > 0.0).then_some(seconds),
            OfMedium::Image | OfMedium::Audio(_) => None,
        }
    }

    /// Overwrites the defaults of a medium with the fields that the request sets.
    fn fill(&self, medium: &mut Medium, start: StartFrom) -> Result<(), Error> {
        let (init_image, clip) = match start {
            StartFrom::Nothing => (None, None),
            StartFrom::Picture(image) => (Some(image), None),
            StartFrom::Clip(clip) => (None, Some(clip)),
        };
        let of_image = init_image.as_ref().map(|image| (image.width, image.height));
        let sides =
            |width, height| of_image.unwrap_or((named(self.width, width), named(self.height, height)));
        let wrong_start = |wanted: &str| {
            let problem = format!(
                "is not {wanted}, from which alone {} can start: name other media",
                self.makes().in_words()
            );
            Err(invalid("init_media_id", problem))
        };
        match (medium, &self.of_medium) {
            (Medium::Image(image), OfMedium::Image) => {
                if clip.is_some() {
                    return wrong_start("a picture");
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
                let is_film = |clip: &Clip| matches!(clip.format, MediaFormat::Video { .. });
                if !clip.as_ref().is_none_or(is_film) {
                    return wrong_start("a picture or a film");
                }
                video.frames_at_a_time = frames_at_a_time;
                (video.width, video.height) = sides(video.width, video.height);
                if frames_per_second != 0.0 {
                    video.frames_per_second = frames_per_second;
                }
                video.frames = named(frames, video.frames);
                video.init_image = init_image;
                video.init_video = clip;
            }
            (Medium::Audio(audio), OfMedium::Audio(track)) => {
                let is_track = |clip: &Clip| matches!(clip.format, MediaFormat::Audio { .. });
                if init_image.is_some() || !clip.as_ref().is_none_or(is_track) {
                    return wrong_start("a track");
                }
                track.fill(audio, clip)?;
            }
            (made, _) => {
                let made = Makes::of(made).in_words();
                let problem = format!("makes {made}, and {} are asked for", self.makes().in_words());
                return Err(invalid("model", problem));
            }
        }
        Ok(())
    }

    /// The request, with `defaults` for fields that are not set. Width, height, frames and seconds that are not set are those of
    /// the media that it starts from, in the nearest size that the model makes.
    ///
    /// # Errors
    /// When the model generates another medium, or does not start from this one.
    pub(crate) fn request(
        &self,
        defaults: Request,
        start: StartFrom,
        size_near: impl Fn(u32, u32) -> (u32, u32),
    ) -> Result<Request, Error> {
        let mut medium = defaults.medium.clone();
        if let StartFrom::Clip(clip) = &start {
            start_size(&mut medium, &clip.format, size_near);
        }
        self.fill(&mut medium, start)?;
        let request = Request {
            prompt: self.prompt.clone(),
            seed: seed_of(self.options.as_ref()),
            preview: self.preview_interval_ms > 0,
            from_values: self.init_latent.is_some(),
            slots: 1,
            medium,
            ..defaults
        };
        Ok(self.sampling.clone().over(request))
    }
}

/// The value, or the default where it is 0.
pub(crate) fn named(value: u32, default: u32) -> u32 {
    if value == 0 { default } else { value }
}

/// Checks, before anything is computed, that the results of a request can be sent in an encoding: an MP4 cannot hold every size and rate.
pub(crate) fn check_output(field: &str, encoding: Encoding, request: &Request) -> Result<(), Error> {
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

/// Sets a request to the size of the film, or the length of the track, that it starts from.
fn start_size(medium: &mut Medium, format: &MediaFormat, size_near: impl Fn(u32, u32) -> (u32, u32)) {
    match (medium, *format) {
        (
            Medium::Video(video),
            MediaFormat::Video {
                width,
                height,
                frames,
                frames_per_second,
                sound: _,
            },
        ) => {
            (video.width, video.height) = size_near(width, height);
            (video.frames, video.frames_per_second) = (frames, frames_per_second);
        }
        (Medium::Audio(audio), track @ MediaFormat::Audio { .. }) => audio.seconds = seconds_of(&track),
        _ => {}
    }
}

/// A seed for a request that names none: random, or derived from the idempotency key, so that a repeated request is the
/// same. It has 32 bits, as other tools take no more.
fn seed_of(options: Option<&AskedOptions>) -> u64 {
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
    use model::{Audio, Image, Video};

    use super::*;

    #[test]
    fn all_wrong_fields_are_reported_at_once() {
        let request = Asked {
            prompt: "x".repeat(100_000),
            width: 17,
            height: 130,
            count: 1000,
            sampling: Sampling {
                strength: Some(f32::NAN),
                ..Sampling::default()
            },
            preview_interval_ms: 5,
            ..Default::default()
        };
        let Err(Error::Invalid(problems)) = request.check() else {
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

    /// A film of so many frames.
    fn of_film(frames: u32) -> OfMedium {
        OfMedium::Video {
            frames,
            frames_per_second: 0.0,
            seconds: 0.0,
            frames_at_a_time: 0,
            end_image: None,
        }
    }

    /// The size near one for a model whose sides are multiples of 16.
    fn of_16(width: u32, height: u32) -> (u32, u32) {
        (width / 16 * 16, height / 16 * 16)
    }

    #[test]
    fn a_request_accepts_one_start_and_takes_its_size() {
        let request = Asked {
            init_media: Some("media-1".into()),
            init_latent: Some("latent-1".into()),
            of_medium: of_film(0),
            ..Asked::default()
        };
        let refused = request.check().unwrap_err().to_string();
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
                sound: None,
            },
            data: bytes::Bytes::new(),
        };
        let defaults = || Request::of(Medium::Video(Video::default()), 8, 2.0, 16);
        let asked = Asked {
            of_medium: of_film(5),
            ..Asked::default()
        };
        let resolved = asked
            .request(defaults(), StartFrom::Clip(film(9)), of_16)
            .unwrap();
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

        let asked = Asked::default();
        let defaults = Request::of(Medium::Image(Image::of(16, 16)), 1, 0.0, 1);
        let refused = asked
            .request(defaults, StartFrom::Clip(film(9)), of_16)
            .unwrap_err()
            .to_string();
        assert!(refused.contains("is not a picture"), "{refused}");
    }

    #[test]
    fn the_seed_of_a_key_is_the_same_in_every_build() {
        let of_key = |key: &str| {
            let idempotency_key = key.to_owned();
            seed_of(Some(&AskedOptions {
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
        let asked = Asked {
            of_medium: OfMedium::Audio(AskedTrack {
                seconds: 3.5,
                ..AskedTrack::default()
            }),
            ..Asked::default()
        };
        let track = Medium::Audio(Audio {
            seconds: 60.0,
            lyrics: "la".into(),
            ..Audio::default()
        });
        let resolved = asked
            .request(Request::of(track, 8, 2.0, 16), StartFrom::Nothing, of_16)
            .unwrap();
        assert_eq!(
            (resolved.steps, resolved.guidance, resolved.strength),
            (8, 2.0, 1.0)
        );
        assert!(
            matches!(&resolved.medium, Medium::Audio(audio) if audio.seconds == 3.5 && audio.lyrics.is_empty())
        );
        let image = Request::of(Medium::Image(Image::of(16, 16)), 1, 0.0, 1);
        let refused = asked
            .request(image, StartFrom::Nothing, of_16)
            .unwrap_err()
            .to_string();
        assert!(refused.contains("makes pictures, and music"), "{refused}");
    }
}
