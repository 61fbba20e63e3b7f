//! Checks of a request that do not need its model.

use engine::Error;
use model::RequestError;

use super::{Asked, OfMedium};
use crate::errors::{all_valid, outside, too_many};
use crate::references::PictureInput;

/// Longest prompt, and longest lyrics, in characters. T5 reads at most 512 tokens, so a longer text is a mistake.
const LONGEST_PROMPT_CHARACTERS: usize = 10_000;
/// Longest side of a generated picture or film, in pixels; a model may take less.
const LONGEST_SIDE_PIXELS: u32 = 4096;
/// Items of one request.
const MOST_ITEMS: u32 = 64;
/// ControlNets of one request.
const MOST_CONTROLS: usize = 4;
/// Reference pictures of one request.
const MOST_REFERENCES: usize = 8;
/// Longest film that may be requested in seconds; a model may take less.
const LONGEST_FILM_SECONDS: f32 = 3600.0;
/// Least time between previews.
const LEAST_PREVIEW_INTERVAL_MS: u32 = 100;

impl Asked {
    /// Checks all that does not depend on the model, and reports all wrong fields at once.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let mut problems = Vec::new();
        self.check_texts(&mut problems);
        self.check_numbers(&mut problems);
        self.check_pictures(&mut problems);
        self.check_starts(&mut problems);
        if let OfMedium::Audio(track) = &self.of_medium {
            track.check(self.init_media.is_some() || self.source.is_some(), &mut problems);
        }
        all_valid(problems)
    }

    fn check_texts(&self, problems: &mut Vec<RequestError>) {
        let lyrics = match &self.of_medium {
            OfMedium::Audio(track) => track.lyrics.as_str(),
            OfMedium::Image | OfMedium::Video { .. } => "",
        };
        let texts = [("prompt", self.prompt.as_str()), ("lyrics", lyrics)];
        for (field, text) in texts.into_iter().chain(self.sampling.texts()) {
            let characters = text.chars().count();
            if characters > LONGEST_PROMPT_CHARACTERS {
                let problem = too_many(characters, "characters", LONGEST_PROMPT_CHARACTERS);
                problems.push(RequestError::new(field, problem));
            }
        }
    }

    fn check_numbers(&self, problems: &mut Vec<RequestError>) {
        let mut problem = |field: &str, problem: String| problems.push(RequestError::new(field, problem));
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
        if let Some(strength) = self.sampling.strength
            && !(strength > 0.0 && strength <= 1.0)
        {
            problem("strength", format!("{strength} is not over 0 and up to 1"));
        }
        if let OfMedium::Video { frames, seconds, .. } = self.of_medium {
            if !(0.0..=LONGEST_FILM_SECONDS).contains(&seconds) {
                problem("seconds", outside(seconds, 0, LONGEST_FILM_SECONDS));
            } else if seconds > 0.0 && frames > 0 {
                problem("seconds", "excludes frames: leave one out".to_owned());
            }
        }
    }

    fn check_pictures(&self, problems: &mut Vec<RequestError>) {
        let counts = [
            ("references", self.references.len(), MOST_REFERENCES),
            ("controls", self.controls.len(), MOST_CONTROLS),
        ];
        for (field, count, most) in counts {
            if count > most {
                problems.push(RequestError::new(field, too_many(count, "items", most)));
            }
        }
        let mut one_of_both = |field: &str, picture: &PictureInput| {
            if picture.data.is_some() != picture.media_id.is_empty() {
                problems.push(RequestError::new(field, "needs data or a media_id, and not both"));
            }
        };
        for (index, control) in self.controls.iter().enumerate() {
            one_of_both(&format!("controls[{index}].image"), &control.image);
        }
        if let Some(mask) = &self.mask {
            one_of_both("mask", mask);
        }
        if let Some(end) = self.end_image() {
            one_of_both("end_image", end);
        }
        for reference in &self.references {
            one_of_both("references", reference);
        }
    }

    fn check_starts(&self, problems: &mut Vec<RequestError>) {
        let starts = [
            ("init_image", self.init_image.is_some()),
            ("init_media_id", self.init_media.is_some()),
            ("init_latent_id", self.init_latent.is_some()),
        ];
        let mut starts = starts.iter().filter(|(_, is_given)| *is_given);
        if let (Some((first, _)), Some((second, _))) = (starts.next(), starts.next()) {
            let problem = format!("excludes {first}: leave one out");
            problems.push(RequestError::new(*second, problem));
        }
    }
}
