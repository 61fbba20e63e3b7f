//! Bounds of requests for pictures and films, shared by families whose transformer has a token per 16 by 16 pixels.

use crate::sampling::sampling_problems;
use crate::steps::first_step;
use crate::{Audio, ControlUse, Field, Image, InitImage, Medium, Request, RequestError};

/// Pixels per token along each axis.
pub const PIXELS_PER_TOKEN: u32 = 16;
/// Maximum width and height of a picture in pixels.
pub const MAX_SIDE: u32 = 4096;
/// Most requests whose steps are computed in one pass.
pub const MAX_SLOTS: u32 = 16;

/// The smallest valid picture, in one step.
pub fn smallest(defaults: Request) -> Request {
    Request {
        prompt: "the smallest picture".to_owned(),
        steps: 1,
        medium: Medium::Image(Image::of(PIXELS_PER_TOKEN, PIXELS_PER_TOKEN)),
        ..defaults
    }
}

/// Maximum absolute scale of a ControlNet: far above the scales in use.
const MAX_CONTROL_SCALE: f32 = 100.0;

/// The refusal of more reference pictures than a model takes.
pub fn too_many_references(count: usize, most: usize) -> Option<RequestError> {
    (count > most).then(|| match most {
        0 => Field::References.refusal(),
        most => RequestError::new(
            Field::References.name(),
            format!("are {count}; this model takes {most}"),
        ),
    })
}

/// Sides within bounds that are next to these, rounded down.
pub fn size_near(width: u32, height: u32) -> (u32, u32) {
    let side = |side: u32| (side / PIXELS_PER_TOKEN * PIXELS_PER_TOKEN).clamp(PIXELS_PER_TOKEN, MAX_SIDE);
    (side(width), side(height))
}

/// Width and height that are out of bounds.
pub fn side_problems(width: u32, height: u32) -> Vec<RequestError> {
    let is_wrong =
        |side: u32| !(PIXELS_PER_TOKEN..=MAX_SIDE).contains(&side) || !side.is_multiple_of(PIXELS_PER_TOKEN);
    let wrong = [("width", width), ("height", height)]
        .into_iter()
        .filter(|(_, side)| is_wrong(*side));
    wrong
        .map(|(field, side)| {
            let bounds = format!("a multiple of {PIXELS_PER_TOKEN} from {PIXELS_PER_TOKEN} to {MAX_SIDE}");
            RequestError::new(field, format!("is {side}; {bounds} is expected"))
        })
        .collect()
}

/// A starting picture that has not these sides, or not all of its bytes.
pub fn start_problem(image: &InitImage, expected: (u32, u32)) -> Option<RequestError> {
    picture_problem("init_image", image, expected)
}

/// A picture of this field that has not these sides, or not all of its bytes.
pub fn picture_problem(field: &str, image: &InitImage, expected: (u32, u32)) -> Option<RequestError> {
    let found = (image.width, image.height);
    let problem = if found != expected {
        format!("is {found:?} pixels; {expected:?} is expected")
    } else if !image.is_whole() {
        format!("has {} bytes for {found:?} pixels of RGB", image.rgb.len())
    } else {
        return None;
    };
    Some(RequestError::new(field, problem))
}

/// Fields that requests for all media have, and that are out of bounds.
pub fn common_problems(request: &Request) -> Vec<RequestError> {
    let mut problems = sampling_problems(request);
    problems.extend(slots_problem(request));
    problems
}

/// A number of slots that is out of bounds.
pub fn slots_problem(request: &Request) -> Option<RequestError> {
    let found = request.slots;
    let is_wrong = !(1..=MAX_SLOTS).contains(&found);
    is_wrong.then(|| RequestError::new("slots", format!("is {found}; 1 to {MAX_SLOTS} is expected")))
}

/// A place where decoding cannot begin.
pub fn decode_from_problem(audio: &Audio) -> Option<RequestError> {
    let found = audio.decode_from_seconds;
    let is_wrong = !(found.is_finite() && found >= 0.0);
    is_wrong.then(|| {
        let problem = format!("is {found}; seconds of the track, from 0 on, are expected");
        RequestError::new("decode_from_seconds", problem)
    })
}

/// The fields of a request's ControlNet, by its index, that are out of bounds for a picture of this size.
fn control_problems(index: usize, control: &ControlUse, expected: (u32, u32)) -> Vec<RequestError> {
    let mut problems = Vec::new();
    let mut refuse = |field: &str, problem: String| {
        problems.push(RequestError::new(format!("controls[{index}].{field}"), problem));
    };
    let found = (control.image.width, control.image.height);
    if found != expected || !control.image.is_whole() {
        refuse("image", format!("is {found:?} pixels; {expected:?} is expected"));
    }
    let (start, end) = (control.start, control.end);
    if !(0.0..=1.0).contains(&start) {
        refuse(
            "start",
            format!("is {start}; a part of the steps, from 0 to 1, is expected"),
        );
    } else if !(start..=1.0).contains(&end) {
        let problem = format!("is {end}; a part of the steps, from the start ({start}) to 1, is expected");
        refuse("end", problem);
    }
    if !(-MAX_CONTROL_SCALE..=MAX_CONTROL_SCALE).contains(&control.scale) {
        let (scale, most) = (control.scale, MAX_CONTROL_SCALE);
        refuse("scale", format!("is {scale}; -{most} to {most} is expected"));
    }
    problems
}

/// All fields of a request for a picture that are out of bounds.
pub fn problems(request: &Request) -> Vec<RequestError> {
    let Medium::Image(picture) = &request.medium else {
        return vec![RequestError::other_medium(&request.medium, "image")];
    };
    let mut problems = side_problems(picture.width, picture.height);
    problems.extend(common_problems(request));
    let start = picture.init_image.as_ref();
    problems.extend(start.and_then(|image| start_problem(image, (picture.width, picture.height))));
    let mut refuse = |field: &str, problem: String| problems.push(RequestError::new(field, problem));
    if let Some(mask) = &picture.mask {
        let (found, expected) = ((mask.width, mask.height), (picture.width, picture.height));
        if picture.init_image.is_none() && !request.from_values {
            refuse(
                "mask",
                "is given without a picture to change (init_image)".to_owned(),
            );
        } else if found != expected || !mask.is_whole() {
            let bytes = mask.grey.len();
            refuse(
                "mask",
                format!("is {found:?} pixels in {bytes} bytes; {expected:?} is expected, a byte for each"),
            );
        }
    }
    let controls = picture.controls.iter().enumerate();
    let of_controls = controls
        .flat_map(|(index, control)| control_problems(index, control, (picture.width, picture.height)));
    of_controls.for_each(|RequestError { field, problem }| refuse(&field, problem));
    let is_seen = |image: &InitImage| {
        let sides = [image.width, image.height];
        image.is_whole() && sides.into_iter().all(|side| (1..=MAX_SIDE).contains(&side))
    };
    if !picture.seen.iter().all(is_seen) || ![0, picture.references.len()].contains(&picture.seen.len()) {
        let problem = "are not all there in the size in which the text encoder sees them".to_owned();
        refuse("references", problem);
    }
    for image in &picture.references {
        let (width, height) = (image.width, image.height);
        let fits = [width, height].into_iter().all(|side| {
            (PIXELS_PER_TOKEN..=MAX_SIDE).contains(&side) && side.is_multiple_of(PIXELS_PER_TOKEN)
        });
        if !fits || !image.is_whole() {
            refuse(
                "references",
                format!("one is {width}x{height} pixels; multiples of {PIXELS_PER_TOKEN} are expected"),
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
