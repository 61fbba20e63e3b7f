//! What a request for a picture may ask for, of every family whose transformer sees 16 by 16 pixels as a token.

use crate::flow_match::first_step;
use crate::{Image, Medium, Request, RequestError};

/// Pixels that a token of the transformer covers in each direction.
pub const PIXELS_PER_TOKEN: u32 = 16;
/// The longest side of a picture.
pub const LONGEST_SIDE: u32 = 4096;
/// The most steps.
pub const MOST_STEPS: u32 = 200;
/// The most tokens of a prompt, as the references have it.
pub const MOST_TOKENS: u32 = 512;
/// The longest prompt in bytes; far more than its tokens can hold.
pub const LONGEST_PROMPT: usize = 32 * 1024;

/// The smallest picture, in one step.
pub(crate) fn smallest(defaults: Request) -> Request {
    Request {
        prompt: "the smallest picture".to_owned(),
        steps: 1,
        medium: Medium::Image(Image::of(PIXELS_PER_TOKEN, PIXELS_PER_TOKEN)),
        ..defaults
    }
}

/// Every field of a request that is out of its bounds.
pub(crate) fn problems(request: &Request) -> Vec<RequestError> {
    let Medium::Image(picture) = &request.medium else {
        return vec![RequestError::other_medium(&request.medium, "image")];
    };
    let mut problems = Vec::new();
    let mut refuse = |field: &str, problem: String| {
        problems.push(RequestError {
            field: field.to_owned(),
            problem,
        });
    };
    for (field, side) in [("width", picture.width), ("height", picture.height)] {
        if !(PIXELS_PER_TOKEN..=LONGEST_SIDE).contains(&side) || !side.is_multiple_of(PIXELS_PER_TOKEN) {
            let bounds =
                format!("a multiple of {PIXELS_PER_TOKEN} from {PIXELS_PER_TOKEN} to {LONGEST_SIDE}");
            refuse(field, format!("is {side}; {bounds} is expected"));
        }
    }
    if !(1..=MOST_STEPS).contains(&request.steps) {
        refuse(
            "steps",
            format!("is {}; 1 to {MOST_STEPS} is expected", request.steps),
        );
    }
    if !(0.0..=1000.0).contains(&request.guidance) {
        refuse(
            "guidance",
            format!("is {}; 0 to 1000 is expected", request.guidance),
        );
    }
    if !(1..=MOST_TOKENS).contains(&request.max_sequence_length) {
        let found = request.max_sequence_length;
        refuse(
            "max_sequence_length",
            format!("is {found}; 1 to {MOST_TOKENS} is expected"),
        );
    }
    if request.prompt.len() > LONGEST_PROMPT {
        let found = request.prompt.len();
        refuse(
            "prompt",
            format!("has {found} bytes; at most {LONGEST_PROMPT} are expected"),
        );
    }
    if let Some(image) = &picture.init_image {
        let (found, expected) = ((image.width, image.height), (picture.width, picture.height));
        if found != expected {
            refuse(
                "init_image",
                format!("is {found:?} pixels; {expected:?} is expected"),
            );
        } else if image.rgb.len() as u64 != 3 * u64::from(found.0) * u64::from(found.1) {
            refuse(
                "init_image",
                format!("has {} bytes for {found:?} pixels of RGB", image.rgb.len()),
            );
        }
    }
    if picture.init_image.is_some() || request.from_values {
        if !(request.strength > 0.0 && request.strength <= 1.0) {
            refuse(
                "strength",
                format!("is {}; over 0 and up to 1 is expected", request.strength),
            );
        } else if request.steps > 0 && first_step(request.steps, request.strength) >= request.steps {
            let problem = format!(
                "is {}; of {} steps that leaves none",
                request.strength, request.steps
            );
            refuse("strength", problem);
        }
    }
    problems
}
