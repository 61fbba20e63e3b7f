//! Adaptive projected guidance (Sadat et al. 2024) as diffusers' `AceStepPipeline` uses it: over time, for each channel
//! separately.

/// Weight of the earlier differences in the running difference.
const MOMENTUM: f32 = -0.75;
/// Largest length of a channel's difference over time.
const THRESHOLD: f32 = 2.5;
/// Least divisor of a channel.
const LEAST: f64 = 1e-12;

/// The guidance of a request, which remembers the differences of its steps. In f32 in host memory, with projections in f64
/// as in the reference. The transfer is cheap: the velocity has a thousandth of the numbers that a step computes.
#[derive(Debug)]
pub struct Guidance {
    /// Guidance scale; 1: no guidance.
    scale: f32,
    channels: usize,
    running: Vec<f32>,
}

impl Guidance {
    /// For velocities of `channels` channels.
    pub fn new(scale: f32, channels: usize) -> Guidance {
        Guidance {
            scale,
            channels: channels.max(1),
            running: Vec::new(),
        }
    }

    /// The guidance with the running differences of earlier steps.
    pub fn resumed(self, running: Vec<f32>) -> Guidance {
        Guidance { running, ..self }
    }

    /// The running differences after the steps so far, `[frames, channels]`; empty before the first step.
    pub fn running(&self) -> &[f32] {
        &self.running
    }

    /// The guided velocity of a step, `[frames, channels]`, from the velocity with the condition and the velocity without.
    pub fn guided(&mut self, with: &[f32], without: &[f32]) -> Vec<f32> {
        self.running.resize(with.len(), 0.0);
        let pairs = with.iter().zip(without);
        for (running, (with, without)) in self.running.iter_mut().zip(pairs) {
            *running = (with - without) + MOMENTUM * *running;
        }
        let mut guided = with.to_vec();
        for channel in 0..self.channels {
            let of_channel =
                |x: &[f32]| -> Vec<f32> { x.iter().skip(channel).step_by(self.channels).copied().collect() };
            let (difference, direction) = (of_channel(&self.running), of_channel(with));
            let length = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let shrunk = (THRESHOLD / length(&difference) as f32).min(1.0);
            let unit = 1.0 / length(&direction).max(LEAST);
            let along: f64 = difference
                .iter()
                .zip(&direction)
                .map(|(a, b)| f64::from(a * shrunk) * f64::from(*b) * unit)
                .sum();
            let places = guided.iter_mut().skip(channel).step_by(self.channels);
            for (place, (difference, direction)) in places.zip(difference.iter().zip(&direction)) {
                let across = f64::from(difference * shrunk) - along * f64::from(*direction) * unit;
                *place += (self.scale - 1.0) * across as f32;
            }
        }
        guided
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guidance_ignores_the_component_parallel_to_the_velocity() {
        let mut guidance = Guidance::new(3.0, 2);
        // Channel 0 differs along its velocity, channel 1 across it.
        let with = [1.0, 1.0, 1.0, 0.0];
        let without = [0.5, 1.0, 0.5, -0.5];
        let guided = guidance.guided(&with, &without);
        let expected = [1.0, 1.0, 1.0, 1.0];
        for (found, expected) in guided.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{guided:?}");
        }
    }

    #[test]
    fn equal_velocities_stay_as_they_are() {
        let mut guidance = Guidance::new(7.0, 1);
        assert_eq!(guidance.guided(&[0.5, -2.0], &[0.5, -2.0]), [0.5, -2.0]);
        assert_eq!(guidance.guided(&[0.0, 0.0], &[0.0, 0.0]), [0.0, 0.0]);
    }
}
