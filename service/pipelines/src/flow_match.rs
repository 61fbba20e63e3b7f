//! The noise schedule: diffusers' `FlowMatchEulerDiscreteScheduler`, as the pipelines of FLUX, Z-Image and Qwen-Image use it.

use std::path::Path;

use serde::Deserialize;

use crate::ModelError;
use crate::files::checked;

/// `scheduler/scheduler_config.json`; missing fields have the class's defaults.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct SchedulerConfig {
    #[serde(rename = "_class_name")]
    pub class_name: String,
    /// Static shift of the sigmas.
    pub shift: f64,
    /// Whether the shift depends on the number of picture tokens instead.
    pub use_dynamic_shifting: bool,
    /// Shift (as an exponent) at `base_image_seq_len` tokens.
    pub base_shift: f64,
    /// Shift at `max_image_seq_len` tokens.
    pub max_shift: f64,
    pub base_image_seq_len: f64,
    pub max_image_seq_len: f64,
    /// Form of the dynamic shift: `exponential` or `linear`.
    pub time_shift_type: String,
    /// Must be 1000, the factor of the transformer.
    pub num_train_timesteps: u32,
    /// The last sigma before the final 0: the others are stretched to it.
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
    /// The scheduler of a pipeline's folder.
    ///
    /// # Errors
    /// When it cannot be read, or is not supported.
    pub(crate) fn of_pipeline(base: &Path) -> Result<SchedulerConfig, ModelError> {
        let path = base.join("scheduler/scheduler_config.json");
        checked(&path, SchedulerConfig::check)
    }

    /// Checks that this configuration is supported.
    ///
    /// # Errors
    /// The unsupported setting.
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
        self.check_shift()?;
        if let Some(terminal) = self.shift_terminal.filter(|last| !(0.0..1.0).contains(last)) {
            return Err(format!(
                "shift_terminal is {terminal}; it must be from 0 to less than 1"
            ));
        }
        let settings = [
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

    /// Checks that the shift of the sigmas is a number for every picture. A shift that divides by zero, or reverses the sigmas,
    /// would only be noticed in a broken picture.
    fn check_shift(&self) -> Result<(), String> {
        if !self.use_dynamic_shifting {
            return match self.shift > 0.0 && self.shift.is_finite() {
                true => Ok(()),
                false => Err(format!("shift is {}; it must be more than 0", self.shift)),
            };
        }
        let (base, max) = (self.base_image_seq_len, self.max_image_seq_len);
        if base == max || !base.is_finite() || !max.is_finite() {
            return Err(format!(
                "base_image_seq_len is {base} and max_image_seq_len {max}; they must be two different numbers"
            ));
        }
        let is_usable = |shift: f64| shift.is_finite() && (shift > 0.0 || self.time_shift_type != "linear");
        for (name, shift) in [("base_shift", self.base_shift), ("max_shift", self.max_shift)] {
            if !is_usable(shift) {
                return Err(format!("{name} is {shift}, which no sigma can be shifted by"));
            }
        }
        Ok(())
    }

    /// The sigmas of `steps` steps over a picture of `tokens` tokens, descending from 1, and a final 0: `steps + 1`
    /// values. Rounded to f32 where the reference rounds.
    pub fn sigmas(&self, steps: u32, tokens: usize) -> Vec<f32> {
        self.sigmas_of_mu(steps, self.mu(tokens))
    }

    /// [`SchedulerConfig::sigmas`], with an exponent of the dynamic shift of at most `most`.
    pub fn sigmas_with_most_mu(&self, steps: u32, tokens: usize, most: f64) -> Vec<f32> {
        self.sigmas_of_mu(steps, self.mu(tokens).min(most))
    }

    /// [`SchedulerConfig::sigmas`], with this exponent of the dynamic shift.
    pub fn sigmas_of_mu(&self, steps: u32, mu: f64) -> Vec<f32> {
        let last = 1.0 / f64::from(steps);
        let stride = (last - 1.0) / f64::from(steps.saturating_sub(1).max(1));
        let linear = (0..steps).map(|i| {
            if i + 1 == steps && steps > 1 {
                last
            } else {
                1.0 + f64::from(i) * stride
            }
        });
        self.stretched(linear.map(|sigma| self.shifted(sigma as f32, mu)))
    }

    /// [`SchedulerConfig::sigmas`] over a grid of `torch.linspace`, which computes in f32 from both ends towards the
    /// middle, each product and sum rounded once: `get_default_z_image_sigmas`.
    pub fn sigmas_from_both_ends(&self, steps: u32, tokens: usize) -> Vec<f32> {
        let last = 1.0 / steps as f32;
        let stride = (last - 1.0) / steps.saturating_sub(1).max(1) as f32;
        let mu = self.mu(tokens);
        let linear = (0..steps).map(|i| match i < steps / 2 || steps == 1 {
            true => stride.mul_add(i as f32, 1.0),
            false => (-stride).mul_add((steps - 1 - i) as f32, last),
        });
        self.stretched(linear.map(|sigma| self.shifted(sigma, mu)))
    }

    /// The sigmas stretched from 1 so that the last is the terminal one (`stretch_shift_to_terminal`), and a final 0. A single 1
    /// cannot be stretched.
    fn stretched(&self, sigmas: impl Iterator<Item = f32>) -> Vec<f32> {
        let mut sigmas: Vec<f32> = sigmas.collect();
        let last = sigmas.last().map_or(0.0, |last| 1.0 - last);
        // The reference treats zero as unset.
        if let Some(terminal) = self
            .shift_terminal
            .filter(|terminal| *terminal != 0.0 && last > 0.0)
        {
            let by = last / (1.0 - terminal) as f32;
            sigmas
                .iter_mut()
                .for_each(|sigma| *sigma = 1.0 - (1.0 - *sigma) / by);
        }
        sigmas.push(0.0);
        sigmas
    }

    /// The same schedule with this shift for every picture, and without a terminal sigma.
    pub(crate) fn with_shift(&self, shift: f64) -> SchedulerConfig {
        let exponent = shift.ln();
        SchedulerConfig {
            shift,
            base_shift: exponent,
            max_shift: exponent,
            shift_terminal: None,
            ..self.clone()
        }
    }

    /// The exponent of the dynamic shift: `calculate_shift`.
    fn mu(&self, tokens: usize) -> f64 {
        let slope = (self.max_shift - self.base_shift) / (self.max_image_seq_len - self.base_image_seq_len);
        tokens as f64 * slope + (self.base_shift - slope * self.base_image_seq_len)
    }

    fn shifted(&self, sigma: f32, mu: f64) -> f32 {
        // numpy computes in f32 where an array meets a Python number.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shift_that_makes_no_sigmas_is_refused() {
        let plain = SchedulerConfig::default();
        let dynamic = SchedulerConfig {
            use_dynamic_shifting: true,
            ..plain.clone()
        };
        let shift = |shift| SchedulerConfig {
            shift,
            ..plain.clone()
        };
        for (config, named) in [
            (shift(0.0), "shift is 0"),
            (shift(-1.0), "shift is -1"),
            (shift(f64::INFINITY), "shift is inf"),
            (
                SchedulerConfig {
                    base_image_seq_len: 4096.0,
                    ..dynamic.clone()
                },
                "base_image_seq_len is 4096 and max_image_seq_len 4096",
            ),
            (
                SchedulerConfig {
                    base_shift: 0.0,
                    time_shift_type: "linear".to_owned(),
                    ..dynamic.clone()
                },
                "base_shift is 0",
            ),
        ] {
            let refused = config.check().unwrap_err();
            assert!(refused.contains(named), "{refused}");
        }
        let shift_of_nobody = SchedulerConfig {
            shift: 0.0,
            ..dynamic
        };
        for config in [shift(3.0), shift_of_nobody] {
            assert_eq!(config.check(), Ok(()));
            assert!(config.sigmas(4, 1024).iter().all(|sigma| sigma.is_finite()));
        }
    }

    /// `mu = min(calculate_shift(...), math.log(7.0))` of diffusers' `HunyuanVideoFramepackPipeline`, and then
    /// `exp(mu) / (exp(mu) + (1 / sigma - 1))`.
    #[test]
    fn a_dynamic_shift_stays_below_its_bound() {
        let dynamic = SchedulerConfig {
            use_dynamic_shifting: true,
            ..SchedulerConfig::default()
        };
        let most = 7f64.ln();
        // calculate_shift is 0.5 at 256 tokens and 1.15 at 4096: ln 7 is reached between 8797 and 8799.
        for (tokens, shift) in [
            (256, 0.5f64.exp()),
            (4096, 1.15f64.exp()),
            (8_799, 7.0),
            (20_000, 7.0),
        ] {
            let found = dynamic.sigmas_with_most_mu(4, tokens, most);
            for (sigma, found) in [1.0, 0.75, 0.5, 0.25].into_iter().zip(found) {
                let expected = shift / (shift + (1.0 / sigma - 1.0));
                assert!(
                    (f64::from(found) - expected).abs() < 1e-6,
                    "{tokens}: {found}, {expected}"
                );
            }
        }
        assert_eq!(
            dynamic.sigmas_with_most_mu(4, 8_797, most),
            dynamic.sigmas(4, 8_797)
        );
        assert_ne!(
            dynamic.sigmas_with_most_mu(4, 8_799, most),
            dynamic.sigmas(4, 8_799)
        );
    }

    #[test]
    fn unsupported_scheduler_settings_are_named() {
        let config = SchedulerConfig {
            invert_sigmas: true,
            ..SchedulerConfig::default()
        };
        assert!(
            config
                .check()
                .is_err_and(|problem| problem.contains("invert_sigmas"))
        );
        let beyond = SchedulerConfig {
            shift_terminal: Some(1.0),
            ..SchedulerConfig::default()
        };
        assert!(
            beyond
                .check()
                .is_err_and(|problem| problem.contains("shift_terminal"))
        );
        assert!(SchedulerConfig::default().check().is_ok());
    }
}
