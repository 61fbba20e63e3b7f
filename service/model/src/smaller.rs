//! Smaller variants of a request, for where it does not fit.

use crate::request::{Medium, PictureSlot, Request};

/// Frames in `seconds` seconds, rounded; at least one.
pub fn nearest_frames(seconds: f32, frames_per_second: f32) -> u32 {
    let frames = (f64::from(seconds) * f64::from(frames_per_second)).round();
    (frames as u32).max(1)
}

/// The request with its sides in three, two and one quarters, rounded down to a multiple of `grain` pixels, and without the
/// data of its pictures: the fallbacks of most picture and video families.
pub fn smaller_sides(request: &Request, grain: u32) -> Vec<(String, Request)> {
    let smaller = [3, 2, 1].map(|quarters| {
        let side = |side: u32| side * quarters / 4 / grain * grain;
        let mut smaller = request.clone();
        let (width, height) = match &mut smaller.medium {
            Medium::Image(image) => (&mut image.width, &mut image.height),
            Medium::Video(video) => (&mut video.width, &mut video.height),
            Medium::Audio(_) => return None,
        };
        (*width, *height) = (side(*width), side(*height));
        let size = (*width, *height);
        if size.0 == 0 || size.1 == 0 {
            return None;
        }
        for picture in smaller.medium.pictures_mut() {
            picture.data.clear();
            match picture.slot {
                PictureSlot::Start | PictureSlot::End | PictureSlot::Mask | PictureSlot::Control(_) => {
                    (*picture.width, *picture.height) = size;
                }
                PictureSlot::Reference(_) | PictureSlot::Seen(_) => {} // keeps its own size
            }
        }
        Some((format!("{}x{}", size.0, size.1), smaller))
    });
    smaller.into_iter().flatten().collect()
}

/// The request with three, two and one quarters of its length, rounded down to whole frames or tenths of a second; none for a
/// picture.
pub fn smaller_lengths(request: &Request) -> Vec<(String, Request)> {
    let shorter = [3, 2, 1].map(|quarters| {
        let mut shorter = request.clone();
        let label = match &mut shorter.medium {
            Medium::Image(_) => return None,
            Medium::Video(video) => {
                video.frames = video.frames * quarters / 4;
                (video.frames > 0).then(|| format!("{} frames", video.frames))
            }
            Medium::Audio(audio) => {
                audio.seconds = (audio.seconds * 10.0 * quarters as f32 / 4.0).floor() / 10.0;
                (audio.seconds > 0.0).then(|| format!("{} s", audio.seconds))
            }
        };
        Some((label?, shorter))
    });
    shorter.into_iter().flatten().collect()
}
