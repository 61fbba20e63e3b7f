//! The texts of a request: the prompt, and the negative prompts of the film and of its sound.

use super::captions::{in_spelling, parted};
use super::variant::Variant;
use crate::Request;
use crate::text::umt5::cleaned;

/// What the authors avoid in a film, and in its sound.
const OF_FILM: &str = "jitter, bad hands, blur, distortion";
const OF_SOUND: &str = "robotic, muffled, echo, distorted";

/// The default negative prompt: what is avoided in the sound follows as a caption, as in a prompt.
pub(super) fn negative_prompt() -> String {
    format!("{OF_FILM} Audio: {OF_SOUND}")
}

/// Texts as the text encoder reads them.
pub(super) struct Texts {
    pub(super) prompt: String,
    /// Negative prompts of the film and of the sound; `None` where they have no effect.
    pub(super) negative: Option<[String; 2]>,
}

impl Texts {
    /// The texts of a request to a variant. A negative prompt without a caption says nothing about the sound: what its authors
    /// avoid is avoided then.
    pub(super) fn of(request: &Request, variant: Variant) -> Texts {
        let negative = request.negative().map(|text| {
            let (film, sound) = parted(text);
            [film.as_str(), sound.as_deref().unwrap_or(OF_SOUND)].map(cleaned)
        });
        Texts {
            prompt: cleaned(&in_spelling(&request.prompt, variant.sound_caption())),
            negative,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Medium, Video};

    #[test]
    fn a_negative_prompt_is_of_the_film_and_of_its_sound() {
        let of = |negative: Option<&str>, scale: f32| {
            let request = Request {
                prompt: "A cat. Audio: rain".to_owned(),
                negative_prompt: negative.map(str::to_owned),
                true_guidance: scale,
                ..Request::of(Medium::Video(Video::default()), 1, 0.0, 512)
            };
            Texts::of(&request, Variant::Of720For5s)
        };
        assert_eq!(of(None, 4.0).negative, None);
        assert_eq!(of(Some("blur"), 1.0).negative, None, "without an effect");
        let texts = of(Some(&negative_prompt()), 4.0);
        assert_eq!(texts.prompt, "A cat. <AUDCAP>rain<ENDAUDCAP>");
        assert_eq!(texts.negative, Some([OF_FILM, OF_SOUND].map(str::to_owned)));
        for (text, film, sound) in [
            ("blur", "blur", OF_SOUND),
            ("", "", OF_SOUND),
            ("blur <AUDCAP>echo<ENDAUDCAP>", "blur", "echo"),
            ("Audio: echo,\n hiss", "", "echo, hiss"),
        ] {
            let expected = Some([film, sound].map(str::to_owned));
            assert_eq!(of(Some(text), 4.0).negative, expected, "{text}");
        }
    }
}
