//! FramePack's sections (Zhang and Agrawala 2025, "Packing Input Frame Context in Next-Frame Prediction Models"; diffusers'
//! `HunyuanVideoFramepackPipeline`): which latent frames a section samples, which it sees, at which positions, and where
//! its decoded frames belong in the film.

use std::ops::Range;

/// Latent frames, of those sampled before, that a section sees: one in full resolution, two in half, sixteen in a quarter.
const HISTORY: [usize; 3] = [1, 2, 16];

/// All history frames.
pub(super) const SEEN: usize = HISTORY[0] + HISTORY[1] + HISTORY[2];

/// Frames per latent frame, except for the first.
const FRAMES_PER_LATENT: usize = 4;

/// Order in which sections are sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// From the end of the film to its beginning, where the start picture is (`inverted_anti_drifting`, FramePack's I2V).
    Backward,
    /// From the start picture on (`vanilla`, FramePack-F1).
    Forward,
}

/// The sections of a film.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sections {
    pub(super) order: Order,
    /// Latent frames of a section.
    pub(super) window: usize,
    /// Number of sections.
    pub(super) count: usize,
    /// Whether there is a picture that the film ends with, which `Backward` alone sees.
    pub(super) has_end: bool,
}

/// Latent frames, by their origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LatentFrame {
    /// Nothing was sampled there: zeros.
    Zero,
    /// The start picture.
    Start,
    /// The picture that the film ends with.
    End,
    /// Frame `frame` of section `section`, in order of sampling.
    Of { section: usize, frame: usize },
}

/// The context of a section: the latent frames that it sees, and the positions of their tokens on the axis of time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Context {
    /// Positions of the sampled frames.
    pub(super) sampled: Range<u32>,
    /// In full resolution: the start picture and one frame.
    pub(super) full: [(LatentFrame, u32); 2],
    /// Two frames in half the resolution, and their first position.
    pub(super) half: (Vec<LatentFrame>, u32),
    /// Sixteen frames in a quarter of the resolution, and their first position.
    pub(super) quarter: (Vec<LatentFrame>, u32),
}

/// The use of the frames of a decoded section, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FilmPart {
    /// Kept for the next section, which blends its frames with them.
    Carried,
    /// Final, from this frame of the film on.
    Final { first: usize },
    /// Blended with the last frames of the section before, from this frame of the film on: the section's own frames fade out.
    FadingOut { first: usize },
    /// Blended like [`FilmPart::FadingOut`], with the section's own frames fading in.
    FadingIn { first: usize },
}

impl Sections {
    /// The sections of a film of `frames`; `None` if there is no such number.
    pub(super) fn of_film(order: Order, window: usize, frames: usize) -> Option<Sections> {
        let step = FRAMES_PER_LATENT * window;
        let count = frames.checked_sub(1)? / step;
        (count > 0 && count * step + 1 == frames).then_some(Sections {
            order,
            window,
            count,
            has_end: false,
        })
    }

    /// The sections of a film that has at least `frames` frames.
    pub(super) fn at_least(order: Order, window: usize, frames: usize) -> Sections {
        Sections {
            order,
            window,
            count: frames
                .saturating_sub(1)
                .div_ceil(FRAMES_PER_LATENT * window)
                .max(1),
            has_end: false,
        }
    }

    /// Frames of the film.
    pub(super) fn frames(&self) -> usize {
        FRAMES_PER_LATENT * self.window * self.count + 1
    }

    /// Frames that two sections have in common.
    pub(super) fn overlap(&self) -> usize {
        FRAMES_PER_LATENT * (self.window - 1) + 1
    }

    fn is_last(&self, section: usize) -> bool {
        section + 1 == self.count
    }

    /// Whether a section sees the picture that the film ends with: the one that is sampled first, in place of the frame after it.
    pub(super) fn sees_end(&self, section: usize) -> bool {
        self.has_end && self.order == Order::Backward && section == 0
    }

    /// Whether the start picture's latent is kept with a section's latent, next to it in the film.
    pub(super) fn holds_start(&self, section: usize) -> bool {
        match self.order {
            Order::Backward => self.is_last(section),
            Order::Forward => section == 0,
        }
    }

    /// The sampled latent frames after a section, the newest first (`Backward`) or last (`Forward`), with the start picture
    /// where it is in the film.
    fn film_after(&self, sections: usize) -> Vec<LatentFrame> {
        let of = |section| (0..self.window).map(move |frame| LatentFrame::Of { section, frame });
        match self.order {
            Order::Backward => {
                let start = (sections == self.count).then_some(LatentFrame::Start);
                start
                    .into_iter()
                    .chain((0..sections).rev().flat_map(of))
                    .collect()
            }
            Order::Forward => std::iter::once(LatentFrame::Start)
                .chain((0..sections).flat_map(of))
                .collect(),
        }
    }

    /// The context of section `section`, from 0.
    pub(super) fn context(&self, section: usize) -> Context {
        let film = self.film_after(section);
        let window = self.window as u32;
        let [full, half, quarter] = HISTORY.map(|count| count as u32);
        let zeros = std::iter::repeat(LatentFrame::Zero);
        match self.order {
            Order::Backward => {
                // The section's place: start picture, the frames between, the section, then the frames sampled before.
                let sampled = 1 + self.padding(section) as u32 * window;
                let seen: Vec<LatentFrame> = film.into_iter().chain(zeros).take(SEEN).collect();
                let after = sampled + window;
                let next = match self.sees_end(section) {
                    true => LatentFrame::End,
                    false => seen[0],
                };
                Context {
                    sampled: sampled..after,
                    full: [(LatentFrame::Start, 0), (next, after)],
                    half: (seen[1..3].to_vec(), after + full),
                    quarter: (seen[3..].to_vec(), after + full + half),
                }
            }
            Order::Forward => {
                let seen: Vec<LatentFrame> = film.into_iter().rev().chain(zeros).take(SEEN).collect();
                let seen: Vec<LatentFrame> = seen.into_iter().rev().collect();
                let sampled = 1 + quarter + half + full;
                Context {
                    sampled: sampled..sampled + window,
                    full: [(LatentFrame::Start, 0), (seen[SEEN - 1], 1 + quarter + half)],
                    half: (seen[SEEN - 3..SEEN - 1].to_vec(), 1 + quarter),
                    quarter: (seen[..SEEN - 3].to_vec(), 1),
                }
            }
        }
    }

    /// Windows between the start picture and a section, as the model was trained. For long films this is not the true number.
    fn padding(&self, section: usize) -> usize {
        let left = self.count - 1 - section;
        match (self.count, left) {
            (0..=4, left) => left,
            (_, left) if section == 0 => left.min(3),
            (_, left) => left.min(2),
        }
    }

    /// The latent frames that are decoded after a section, in order of the film.
    pub(super) fn decoded(&self, section: usize) -> Vec<LatentFrame> {
        let film = self.film_after(section + 1);
        let count = match self.order {
            _ if section == 0 => film.len(),
            Order::Backward => 2 * self.window + usize::from(self.is_last(section)),
            Order::Forward => 2 * self.window,
        };
        match self.order {
            Order::Backward => film[..count].to_vec(),
            Order::Forward => film[film.len() - count..].to_vec(),
        }
    }

    /// The ranges of a decoded section's frames, and the use of each.
    pub(super) fn parts(&self, section: usize) -> Vec<(Range<usize>, FilmPart)> {
        let frames = FRAMES_PER_LATENT * (self.decoded(section).len() - 1) + 1;
        let overlap = self.overlap();
        let step = FRAMES_PER_LATENT * self.window;
        let carried = if self.is_last(section) { 0 } else { overlap };
        let blended = if section == 0 { 0 } else { overlap };
        let parts = match self.order {
            Order::Backward => {
                // The position of the section's first frame in the film: after the frames of the later sections.
                let first = match self.count - 1 - section {
                    0 => 0,
                    after => step * after + FRAMES_PER_LATENT,
                };
                vec![
                    (0..carried, FilmPart::Carried),
                    (
                        carried..frames - blended,
                        FilmPart::Final {
                            first: first + carried,
                        },
                    ),
                    (
                        frames - blended..frames,
                        FilmPart::FadingOut {
                            first: first + frames - blended,
                        },
                    ),
                ]
            }
            Order::Forward => {
                let end = step * (section + 1) + 1;
                let first = end - frames;
                vec![
                    (0..blended, FilmPart::FadingIn { first }),
                    (
                        blended..frames - carried,
                        FilmPart::Final {
                            first: first + blended,
                        },
                    ),
                    (frames - carried..frames, FilmPart::Carried),
                ]
            }
        };
        parts.into_iter().filter(|(range, _)| !range.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDERS: [Order; 2] = [Order::Backward, Order::Forward];

    fn sections(order: Order, count: usize) -> Sections {
        Sections {
            order,
            window: 9,
            count,
            has_end: false,
        }
    }

    #[test]
    fn a_film_of_s_sections_has_36_s_plus_1_frames() {
        for order in ORDERS {
            for count in 1..=6 {
                let film = sections(order, count);
                assert_eq!(film.frames(), 36 * count + 1);
                assert_eq!(Sections::of_film(order, 9, film.frames()), Some(film));
                assert_eq!(Sections::of_film(order, 9, film.frames() + 1), None);
                assert_eq!(Sections::at_least(order, 9, film.frames()), film);
                assert_eq!(Sections::at_least(order, 9, film.frames() + 1).count, count + 1);
            }
            assert_eq!(Sections::of_film(order, 9, 1), None);
            assert_eq!(Sections::of_film(order, 9, 0), None);
        }
    }

    #[test]
    fn every_frame_of_a_film_is_final_once() {
        for order in ORDERS {
            for (window, count) in (1..=9).flat_map(|window| (1..=7).map(move |count| (window, count))) {
                let film = Sections {
                    window,
                    ..sections(order, count)
                };
                let mut times = vec![0; film.frames()];
                let mut carried: Option<Range<usize>> = None;
                for section in 0..count {
                    let mut left = None;
                    let mut covered = 0;
                    for (range, part) in film.parts(section) {
                        assert_eq!(range.start, covered);
                        covered = range.end;
                        match part {
                            FilmPart::Carried => left = Some(range.clone()),
                            FilmPart::Final { first } => {
                                times[first..first + range.len()].iter_mut().for_each(|n| *n += 1)
                            }
                            FilmPart::FadingOut { first } | FilmPart::FadingIn { first } => {
                                assert_eq!(carried.clone().map(|range| range.len()), Some(range.len()));
                                times[first..first + range.len()].iter_mut().for_each(|n| *n += 1);
                            }
                        }
                    }
                    assert_eq!(covered, 4 * (film.decoded(section).len() - 1) + 1);
                    carried = left;
                }
                assert!(times.iter().all(|&n| n == 1), "{film:?}: {times:?}");
            }
        }
    }

    /// `latent_paddings` of the reference.
    #[test]
    fn long_films_are_padded_as_the_model_was_trained() {
        let paddings = |count: usize| -> Vec<usize> {
            let film = sections(Order::Backward, count);
            (0..count).map(|section| film.padding(section)).collect()
        };
        assert_eq!(paddings(1), [0]);
        assert_eq!(paddings(4), [3, 2, 1, 0]);
        assert_eq!(paddings(5), [3, 2, 2, 1, 0]);
        assert_eq!(paddings(7), [3, 2, 2, 2, 2, 1, 0]);
    }

    #[test]
    fn a_section_sees_the_start_and_the_nearest_frames() {
        let of = |section, frame| LatentFrame::Of { section, frame };
        let backward = sections(Order::Backward, 3).context(2);
        assert_eq!(backward.sampled, 1..10);
        assert_eq!(backward.full, [(LatentFrame::Start, 0), (of(1, 0), 10)]);
        assert_eq!(backward.half, (vec![of(1, 1), of(1, 2)], 11));
        assert_eq!(backward.quarter.1, 13);
        assert_eq!(backward.quarter.0[..2], [of(1, 3), of(1, 4)]);
        assert_eq!(backward.quarter.0[15], LatentFrame::Zero);
        assert_eq!(backward.quarter.0[14], of(0, 8));

        let first = sections(Order::Backward, 3).context(0);
        assert_eq!(first.sampled, 19..28);
        assert_eq!(first.full[1], (LatentFrame::Zero, 28));

        let ended = Sections {
            has_end: true,
            ..sections(Order::Backward, 3)
        };
        assert_eq!(ended.context(0).full[1], (LatentFrame::End, 28));
        assert_eq!(ended.context(0).half, first.half, "the others are as without");
        assert_eq!(ended.context(2), backward, "later sections see what was sampled");

        let forward = sections(Order::Forward, 3).context(1);
        assert_eq!(forward.sampled, 20..29);
        assert_eq!(forward.full, [(LatentFrame::Start, 0), (of(0, 8), 19)]);
        assert_eq!(forward.half, (vec![of(0, 6), of(0, 7)], 17));
        assert_eq!(forward.quarter.1, 1);
        assert_eq!(forward.quarter.0[15], of(0, 5));
        assert_eq!(forward.quarter.0[9], LatentFrame::Start);
    }
}
