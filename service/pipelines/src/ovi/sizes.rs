//! Sizes of frames: multiples of 32 pixels whose area is close to that of the variant.

/// Pixels of a token of the film: 16 of a cell of the latent, in patches of two.
pub(super) const PIXELS: u32 = 32;

/// The size near this one with an area of about `area`, in the proportions of this one: the authors'
/// `snap_hw_to_multiple_of_32`.
pub fn size_near((width, height): (u32, u32), area: u32) -> (u32, u32) {
    let scale = (f64::from(area) / (f64::from(width.max(1)) * f64::from(height.max(1)))).sqrt();
    let side = |side: u32| {
        let scaled = (f64::from(side) * scale).round_ties_even();
        let tokens = (scaled / f64::from(PIXELS)).round_ties_even();
        (tokens as u32).max(1) * PIXELS
    };
    (side(width), side(height))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_authors() {
        // By `snap_hw_to_multiple_of_32`.
        for (size, area, expected) in [
            ((1280, 704), 720 * 720, (960, 544)),
            ((1280, 704), 960 * 960, (1280, 704)),
            ((720, 720), 720 * 720, (704, 704)),
            ((960, 960), 960 * 960, (960, 960)),
            ((512, 992), 720 * 720, (512, 992)),
            ((448, 1120), 720 * 720, (448, 1152)),
            ((1920, 1080), 960 * 960, (1280, 704)),
            ((1, 100_000), 720 * 720, (32, 227_680)),
        ] {
            assert_eq!(size_near(size, area), expected, "{size:?} {area}");
        }
    }
}
