//! The optional fields of a request, and which of them a model reads. A request with a field that its model does not read is
//! refused here ([`Model::plan`](crate::Model::plan)) and nowhere else: if the field were ignored, the result would not be what
//! the client asked for.

use crate::request::{Audio, AudioTask, Image, Medium, Request, RequestError, Video};

/// A field that a request may leave out, and that only some models read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    NegativePrompt,
    TrueGuidance,
    /// A sampler other than the checkpoint's.
    Sampler,
    StepCache,
    Fp8Attention,
    /// More cards than one.
    Cards,
    Adapters,
    /// A picture to start from.
    InitImage,
    /// A picture that a film ends with.
    EndImage,
    /// A film or a track to start from.
    InitMedia,
    /// Values of an earlier job to start from.
    InitLatent,
    Mask,
    References,
    Controls,
    /// A track whose timbre is taken.
    ReferenceMedia,
    /// The task of a track, unless it is text to music.
    Task,
    Lyrics,
    BeatsPerMinute,
    Key,
    TimeSignature,
    Language,
    Strengths,
    DecodeFrom,
}

impl Field {
    /// The field's name in requests.
    pub const fn name(self) -> &'static str {
        match self {
            Field::NegativePrompt => "negative_prompt",
            Field::TrueGuidance => "true_guidance",
            Field::Sampler => "sampler",
            Field::StepCache => "step_cache",
            Field::Fp8Attention => "fp8_attention",
            Field::Cards => "cards",
            Field::Adapters => "adapters",
            Field::InitImage => "init_image",
            Field::EndImage => "end_image",
            Field::InitMedia => "init_media_id",
            Field::InitLatent => "init_latent_id",
            Field::Mask => "mask",
            Field::References => "references",
            Field::Controls => "controls",
            Field::ReferenceMedia => "reference_media_id",
            Field::Task => "task",
            Field::Lyrics => "lyrics",
            Field::BeatsPerMinute => "beats_per_minute",
            Field::Key => "key",
            Field::TimeSignature => "time_signature",
            Field::Language => "language",
            Field::Strengths => "strengths",
            Field::DecodeFrom => "decode_from_seconds",
        }
    }

    /// The refusal of the field by a model that does not read it.
    pub fn refusal(self) -> RequestError {
        let (verb, pronoun) = match self {
            Field::Adapters | Field::References | Field::Controls | Field::Lyrics | Field::Strengths => {
                ("are", "them")
            }
            _ => ("is", "it"),
        };
        let problem = format!(
            "{verb} not taken by this model: leave {pronoun} out, or name a model that takes {pronoun}"
        );
        RequestError::new(self.name(), problem)
    }
}

/// A set of optional fields: those that a model reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads(u32);

impl Reads {
    /// No optional field.
    pub const NOTHING: Reads = Reads(0);

    /// Reads these fields.
    pub const fn of(fields: &[Field]) -> Reads {
        Reads::NOTHING.and(fields)
    }

    /// Reads these fields in addition.
    #[must_use]
    pub const fn and(self, fields: &[Field]) -> Reads {
        let (mut set, mut index) = (self.0, 0);
        while index < fields.len() {
            set |= 1 << fields[index] as u32;
            index += 1;
        }
        Reads(set)
    }

    /// Whether a field is read.
    pub const fn has(self, field: Field) -> bool {
        self.0 & (1 << field as u32) != 0
    }

    /// Refusals of the fields that a request sets and the model does not read.
    pub fn refusals(self, request: &Request) -> Vec<RequestError> {
        let unread = asked(request).into_iter().filter(|field| !self.has(*field));
        unread.map(Field::refusal).collect()
    }
}

/// The optional fields that a request sets. All fields of a request are named here, so that a new field cannot be forgotten.
fn asked(request: &Request) -> Vec<Field> {
    let Request {
        negative_prompt,
        true_guidance,
        sampler,
        step_cache,
        fp8_attention,
        cards,
        from_values,
        adapters,
        medium,
        // Fields that every model reads, and bounds and preferences, which need not have an effect.
        prompt: _,
        steps: _,
        guidance: _,
        seed: _,
        max_sequence_length: _,
        strength: _,
        preview: _,
        slots: _,
    } = request;
    let common = [
        (Field::NegativePrompt, negative_prompt.is_some()),
        (Field::TrueGuidance, *true_guidance != 1.0),
        (Field::Sampler, sampler.is_some()),
        (Field::StepCache, *step_cache != 0.0),
        (Field::Fp8Attention, *fp8_attention),
        (Field::Cards, *cards > 1),
        (Field::Adapters, !adapters.is_empty()),
        (Field::InitLatent, *from_values),
    ];
    let of_medium = match medium {
        Medium::Image(image) => asked_of_image(image),
        Medium::Video(video) => asked_of_video(video),
        Medium::Audio(audio) => asked_of_audio(audio),
    };
    let all = common.into_iter().chain(of_medium);
    all.filter(|(_, is_asked)| *is_asked)
        .map(|(field, _)| field)
        .collect()
}

fn asked_of_image(image: &Image) -> Vec<(Field, bool)> {
    let Image {
        width: _,
        height: _,
        init_image,
        mask,
        references,
        controls,
        // Made of the references.
        seen: _,
    } = image;
    vec![
        (Field::InitImage, init_image.is_some()),
        (Field::Mask, mask.is_some()),
        (Field::References, !references.is_empty()),
        (Field::Controls, !controls.is_empty()),
    ]
}

fn asked_of_video(video: &Video) -> Vec<(Field, bool)> {
    let Video {
        width: _,
        height: _,
        frames: _,
        frames_per_second: _,
        frames_at_a_time: _,
        init_image,
        end_image,
        init_video,
    } = video;
    vec![
        (Field::InitImage, init_image.is_some()),
        (Field::EndImage, end_image.is_some()),
        (Field::InitMedia, init_video.is_some()),
    ]
}

fn asked_of_audio(audio: &Audio) -> Vec<(Field, bool)> {
    let Audio {
        seconds: _,
        lyrics,
        init_audio,
        reference,
        task,
        beats_per_minute,
        key,
        time_signature,
        language,
        strengths,
        decode_from_seconds,
    } = audio;
    vec![
        (Field::Lyrics, !lyrics.is_empty()),
        (Field::InitMedia, init_audio.is_some()),
        (Field::ReferenceMedia, reference.is_some()),
        (Field::Task, *task != AudioTask::TextToMusic),
        (Field::BeatsPerMinute, beats_per_minute.is_some()),
        (Field::Key, !key.is_empty()),
        (Field::TimeSignature, !time_signature.is_empty()),
        (Field::Language, !language.is_empty()),
        (Field::Strengths, !strengths.is_empty()),
        (Field::DecodeFrom, *decode_from_seconds != 0.0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        AdapterUse, Clip, ControlUse, InitImage, Mask, MediaFormat, Sampler, StrengthCurve, StrengthPoint,
    };

    /// A request that asks for all optional fields of a medium.
    fn asking_for_all(medium: Medium) -> Request {
        Request {
            negative_prompt: Some(String::new()),
            true_guidance: 0.0,
            sampler: Some(Sampler::Euler),
            step_cache: 0.1,
            fp8_attention: true,
            cards: 2,
            from_values: true,
            adapters: vec![AdapterUse {
                name: "style".to_owned(),
                strength: StrengthCurve::zero(),
                text_strength: 0.0,
            }],
            ..Request::of(medium, 1, 1.0, 1)
        }
    }

    fn clip() -> Clip {
        let format = MediaFormat::Image { width: 1, height: 1 };
        let data = bytes::Bytes::new();
        Clip { format, data }
    }

    fn picture() -> Image {
        let size = (16, 16);
        Image {
            init_image: Some(InitImage::of_size(size)),
            mask: Some(Mask::of_size(size)),
            references: vec![InitImage::of_size(size)],
            controls: vec![ControlUse {
                name: "edges".to_owned(),
                image: InitImage::of_size(size),
                scale: 1.0,
                start: 0.0,
                end: 1.0,
                mode: None,
            }],
            ..Image::of(16, 16)
        }
    }

    fn film() -> Video {
        Video {
            init_image: Some(InitImage::of_size((16, 16))),
            end_image: Some(InitImage::of_size((16, 16))),
            init_video: Some(clip()),
            ..Video::default()
        }
    }

    fn track() -> Audio {
        Audio {
            lyrics: "la".to_owned(),
            init_audio: Some(clip()),
            reference: Some(clip()),
            task: AudioTask::Cover,
            beats_per_minute: Some(90),
            key: "C major".to_owned(),
            time_signature: "3".to_owned(),
            language: "en".to_owned(),
            strengths: vec![StrengthPoint {
                seconds: 0.0,
                strength: 1.0,
            }],
            decode_from_seconds: 1.0,
            ..Audio::default()
        }
    }

    #[test]
    fn a_field_is_refused_unless_it_is_read() {
        let names = |problems: Vec<RequestError>| -> Vec<String> {
            problems.into_iter().map(|problem| problem.field).collect()
        };
        let mut seen = Vec::new();
        for medium in [
            Medium::Image(picture()),
            Medium::Video(film()),
            Medium::Audio(track()),
        ] {
            let plain = match &medium {
                Medium::Image(_) => Medium::Image(Image::of(16, 16)),
                Medium::Video(_) => Medium::Video(Video::default()),
                Medium::Audio(_) => Medium::Audio(Audio::default()),
            };
            assert_eq!(asked(&Request::of(plain, 1, 1.0, 1)), []);
            let request = asking_for_all(medium);
            let fields = asked(&request);
            assert_eq!(names(Reads::NOTHING.refusals(&request)).len(), fields.len());
            assert_eq!(names(Reads::of(&fields).refusals(&request)), [""; 0]);
            for field in &fields {
                let others: Vec<Field> = fields.iter().copied().filter(|other| other != field).collect();
                assert_eq!(names(Reads::of(&others).refusals(&request)), [field.name()]);
            }
            seen.extend(fields);
        }
        seen.sort_by_key(|field| *field as u32);
        seen.dedup();
        assert_eq!(
            seen.len(),
            Field::DecodeFrom as usize + 1,
            "a field that no request asks for: {seen:?}"
        );
    }
}
