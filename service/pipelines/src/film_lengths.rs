//! Lengths of films whose autoencoder makes four frames of each latent but the first: a multiple of four plus one.

use model::{Medium, Request, nearest_frames};

/// Frames of each latent but the first.
const STEP: u32 = 4;

/// The problem of a number of frames, with the next lengths below and above it.
pub(crate) fn problem(frames: u32, most: u32) -> Option<String> {
    if frames > most {
        return Some(format!("is {frames}; at most {most} are expected"));
    }
    if frames % STEP == 1 {
        return None;
    }
    let before = frames.saturating_sub(1);
    let (below, above) = (before / STEP * STEP + 1, before.div_ceil(STEP) * STEP + 1);
    let examples = examples(below as usize, above.max(STEP + 1) as usize);
    Some(format!(
        "is {frames}; a multiple of {STEP} plus 1 is expected, such as {examples}"
    ))
}

/// The next lengths below and above a refused length, or the only one.
pub(crate) fn examples(below: usize, above: usize) -> String {
    match below == above {
        true => below.to_string(),
        false => format!("{below} or {above}"),
    }
}

/// The number of frames nearest to this length, of those that are one more than a multiple of `step`; halves are rounded up.
pub(crate) fn nearest(seconds: f32, frames_per_second: f32, (step, least): (u32, u32)) -> u32 {
    let frames = nearest_frames(seconds, frames_per_second);
    ((frames - 1 + step / 2) / step).max(least) * step + 1
}

/// The nearest length of a film of one piece.
pub(crate) fn nearest_of_latents(seconds: f32, frames_per_second: f32) -> u32 {
    nearest(seconds, frames_per_second, (STEP, 0))
}

/// The same film with three, two and one quarters of its latents.
pub(crate) fn shorter(request: &Request) -> Vec<(String, Request)> {
    let Ok(video) = request.video() else {
        return Vec::new();
    };
    let lengths = [3, 2, 1].map(|quarters| video.frames.saturating_sub(1) / STEP * quarters / 4 * STEP + 1);
    let shorter = lengths.into_iter().filter(|frames| *frames < video.frames);
    shorter
        .filter_map(|frames| {
            let mut shorter = request.clone();
            let Medium::Video(video) = &mut shorter.medium else {
                return None;
            };
            video.frames = frames;
            Some((format!("{frames} frames"), shorter))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_lengths_are_offered() {
        for (frames, offered) in [(80, "77 or 81"), (2, "1 or 5"), (0, "1 or 5"), (83, "81 or 85")] {
            let problem = problem(frames, 1000).unwrap();
            assert!(problem.contains(offered), "{problem}");
        }
        for frames in [1, 5, 81, 121] {
            assert_eq!(problem(frames, 1000), None);
        }
        assert!(problem(1001, 1000).is_some_and(|problem| problem.contains("at most 1000")));
    }
}
