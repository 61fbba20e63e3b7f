//! UniPC (Zhao et al. 2023), the multistep solver of Wan's schedules: diffusers' `UniPCMultistepScheduler` with
//! `use_flow_sigmas`, of second order, of the kind `bh2`, predicting the clean latent.
//!
//! A step first corrects the latent that the step before it predicted, by what the transformer says there, then predicts the
//! next one. All its sums are of latents times numbers of the schedule, which are computed here in f64.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use ops::{Finite, copy_rows, euler};
use serde::Deserialize;

use crate::files::{read_json, unsupported};
use crate::sampling::Prediction;
use crate::{ModelError, StageError};

/// Training steps, in which times are counted.
const TRAINED: f64 = 1000.0;

/// How much less than 1 the first sigma of diffusers' grid is: at 1 there is no signal whose logarithm could be taken.
const BELOW_ONE: f64 = 1e-6;

/// `scheduler/scheduler_config.json`. Missing fields have the class's defaults.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct UniPcConfig {
    #[serde(rename = "_class_name")]
    pub class: String,
    /// Factor by which sigmas are shifted towards noise.
    pub flow_shift: f64,
    pub num_train_timesteps: u32,
    pub solver_order: u32,
    pub solver_type: String,
    pub prediction_type: String,
    pub predict_x0: bool,
    pub lower_order_final: bool,
    pub use_flow_sigmas: bool,
    pub use_dynamic_shifting: bool,
    pub use_karras_sigmas: bool,
    pub use_exponential_sigmas: bool,
    pub use_beta_sigmas: bool,
    pub thresholding: bool,
    pub final_sigmas_type: String,
    pub shift_terminal: Option<f64>,
}

impl Default for UniPcConfig {
    fn default() -> UniPcConfig {
        UniPcConfig {
            class: "UniPCMultistepScheduler".to_owned(),
            flow_shift: 1.0,
            num_train_timesteps: 1000,
            solver_order: 2,
            solver_type: "bh2".to_owned(),
            prediction_type: "epsilon".to_owned(),
            predict_x0: true,
            lower_order_final: true,
            use_flow_sigmas: false,
            use_dynamic_shifting: false,
            use_karras_sigmas: false,
            use_exponential_sigmas: false,
            use_beta_sigmas: false,
            thresholding: false,
            final_sigmas_type: "zero".to_owned(),
            shift_terminal: None,
        }
    }
}

impl UniPcConfig {
    /// The scheduler of Wan's pipelines, with this shift.
    pub(crate) fn shifted(flow_shift: f64) -> UniPcConfig {
        UniPcConfig {
            flow_shift,
            prediction_type: "flow_prediction".to_owned(),
            use_flow_sigmas: true,
            ..UniPcConfig::default()
        }
    }

    /// The scheduler of a pipeline's folder.
    ///
    /// # Errors
    /// When it is missing, or has settings that are not supported.
    pub(crate) fn of_pipeline(folder: &Path) -> Result<UniPcConfig, ModelError> {
        let path = folder.join("scheduler/scheduler_config.json");
        let config: UniPcConfig = read_json(&path)?;
        config.check().map_err(|problem| unsupported(&path, problem))?;
        Ok(config)
    }

    /// Checks that these settings are supported.
    ///
    /// # Errors
    /// The first that is not, in words.
    pub fn check(&self) -> Result<(), String> {
        let texts = [
            ("_class_name", &self.class, "UniPCMultistepScheduler"),
            ("prediction_type", &self.prediction_type, "flow_prediction"),
            ("solver_type", &self.solver_type, "bh2"),
            ("final_sigmas_type", &self.final_sigmas_type, "zero"),
        ];
        if let Some((name, found, supported)) = texts.into_iter().find(|(_, found, is)| found != is) {
            return Err(format!(
                "the scheduler's {name} is {found}; {supported} is supported"
            ));
        }
        let flags = [
            ("use_flow_sigmas", self.use_flow_sigmas, true),
            ("predict_x0", self.predict_x0, true),
            ("lower_order_final", self.lower_order_final, true),
            ("use_dynamic_shifting", self.use_dynamic_shifting, false),
            ("use_karras_sigmas", self.use_karras_sigmas, false),
            ("use_exponential_sigmas", self.use_exponential_sigmas, false),
            ("use_beta_sigmas", self.use_beta_sigmas, false),
            ("thresholding", self.thresholding, false),
            ("shift_terminal", self.shift_terminal.is_some(), false),
        ];
        if let Some((name, found, supported)) = flags.into_iter().find(|(_, found, is)| found != is) {
            return Err(format!(
                "the scheduler's {name} is {found}; {supported} is supported"
            ));
        }
        let numbers = [
            ("num_train_timesteps", self.num_train_timesteps, 1000),
            ("solver_order", self.solver_order, 2),
        ];
        if let Some((name, found, supported)) = numbers.into_iter().find(|(_, found, is)| found != is) {
            return Err(format!(
                "the scheduler's {name} is {found}; {supported} is supported"
            ));
        }
        match self.flow_shift > 0.0 && self.flow_shift.is_finite() {
            true => Ok(()),
            false => Err(format!(
                "flow_shift is {}; it must be more than 0",
                self.flow_shift
            )),
        }
    }
}

/// Where a schedule begins and ends before it is shifted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// From 1 to the first training step: diffusers.
    Diffusers,
    /// From the last but one training step to 0: Wan's authors (`FlowUniPCMultistepScheduler`), and Ovi's.
    Authors,
}

/// The sigmas of a sampling, and the times that the transformer is given.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// The sigmas of all steps, and the final 0.
    pub sigmas: Vec<f32>,
    /// The time of each step in training steps, a whole number, cut as the references cut it.
    pub times: Vec<f32>,
}

impl Schedule {
    /// The schedule of `steps` steps, with sigmas shifted by this factor.
    pub fn new(grid: Grid, steps: u32, shift: f64) -> Schedule {
        let (first, last) = match grid {
            Grid::Diffusers => (1.0, 1.0 / TRAINED),
            // The references keep it in f32.
            Grid::Authors => (f64::from((1.0 - 1.0 / TRAINED) as f32), 0.0),
        };
        let stride = (last - first) / f64::from(steps.max(1));
        let shifted = (0..steps).map(|i| {
            let sigma = first + f64::from(i) * stride;
            let sigma = shift * sigma / (1.0 + (shift - 1.0) * sigma);
            match grid == Grid::Diffusers && i == 0 && (sigma - 1.0).abs() < BELOW_ONE {
                true => sigma - BELOW_ONE,
                false => sigma,
            }
        });
        let shifted: Vec<f64> = shifted.collect();
        Schedule {
            times: shifted
                .iter()
                .map(|sigma| (sigma * TRAINED).trunc() as f32)
                .collect(),
            sigmas: shifted.iter().map(|sigma| *sigma as f32).chain([0.0]).collect(),
        }
    }

    /// Number of steps.
    pub fn steps(&self) -> usize {
        self.times.len()
    }

    /// The order of the solver in a step: 1 in the first and in the last, whose history is short and whose sigma is 0.
    fn order(&self, step: usize) -> usize {
        2.min(self.steps() - step).min(step + 1)
    }

    /// The part of the clean latent at a step: rounded to f32 as in the reference, where the first sigma is nearly 1.
    fn signal(&self, step: usize) -> f64 {
        f64::from(1.0 - self.sigmas[step])
    }

    /// Logarithm of signal to noise.
    fn lambda(&self, step: usize) -> f64 {
        self.signal(step).ln() - f64::from(self.sigmas[step]).ln()
    }

    /// From the latent at `from` to that at `to`: factors of that latent, and of the clean latent predicted at `from`, with the
    /// first order; the factor of differences, and the length of the step in [`Schedule::lambda`].
    fn first_order(&self, from: usize, to: usize) -> FirstOrder {
        let signal = self.signal(to);
        let length = self.lambda(to) - self.lambda(from);
        let decay = (-length).exp_m1();
        FirstOrder {
            latent: f64::from(self.sigmas[to]) / f64::from(self.sigmas[from]),
            clean: -signal * decay,
            difference: -signal * decay,
            length,
            decay,
        }
    }

    /// How far the clean latent before the one at `from` lies, in lengths of the step.
    fn ratio(&self, from: usize, length: f64) -> f64 {
        (self.lambda(from - 1) - self.lambda(from)) / length
    }

    /// The factors with which step `step` predicts the next latent.
    fn predictor(&self, step: usize) -> Sum {
        let first = self.first_order(step, step + 1);
        let mut sum = Sum {
            latent: first.latent,
            clean: [first.clean, 0.0],
            new: 0.0,
        };
        if self.order(step) == 2 {
            let of_difference = 0.5 * first.difference / self.ratio(step, first.length);
            sum.clean[0] -= of_difference;
            sum.clean[1] += of_difference;
        }
        sum
    }

    /// The factors with which step `step` corrects the latent that the step before it predicted; `None` in the first.
    fn corrector(&self, step: usize) -> Option<Sum> {
        let before = step.checked_sub(1)?;
        let first = self.first_order(before, step);
        let (of_difference, of_new) = match self.order(before) {
            1 => (0.0, 0.5),
            _ => {
                let ratio = self.ratio(before, first.length);
                let negative = -first.length;
                // The first two phi functions of the step's length, divided by the factor of `bh2`.
                let phi = first.decay / negative - 1.0;
                let [one, two] = [phi / first.decay, (phi / negative - 0.5) * 2.0 / first.decay];
                let of_old = (two - one) / (ratio - 1.0);
                (of_old / ratio, one - of_old)
            }
        };
        let [difference, new] = [of_difference, of_new].map(|factor| factor * first.difference);
        Some(Sum {
            latent: first.latent,
            clean: [first.clean - difference - new, difference],
            new,
        })
    }
}

/// A step of first order.
struct FirstOrder {
    latent: f64,
    clean: f64,
    difference: f64,
    length: f64,
    decay: f64,
}

/// A sum of latents.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sum {
    /// Factor of the latent that the step began with, as corrected.
    latent: f64,
    /// Factors of the clean latents that were predicted there and before.
    clean: [f64; 2],
    /// Factor of the clean latent that is predicted now.
    new: f64,
}

/// What a sampling passes from one stage to the next: f32 in host memory.
#[derive(Clone, Debug)]
pub(crate) struct UniPcState {
    /// The latent that was predicted last.
    pub(crate) latent: Tensor,
    /// The corrected latent before it.
    pub(crate) corrected: Tensor,
    /// The clean latents that were predicted, the last first.
    pub(crate) clean: [Tensor; 2],
}

/// The latent of a sampling by UniPC, from step to step, in buffers that are allocated once.
pub(crate) struct UniPcLatent {
    schedule: Schedule,
    /// f32: the latent that was predicted last.
    latent: Tensor,
    corrected: Tensor,
    /// Clean latents: that of this step, and of the two before.
    clean: [Tensor; 3],
    /// The latent in the dtype of the transformer, which reads it.
    seen: Tensor,
    /// Where sums leave a copy that nobody reads: f32, and in the dtype of the transformer.
    unread: [Tensor; 2],
    finite: Finite,
}

impl UniPcLatent {
    /// Bytes on the card for a latent of so many numbers.
    pub(crate) fn bytes(numbers: usize, dtype: DType) -> u64 {
        (numbers * (6 * size_of::<f32>() + 2 * dtype.size_in_bytes())) as u64
    }

    /// The latent that a sampling starts from, f32 in host memory, arranged as the transformer reads it.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn new(
        start: &Tensor,
        schedule: Schedule,
        on: (DType, &Device),
    ) -> candle_core::Result<UniPcLatent> {
        let clean = [start.zeros_like()?, start.zeros_like()?];
        let state = UniPcState {
            latent: start.clone(),
            corrected: start.clone(),
            clean,
        };
        UniPcLatent::of_state(&state, schedule, on)
    }

    /// Goes on where another stage ended.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn of_state(
        state: &UniPcState,
        schedule: Schedule,
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<UniPcLatent> {
        let here = |tensor: &Tensor| tensor.contiguous()?.copy()?.to_device(device);
        let zeros = |dtype| Tensor::zeros(state.latent.shape(), dtype, device);
        Ok(UniPcLatent {
            schedule,
            latent: here(&state.latent)?,
            corrected: here(&state.corrected)?,
            clean: [zeros(DType::F32)?, here(&state.clean[0])?, here(&state.clean[1])?],
            seen: here(&state.latent.to_dtype(dtype)?)?,
            unread: [zeros(DType::F32)?, zeros(dtype)?],
            finite: Finite::new(device)?,
        })
    }

    pub(crate) fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The latent in the dtype of the transformer, which reads it.
    pub(crate) fn seen(&self) -> &Tensor {
        &self.seen
    }

    /// The latent, f32 in host memory.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn on_host(&self) -> candle_core::Result<Tensor> {
        self.latent.to_device(&Device::Cpu)
    }

    /// The clean latent that the last step predicted, f32 in host memory: what a preview shows.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn clean_on_host(&self) -> candle_core::Result<Tensor> {
        self.clean[1].to_device(&Device::Cpu)
    }

    /// What another stage needs to go on.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn state(&self) -> candle_core::Result<UniPcState> {
        let host = |tensor: &Tensor| tensor.to_device(&Device::Cpu);
        Ok(UniPcState {
            latent: host(&self.latent)?,
            corrected: host(&self.corrected)?,
            clean: [host(&self.clean[1])?, host(&self.clean[2])?],
        })
    }

    /// Makes step `step`, from 0, by the velocity that the transformer of this name predicts.
    ///
    /// # Errors
    /// [`StageError::NotFinite`]; errors of the device.
    pub(crate) fn advance(
        &mut self,
        step: usize,
        velocity: &Prediction<'_>,
        transformer: &str,
    ) -> Result<(), StageError> {
        let sigma = f64::from(self.schedule.sigmas[step]);
        copy_rows(&self.latent, &self.clean[0])?;
        velocity.add_to(&self.clean[0], -sigma, (&self.unread[1], &self.finite))?;
        // The latent that was predicted is not needed any more: its place takes the corrected one.
        if let Some(sum) = self.schedule.corrector(step) {
            let [new, last, before] = &self.clean;
            let terms = [(last, sum.clean[0]), (before, sum.clean[1]), (new, sum.new)];
            self.sum(&self.corrected, sum.latent, &terms, &self.latent)?;
        }
        std::mem::swap(&mut self.latent, &mut self.corrected);
        let sum = self.schedule.predictor(step);
        let terms = [(&self.clean[0], sum.clean[0]), (&self.clean[1], sum.clean[1])];
        self.sum(&self.corrected, sum.latent, &terms, &self.latent)?;
        copy_rows(&self.latent, &self.seen)?;
        self.clean.rotate_right(1);
        // Checking for finiteness synchronizes with the card, on purpose: a reported step has completed.
        match self.finite.is_finite()? {
            true => Ok(()),
            false => Err(StageError::NotFinite {
                component: transformer.to_owned(),
                step: step as u32 + 1,
            }),
        }
    }

    /// `out = by * latent`, and the sum of the terms.
    fn sum(
        &self,
        latent: &Tensor,
        by: f64,
        terms: &[(&Tensor, f64)],
        out: &Tensor,
    ) -> candle_core::Result<()> {
        copy_rows(latent, out)?;
        let all = std::iter::once((latent, by - 1.0)).chain(terms.iter().copied());
        for (term, factor) in all.filter(|(_, factor)| *factor != 0.0) {
            euler(out, term, factor, &self.unread[0], &self.finite)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::path::Path;

    use super::*;

    /// Steps with outputs that the reference's solver was given too.
    #[test]
    fn steps_equal_the_reference() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/wan-tiny/expected/unipc.safetensors");
        let answers: HashMap<String, Tensor> = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let on = (DType::F32, &Device::Cpu);
        let mut tried = 0;
        for (name, start) in &answers {
            let Some(name) = name.strip_suffix(".start") else {
                continue;
            };
            let parts: Vec<&str> = name.split('.').collect();
            let grid = match parts[3] {
                "authors" => Grid::Authors,
                _ => Grid::Diffusers,
            };
            let schedule = Schedule::new(grid, parts[0].parse().unwrap(), parts[1].parse().unwrap());
            let outputs = &answers[&format!("{name}.outputs")];
            let mut latent = UniPcLatent::new(start, schedule.clone(), on).unwrap();
            for step in 0..schedule.steps() {
                // Another stage goes on where one ended, after any step.
                latent = UniPcLatent::of_state(&latent.state().unwrap(), schedule.clone(), on).unwrap();
                let output = outputs.narrow(0, step, 1).unwrap().squeeze(0).unwrap();
                latent
                    .advance(
                        step,
                        &Prediction::of(&output.contiguous().unwrap()),
                        "transformer",
                    )
                    .unwrap();
            }
            let length = |x: &Tensor| {
                x.sqr()
                    .unwrap()
                    .sum_all()
                    .unwrap()
                    .to_vec0::<f32>()
                    .unwrap()
                    .sqrt()
            };
            let expected = &answers[&format!("{name}.end")];
            let apart = length(&(latent.on_host().unwrap() - expected).unwrap()) / length(expected);
            assert!(apart <= 2e-6, "{name}: {apart:e}");
            tried += 1;
        }
        assert_eq!(tried, 7);
    }

    #[test]
    fn settings_that_are_not_supported_are_named() {
        let wan = UniPcConfig {
            prediction_type: "flow_prediction".to_owned(),
            use_flow_sigmas: true,
            flow_shift: 5.0,
            ..UniPcConfig::default()
        };
        assert_eq!(wan.check(), Ok(()));
        for (config, named) in [
            (UniPcConfig::default(), "prediction_type"),
            (
                UniPcConfig {
                    class: "EulerDiscreteScheduler".to_owned(),
                    ..wan.clone()
                },
                "EulerDiscreteScheduler",
            ),
            (
                UniPcConfig {
                    use_beta_sigmas: true,
                    ..wan.clone()
                },
                "use_beta_sigmas",
            ),
            (
                UniPcConfig {
                    solver_order: 3,
                    ..wan.clone()
                },
                "solver_order is 3",
            ),
            (
                UniPcConfig {
                    flow_shift: 0.0,
                    ..wan
                },
                "flow_shift is 0",
            ),
        ] {
            let refused = config.check().unwrap_err();
            assert!(refused.contains(named), "{refused}");
        }
    }
}
