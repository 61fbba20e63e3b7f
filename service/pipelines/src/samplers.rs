//! Sampling with models that were trained to remove noise in a thousand small steps: diffusers' `EulerDiscreteScheduler`,
//! `EulerAncestralDiscreteScheduler` and `DPMSolverMultistepScheduler`. Latents are small, so steps are computed in host memory.

use std::path::Path;

use candle_core::{Device, Tensor};
use model::Sampler;
use serde::Deserialize;

use crate::ModelError;
use crate::files::checked;
use crate::noise::Generator;
use crate::start::Kept;

/// What a model predicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prediction {
    /// The noise.
    Epsilon,
    /// The velocity of Salimans and Ho 2022 ("Progressive Distillation for Fast Sampling of Diffusion Models").
    VPrediction,
}

/// Which of the thousand times the steps are at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spacing {
    /// From the last to the first.
    Linspace,
    /// At multiples of a whole number, from the first on.
    Leading,
    /// At equal distances, from the last on.
    Trailing,
}

/// `scheduler/scheduler_config.json`: the noise that a model was trained with, and how it is removed. Missing fields have the
/// defaults of the classes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct NoiseConfig {
    #[serde(rename = "_class_name")]
    pub class_name: String,
    /// Must be 1000.
    pub num_train_timesteps: usize,
    pub beta_start: f64,
    pub beta_end: f64,
    /// `scaled_linear` or `linear`.
    pub beta_schedule: String,
    pub prediction_type: Prediction,
    pub timestep_spacing: Spacing,
    /// Added to the times of leading steps.
    pub steps_offset: i64,
    /// Whether the last of the times is noise alone (Lin et al. 2023, "Common Diffusion Noise Schedules and Sample Steps are
    /// Flawed").
    pub rescale_betas_zero_snr: bool,
    /// Whether the noise levels of steps are those of Karras et al. 2022.
    pub use_karras_sigmas: bool,
    /// Must be 2 for DPM-Solver++.
    pub solver_order: usize,
    /// Must be `dpmsolver++`.
    pub algorithm_type: String,
    /// Must be `midpoint`.
    pub solver_type: String,
    /// Must be `zero`.
    pub final_sigmas_type: String,
    /// Must be `linear`.
    pub interpolation_type: String,
    /// Must be `discrete`.
    pub timestep_type: String,
    /// Not supported.
    pub trained_betas: Option<Vec<f64>>,
    /// Not supported.
    pub thresholding: bool,
    /// Not supported.
    pub use_exponential_sigmas: bool,
    /// Not supported.
    pub use_beta_sigmas: bool,
    /// Not supported.
    pub use_lu_lambdas: bool,
    /// Not supported.
    pub use_flow_sigmas: bool,
}

impl Default for NoiseConfig {
    fn default() -> NoiseConfig {
        NoiseConfig {
            class_name: EULER.to_owned(),
            num_train_timesteps: TIMES,
            beta_start: 0.000_1,
            beta_end: 0.02,
            beta_schedule: "linear".to_owned(),
            prediction_type: Prediction::Epsilon,
            timestep_spacing: Spacing::Linspace,
            steps_offset: 0,
            rescale_betas_zero_snr: false,
            use_karras_sigmas: false,
            solver_order: 2,
            algorithm_type: "dpmsolver++".to_owned(),
            solver_type: "midpoint".to_owned(),
            final_sigmas_type: "zero".to_owned(),
            interpolation_type: "linear".to_owned(),
            timestep_type: "discrete".to_owned(),
            trained_betas: None,
            thresholding: false,
            use_exponential_sigmas: false,
            use_beta_sigmas: false,
            use_lu_lambdas: false,
            use_flow_sigmas: false,
        }
    }
}

/// Times of training.
const TIMES: usize = 1000;

/// The supported classes.
const EULER: &str = "EulerDiscreteScheduler";
const ANCESTRAL: &str = "EulerAncestralDiscreteScheduler";
const MULTISTEP: &str = "DPMSolverMultistepScheduler";

/// Exponent of the noise levels of Karras et al.
const RHO: f64 = 7.0;

impl NoiseConfig {
    /// The scheduler of a pipeline's folder.
    ///
    /// # Errors
    /// When it cannot be read, or is not supported.
    pub(crate) fn of_pipeline(base: &Path) -> Result<NoiseConfig, ModelError> {
        checked(&base.join("scheduler/scheduler_config.json"), NoiseConfig::check)
    }

    /// Checks that this configuration is supported.
    ///
    /// # Errors
    /// The unsupported setting.
    pub fn check(&self) -> Result<(), String> {
        if ![EULER, ANCESTRAL, MULTISTEP].contains(&self.class_name.as_str()) {
            return Err(format!(
                "the scheduler is {}; {EULER}, {ANCESTRAL} and {MULTISTEP} are supported: write one of them as _class_name to sample \
                 with it",
                self.class_name
            ));
        }
        let is_multistep = self.class_name == MULTISTEP;
        let settings = [
            ("num_train_timesteps", self.num_train_timesteps != TIMES),
            ("trained_betas", self.trained_betas.is_some()),
            (
                "beta_schedule",
                !["scaled_linear", "linear"].contains(&self.beta_schedule.as_str()),
            ),
            ("solver_order", is_multistep && self.solver_order != 2),
            (
                "algorithm_type",
                is_multistep && self.algorithm_type != "dpmsolver++",
            ),
            ("solver_type", is_multistep && self.solver_type != "midpoint"),
            ("final_sigmas_type", self.final_sigmas_type != "zero"),
            ("interpolation_type", self.interpolation_type != "linear"),
            ("timestep_type", self.timestep_type != "discrete"),
            ("thresholding", self.thresholding),
            ("use_exponential_sigmas", self.use_exponential_sigmas),
            ("use_beta_sigmas", self.use_beta_sigmas),
            ("use_lu_lambdas", self.use_lu_lambdas),
            ("use_flow_sigmas", self.use_flow_sigmas),
        ];
        if let Some((name, _)) = settings.into_iter().find(|(_, differs)| *differs) {
            return Err(format!("the scheduler's {name} is not supported"));
        }
        let is_noise = |beta: f64| beta > 0.0 && beta < 1.0;
        match is_noise(self.beta_start) && is_noise(self.beta_end) {
            true => Ok(()),
            false => Err(format!(
                "beta_start is {} and beta_end {}; numbers between 0 and 1 are expected",
                self.beta_start, self.beta_end
            )),
        }
    }

    /// The products of what each step of training keeps, up to each time: `alphas_cumprod`.
    fn kept_of_signal(&self) -> Vec<f64> {
        let (first, last) = match self.beta_schedule.as_str() {
            "linear" => (self.beta_start, self.beta_end),
            _ => (self.beta_start.sqrt(), self.beta_end.sqrt()),
        };
        let betas = (0..TIMES).map(|time| {
            let beta = first + (last - first) * time as f64 / (TIMES - 1) as f64;
            match self.beta_schedule.as_str() {
                "linear" => beta,
                _ => beta * beta,
            }
        });
        let mut kept = 1.0;
        let products = betas.map(|beta| {
            kept *= 1.0 - f64::from(beta as f32);
            kept
        });
        let products: Vec<f64> = products.collect();
        if !self.rescale_betas_zero_snr {
            return products;
        }
        // The reference leaves the last just above zero.
        let (first, last) = (products[0].sqrt(), products[TIMES - 1].sqrt());
        let rescaled = products.iter().enumerate().map(|(time, product)| match time {
            time if time + 1 == TIMES => 2f64.powi(-24),
            _ => ((product.sqrt() - last) * first / (first - last)).powi(2),
        });
        rescaled.collect()
    }

    /// The noise levels of all times of training.
    fn levels(&self) -> Vec<f64> {
        let kept = self.kept_of_signal();
        kept.iter().map(|kept| ((1.0 - kept) / kept).sqrt()).collect()
    }

    /// The schedule of a request: by the sampler that it names, or by the checkpoint's.
    pub fn schedule(&self, steps: u32, sampler: Option<Sampler>) -> Schedule {
        let solver = match sampler {
            Some(Sampler::Euler) => Solver::Euler,
            Some(Sampler::EulerAncestral) => Solver::Ancestral,
            Some(Sampler::Dpmpp2mKarras) => Solver::Multistep,
            None if self.class_name == ANCESTRAL => Solver::Ancestral,
            None if self.class_name == MULTISTEP => Solver::Multistep,
            None => Solver::Euler,
        };
        let is_karras = match sampler {
            Some(sampler) => sampler == Sampler::Dpmpp2mKarras,
            None => self.use_karras_sigmas && solver != Solver::Ancestral,
        };
        let levels = self.levels();
        let steps = steps as usize;
        let (times, sigmas) = match is_karras {
            true => {
                let sigmas = karras(levels[TIMES - 1], levels[0], steps);
                let logs: Vec<f64> = levels.iter().map(|level| level.ln()).collect();
                let times = sigmas.iter().map(|sigma| time_of(*sigma, &logs));
                let rounded = |time: f64| match solver {
                    Solver::Multistep => time.round_ties_even(),
                    Solver::Euler | Solver::Ancestral => time,
                };
                (times.map(rounded).collect(), sigmas)
            }
            false => {
                let times = self.times(steps, solver);
                let sigmas = times.iter().map(|time| interpolated(*time, &levels)).collect();
                (times, sigmas)
            }
        };
        Schedule {
            times: times.into_iter().map(|time: f64| time as f32).collect(),
            sigmas: sigmas
                .into_iter()
                .chain([0.0])
                .map(|sigma: f64| f64::from(sigma as f32))
                .collect(),
            solver,
            prediction: self.prediction_type,
            starts_at_level: self.timestep_spacing != Spacing::Leading,
        }
    }

    /// The times of steps, descending.
    fn times(&self, steps: usize, solver: Solver) -> Vec<f64> {
        // DPM-Solver++ leaves out the last of one more steps.
        let further = usize::from(solver == Solver::Multistep);
        let descending = |time: &dyn Fn(usize) -> f64, count: usize| -> Vec<f64> {
            (further..count + further).rev().map(time).collect()
        };
        match self.timestep_spacing {
            Spacing::Linspace => {
                let apart = (TIMES - 1) as f64 / (steps + further).saturating_sub(1).max(1) as f64;
                let rounded = |time: f64| match solver {
                    Solver::Multistep => time.round_ties_even(),
                    Solver::Euler | Solver::Ancestral => time,
                };
                descending(&|step| rounded(step as f64 * apart), steps)
            }
            Spacing::Leading => {
                let apart = TIMES / (steps + further);
                descending(&|step| (step * apart) as f64 + self.steps_offset as f64, steps)
            }
            Spacing::Trailing => {
                let apart = TIMES as f64 / steps as f64;
                let times =
                    (0..steps).map(|step| (TIMES as f64 - step as f64 * apart).round_ties_even() - 1.0);
                times.collect()
            }
        }
    }
}

/// The noise levels of Karras et al. from `most` to `least`.
fn karras(most: f64, least: f64, steps: usize) -> Vec<f64> {
    let (most, least) = (most.powf(1.0 / RHO), least.powf(1.0 / RHO));
    let level = |step: usize| {
        let part = step as f64 / steps.saturating_sub(1).max(1) as f64;
        (most + part * (least - most)).powf(RHO)
    };
    (0..steps).map(level).collect()
}

/// The time of a noise level, between those whose levels have the nearest of these logarithms, which ascend.
fn time_of(sigma: f64, logs: &[f64]) -> f64 {
    let log = sigma.max(1e-10).ln();
    let below = logs.iter().take_while(|level| **level <= log).count();
    let low = below.saturating_sub(1).min(logs.len() - 2);
    let part = ((logs[low] - log) / (logs[low] - logs[low + 1])).clamp(0.0, 1.0);
    (1.0 - part) * low as f64 + part * (low + 1) as f64
}

/// The noise level of a time, linear between whole times.
fn interpolated(time: f64, levels: &[f64]) -> f64 {
    let time = time.clamp(0.0, (levels.len() - 1) as f64);
    let low = (time as usize).min(levels.len() - 2);
    let part = time - low as f64;
    levels[low] * (1.0 - part) + levels[low + 1] * part
}

/// How a step follows from predictions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Solver {
    Euler,
    Ancestral,
    Multistep,
}

/// The steps of a request.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// The times of steps, as the model is told.
    pub times: Vec<f32>,
    /// The noise level of each step, in deviations of a picture's latent, and the final 0.
    pub sigmas: Vec<f64>,
    solver: Solver,
    prediction: Prediction,
    /// Whether noise alone has the first level, rather than that of a noised latent.
    starts_at_level: bool,
}

impl Schedule {
    /// Whether latents keep one variance (DPM-Solver++), rather than being the picture's with noise added.
    fn keeps_variance(&self) -> bool {
        self.solver == Solver::Multistep
    }

    /// Factor of the picture at a noise level, in a latent as it is sampled.
    fn alpha(&self, sigma: f64) -> f64 {
        match self.keeps_variance() {
            true => 1.0 / (sigma * sigma + 1.0).sqrt(),
            false => 1.0,
        }
    }

    /// A picture's latent at the noise level of a step: `add_noise`.
    fn noised(&self, image: &Tensor, noise: &Tensor, step: usize) -> candle_core::Result<Tensor> {
        let (sigma, alpha) = (self.sigmas[step], self.alpha(self.sigmas[step]));
        (image * alpha)? + (noise * (sigma * alpha))?
    }

    /// Noise alone, as sampling begins with it: `init_noise_sigma`.
    fn of_noise(&self, noise: &Tensor) -> candle_core::Result<Tensor> {
        let most = self.sigmas.iter().copied().fold(0.0, f64::max);
        let factor = match (self.keeps_variance(), self.starts_at_level) {
            (true, _) => 1.0,
            (false, true) => most,
            (false, false) => (most * most + 1.0).sqrt(),
        };
        noise * factor
    }
}

/// A latent from step to step, f32 in host memory.
pub(crate) struct Sampled {
    schedule: Schedule,
    latent: Tensor,
    /// Draws the noise of ancestral steps.
    generator: Generator,
    /// The unmasked part of the latent.
    kept: Option<Kept>,
    /// The picture that the last step predicted, of the latent's scale without noise.
    clean: Option<Tensor>,
    /// The first step that is run.
    first: usize,
}

/// What a sampling starts from.
pub(crate) struct Beginning<'a> {
    /// The encoded picture, and whether the first step begins with it rather than with noise alone.
    pub(crate) image: Option<(&'a Tensor, bool)>,
    /// The first step that is run.
    pub(crate) first: usize,
}

impl Sampled {
    /// The latent of noise, and of the picture that a request starts from. `generator` has drawn the noise.
    ///
    /// # Errors
    /// When shapes do not match.
    pub(crate) fn new(
        schedule: Schedule,
        noise: &Tensor,
        from: &Beginning<'_>,
        kept: Option<Kept>,
        generator: Generator,
    ) -> candle_core::Result<Sampled> {
        let latent = match from.image {
            Some((image, true)) => schedule.noised(image, noise, from.first)?,
            Some((_, false)) | None => schedule.of_noise(noise)?,
        };
        Ok(Sampled {
            schedule,
            latent,
            generator,
            kept,
            clean: None,
            first: from.first,
        })
    }

    /// The steps that are run, of those of the schedule.
    pub(crate) fn steps(&self) -> std::ops::Range<usize> {
        self.first..self.schedule.times.len()
    }

    /// The time of a step.
    pub(crate) fn time(&self, step: usize) -> f32 {
        self.schedule.times[step]
    }

    /// The latent as the model reads it in a step: `scale_model_input`.
    ///
    /// # Errors
    /// Errors of candle.
    pub(crate) fn seen(&self, step: usize) -> candle_core::Result<Tensor> {
        let sigma = self.schedule.sigmas[step];
        match self.schedule.keeps_variance() {
            true => Ok(self.latent.clone()),
            false => &self.latent / (sigma * sigma + 1.0).sqrt(),
        }
    }

    /// The latent at the end.
    pub(crate) fn latent(&self) -> &Tensor {
        &self.latent
    }

    /// The picture's latent as the last step predicted it.
    pub(crate) fn clean(&self) -> Option<&Tensor> {
        self.clean.as_ref()
    }

    /// Makes a step by a prediction of the latent's shape.
    ///
    /// # Errors
    /// When shapes do not match.
    pub(crate) fn advance(&mut self, step: usize, prediction: &Tensor) -> candle_core::Result<()> {
        let clean = self.clean_of(step, prediction)?;
        let latent = match self.schedule.solver {
            Solver::Euler => self.toward(step, &clean, self.schedule.sigmas[step + 1])?,
            Solver::Ancestral => self.ancestral(step, &clean)?,
            Solver::Multistep => self.multistep(step, &clean)?,
        };
        self.clean = Some(clean);
        self.latent = match &self.kept {
            None => latent,
            Some(kept) => {
                let unchanged = self.schedule.noised(&kept.image, &kept.noise, step + 1)?;
                ((kept.mask.affine(-1.0, 1.0)? * unchanged)? + (&kept.mask * latent)?)?
            }
        };
        Ok(())
    }

    /// The picture that a prediction is of.
    fn clean_of(&self, step: usize, prediction: &Tensor) -> candle_core::Result<Tensor> {
        let Schedule {
            sigmas,
            prediction: kind,
            ..
        } = &self.schedule;
        let sigma = sigmas[step];
        let scale = (sigma * sigma + 1.0).sqrt();
        match (kind, self.schedule.keeps_variance()) {
            (Prediction::Epsilon, false) => &self.latent - (prediction * sigma)?,
            (Prediction::Epsilon, true) => (&self.latent * scale)? - (prediction * sigma)?,
            (Prediction::VPrediction, false) => {
                (&self.latent / (scale * scale))? - (prediction * (sigma / scale))?
            }
            (Prediction::VPrediction, true) => (&self.latent / scale)? - (prediction * (sigma / scale))?,
        }
    }

    /// The latent on the line to the predicted picture, at another noise level.
    fn toward(&self, step: usize, clean: &Tensor, sigma: f64) -> candle_core::Result<Tensor> {
        let part = sigma / self.schedule.sigmas[step];
        (&self.latent * part)? + (clean * (1.0 - part))?
    }

    /// A step below the next noise level, and new noise up to it.
    fn ancestral(&mut self, step: usize, clean: &Tensor) -> candle_core::Result<Tensor> {
        let (from, to) = (self.schedule.sigmas[step], self.schedule.sigmas[step + 1]);
        let (from_squared, to_squared) = (from * from, to * to);
        let up_squared = to_squared * (from_squared - to_squared) / from_squared;
        let down = (to_squared - up_squared).max(0.0).sqrt();
        let latent = self.toward(step, clean, down)?;
        let noise = self.generator.normal(latent.elem_count());
        let noise = Tensor::from_vec(noise, latent.shape(), &Device::Cpu)?;
        latent + (noise * up_squared.sqrt())?
    }

    /// A step of DPM-Solver++ (2M): `multistep_dpm_solver_second_order_update`, of the first order in the first step and in the
    /// last, which ends without noise.
    fn multistep(&self, step: usize, clean: &Tensor) -> candle_core::Result<Tensor> {
        let sigmas = &self.schedule.sigmas;
        let (from, to) = (sigmas[step], sigmas[step + 1]);
        // Half the logarithm of the ratio of signal and noise; infinite without noise.
        let lambda = |sigma: f64| -sigma.ln();
        let alpha = self.schedule.alpha(to);
        let noise_part = (to * alpha) / (from * self.schedule.alpha(from));
        let apart = lambda(to) - lambda(from);
        let by = alpha * (1.0 - (-apart).exp());
        let latent = ((&self.latent * noise_part)? + (clean * by)?)?;
        let is_last = step + 1 == self.schedule.times.len();
        match &self.clean {
            Some(before) if !is_last && step > self.first => {
                let apart_before = lambda(from) - lambda(sigmas[step - 1]);
                let difference = ((clean - before)? * (apart / apart_before))?;
                latent + (difference * (0.5 * by))?
            }
            _ => Ok(latent),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_schedulers_are_named() {
        for (json, named) in [
            (r#"{"_class_name": "LCMScheduler"}"#, "LCMScheduler"),
            (r#"{"_class_name": "EDMDPMSolverMultistepScheduler"}"#, "EDMDPM"),
            (r#"{"beta_schedule": "squaredcos_cap_v2"}"#, "beta_schedule"),
            (
                r#"{"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"}"#,
                "algorithm_type",
            ),
            (r#"{"final_sigmas_type": "sigma_min"}"#, "final_sigmas_type"),
            (r#"{"beta_start": 0.0}"#, "beta_start"),
        ] {
            let config: NoiseConfig = serde_json::from_str(json).expect("a configuration");
            let refused = config.check().expect_err("unsupported");
            assert!(refused.contains(named), "{refused}");
        }
        assert_eq!(NoiseConfig::default().check(), Ok(()));
    }

    #[test]
    fn schedules_of_any_length_are_finite_and_descend() {
        let leading = NoiseConfig {
            timestep_spacing: Spacing::Leading,
            steps_offset: 1,
            ..NoiseConfig::default()
        };
        for sampler in Sampler::ALL {
            for steps in [1, 2, 3, 15, 200] {
                let Schedule { times, sigmas, .. } = leading.schedule(steps, Some(sampler));
                assert_eq!((times.len(), sigmas.len()), (steps as usize, steps as usize + 1));
                assert!(
                    sigmas.windows(2).all(|pair| pair[0] > pair[1]),
                    "{sampler} {sigmas:?}"
                );
                assert!(
                    times.iter().all(|time| (0.0..=1000.0).contains(time)),
                    "{times:?}"
                );
            }
        }
    }
}
