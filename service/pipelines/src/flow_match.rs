//! The noise schedule: diffusers' `FlowMatchEulerDiscreteScheduler`, as the FLUX and Z-Image pipelines drive it.

use serde::Deserialize;

/// What `scheduler/scheduler_config.json` says; what it leaves out has the class's defaults.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct SchedulerConfig {
    /// The class that the file is for.
    #[serde(rename = "_class_name")]
    pub class_name: String,
    /// Static shift of the sigmas.
    pub shift: f64,
    /// Whether the shift follows the number of picture tokens instead.
    pub use_dynamic_shifting: bool,
    /// Shift (as an exponent) at `base_image_seq_len` tokens.
    pub base_shift: f64,
    /// Shift at `max_image_seq_len` tokens.
    pub max_shift: f64,
    /// See `base_shift`.
    pub base_image_seq_len: f64,
    /// See `max_shift`.
    pub max_image_seq_len: f64,
    /// How the dynamic shift bends the sigmas: `exponential` or `linear`.
    pub time_shift_type: String,
    /// Must be 1000: the transformer multiplies by as much.
    pub num_train_timesteps: u32,
    /// Not supported.
    pub shift_terminal: Option<f64>,
    /// Not supported.
    pub invert_sigmas: bool,
    /// Not supported.
    pub use_karras_sigmas: bool,
    /// Not supported.
    pub use_exponential_sigmas: bool,
    /// Not supported.
    pub use_beta_sigmas: bool,
    /// Not supported.
    pub use_flow_sigmas: bool,
    /// Not supported.
    pub stochastic_sampling: bool,
}

impl Default for SchedulerConfig {
    fn default() -> SchedulerConfig {
        SchedulerConfig {
            class_name: "FlowMatchEulerDiscreteScheduler".to_owned(),
            shift: 1.0,
            use_dynamic_shifting: false,
            base_shift: 0.5,
            max_shift: 1.15,
            base_image_seq_len: 256.0,
            max_image_seq_len: 4096.0,
            time_shift_type: "exponential".to_owned(),
            num_train_timesteps: 1000,
            shift_terminal: None,
            invert_sigmas: false,
            use_karras_sigmas: false,
            use_exponential_sigmas: false,
            use_beta_sigmas: false,
            use_flow_sigmas: false,
            stochastic_sampling: false,
        }
    }
}

impl SchedulerConfig {
    /// Whether this build can follow it.
    ///
    /// # Errors
    /// What it cannot.
    pub fn check(&self) -> Result<(), String> {
        if self.class_name != "FlowMatchEulerDiscreteScheduler" {
            return Err(format!(
                "the scheduler is {}; FlowMatchEulerDiscreteScheduler is supported",
                self.class_name
            ));
        }
        if !["exponential", "linear"].contains(&self.time_shift_type.as_str()) {
            return Err(format!(
                "time_shift_type {:?}; exponential and linear are",
                self.time_shift_type
            ));
        }
        if self.num_train_timesteps != 1000 {
            return Err(format!(
                "num_train_timesteps is {}; 1000 is supported",
                self.num_train_timesteps
            ));
        }
        // Zero is nothing to the reference, too.
        let settings = [
            (
                "shift_terminal",
                self.shift_terminal.is_some_and(|terminal| terminal != 0.0),
            ),
            ("invert_sigmas", self.invert_sigmas),
            ("use_karras_sigmas", self.use_karras_sigmas),
            ("use_exponential_sigmas", self.use_exponential_sigmas),
            ("use_beta_sigmas", self.use_beta_sigmas),
            ("use_flow_sigmas", self.use_flow_sigmas),
            ("stochastic_sampling", self.stochastic_sampling),
        ];
        match settings.into_iter().find(|(_, set)| *set) {
            Some((name, _)) => Err(format!("the scheduler sets {name}, which is not supported")),
            None => Ok(()),
        }
    }

    /// The sigmas of `steps` steps over a picture of `tokens` tokens, from 1 downwards, and a closing 0:
    /// one more than steps. Rounded to f32 where the reference rounds.
    pub fn sigmas(&self, steps: u32, tokens: usize) -> Vec<f32> {
        let last = 1.0 / f64::from(steps);
        let stride = (last - 1.0) / f64::from(steps.saturating_sub(1).max(1));
        let linear = (0..steps).map(|i| {
            if i + 1 == steps && steps > 1 {
                last
            } else {
                1.0 + f64::from(i) * stride
            }
        });
        let mu = self.mu(tokens);
        linear
            .map(|sigma| self.shifted(sigma as f32, mu))
            .chain([0.0])
            .collect()
    }

    /// The same from a grid that `torch.linspace` makes, which computes in f32 from both ends towards the middle, each
    /// product and sum rounded once: `get_default_z_image_sigmas`.
    pub fn sigmas_from_both_ends(&self, steps: u32, tokens: usize) -> Vec<f32> {
        let last = 1.0 / steps as f32;
        let stride = (last - 1.0) / steps.saturating_sub(1).max(1) as f32;
        let mu = self.mu(tokens);
        let linear = (0..steps).map(|i| match i < steps / 2 || steps == 1 {
            true => stride.mul_add(i as f32, 1.0),
            false => (-stride).mul_add((steps - 1 - i) as f32, last),
        });
        linear.map(|sigma| self.shifted(sigma, mu)).chain([0.0]).collect()
    }

    /// The exponent of the dynamic shift: `calculate_shift`.
    fn mu(&self, tokens: usize) -> f64 {
        let slope = (self.max_shift - self.base_shift) / (self.max_image_seq_len - self.base_image_seq_len);
        tokens as f64 * slope + (self.base_shift - slope * self.base_image_seq_len)
    }

    fn shifted(&self, sigma: f32, mu: f64) -> f32 {
        // numpy computes with f32 where an array meets a Python number.
        if !self.use_dynamic_shifting {
            let shift = self.shift as f32;
            return shift * sigma / (1.0 + (self.shift - 1.0) as f32 * sigma);
        }
        let strength = if self.time_shift_type == "linear" {
            mu
        } else {
            mu.exp()
        } as f32;
        strength / (strength + (1.0 / sigma - 1.0))
    }
}

/// The step at which image to image starts, from 0: `FluxImg2ImgPipeline.get_timesteps`. A strength of 1
/// starts at 0; one that is too small for a single step gives `steps`.
pub fn first_step(steps: u32, strength: f32) -> u32 {
    // The reference has the strength as a double that was typed in decimals.
    let strength = decimal(strength);
    let kept = (f64::from(steps) * strength).min(f64::from(steps));
    (f64::from(steps) - kept).max(0.0) as u32
}

/// The double nearest to the decimals that an f32 was written with: 0.6 is 0.6, not 0.60000002384.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_to_image_starts_where_the_reference_does() {
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
    fn what_is_not_supported_is_named() {
        let config = SchedulerConfig {
            shift_terminal: Some(0.1),
            ..SchedulerConfig::default()
        };
        assert!(
            config
                .check()
                .is_err_and(|problem| problem.contains("shift_terminal"))
        );
        assert!(SchedulerConfig::default().check().is_ok());
    }
}
