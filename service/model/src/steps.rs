//! The first step of a sampling that starts from a latent instead of from noise.

/// The first step of image to image, from 0: `FluxImg2ImgPipeline.get_timesteps`. A strength of 1 starts at 0; a strength that
/// is too small for a single step returns `steps`.
pub fn first_step(steps: u32, strength: f32) -> u32 {
    // In the reference, strength is a double parsed from decimals.
    let strength = decimal(strength);
    let kept = (f64::from(steps) * strength).min(f64::from(steps));
    (f64::from(steps) - kept).max(0.0) as u32
}

/// The first step of image to image where a part of a step is not run: `StableDiffusionXLImg2ImgPipeline.get_timesteps`, which runs
/// `int(steps * strength)` steps. A strength that is too small for a single step returns `steps`.
pub fn first_whole_step(steps: u32, strength: f32) -> u32 {
    let run = (f64::from(steps) * decimal(strength)).min(f64::from(steps)) as u32;
    steps.saturating_sub(run)
}

/// The double nearest to the shortest decimal form of an f32: 0.6 is 0.6, not 0.60000002384.
pub fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_to_image_starts_at_the_same_step_as_the_reference() {
        // int(max(steps - min(steps * strength, steps), 0)) in Python.
        for (steps, strength, expected) in [
            (28, 0.6, 11),
            (5, 0.65, 1),
            (10, 0.9, 1),
            (10, 0.7, 3),
            (4, 0.5, 2),
            (4, 1.0, 0),
            (4, 0.1, 3),
        ] {
            assert_eq!(
                first_step(steps, strength),
                expected,
                "{steps} steps at {strength}"
            );
        }
    }

    #[test]
    fn a_part_of_a_step_is_left_out_where_the_reference_does_so() {
        // max(steps - min(int(steps * strength), steps), 0) in Python.
        for (steps, strength, expected) in [
            (30, 0.6, 12),
            (5, 0.65, 2),
            (10, 0.9, 1),
            (10, 0.7, 3),
            (4, 0.1, 4),
            (4, 1.0, 0),
        ] {
            let first = first_whole_step(steps, strength);
            assert_eq!(first, expected, "{steps} steps at {strength}");
        }
    }
}
