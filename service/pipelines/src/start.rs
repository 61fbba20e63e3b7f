//! The starting point of denoising.

use candle_core::{DType, Device, Tensor};

use crate::flow_match::first_step;
use crate::noise::Generator;
use crate::tensors::from_host;
use crate::{HostTensor, Request, StageError};

/// Initial state of a request's denoising.
#[derive(Debug)]
pub(crate) struct Start {
    /// Sigmas of the steps that are run, and the final zero.
    pub(crate) sigmas: Vec<f32>,
    /// f32, in host memory.
    pub(crate) latent: Tensor,
}

/// Whether a request starts from a latent, encoded or given, rather than from noise alone.
pub(crate) fn is_from_latent(request: &Request) -> bool {
    request.medium.has_start() || request.from_values
}

/// Number of steps that are run: from a latent the last ones of its schedule.
pub(crate) fn steps_run(request: &Request) -> u32 {
    let first = match is_from_latent(request) {
        true => first_step(request.steps, request.strength),
        false => 0,
    };
    request.steps.saturating_sub(first)
}

/// The initial noise of a request, mixed with a latent of the same shape if there is one: an encoded picture, or a
/// latent from the client. `get_timesteps` and `prepare_latents` of diffusers' image to image pipelines. `sigmas` are
/// those of all steps, with the final zero. Computed in host memory: a card would have to load kernels for it.
///
/// # Errors
/// [`StageError::BadInput`] if the strength leaves no step.
pub(crate) fn start(
    mut sigmas: Vec<f32>,
    request: &Request,
    shape: &[usize],
    latent: Option<&HostTensor>,
) -> Result<Start, StageError> {
    let &Request {
        steps,
        seed,
        strength,
        ..
    } = request;
    let count = shape.iter().product();
    let mut generator = Generator::new(seed);
    if request.medium.has_start() && !request.from_values {
        let _sample_of_the_encoded_start = generator.normal(count);
    }
    let noise = Tensor::from_vec(generator.normal(count), shape, &Device::Cpu)?;
    let Some(brought) = latent else {
        return Ok(Start {
            sigmas,
            latent: noise,
        });
    };
    let first = first_step(steps, strength);
    if first >= steps {
        return Err(StageError::BadInput(format!(
            "a strength of {strength} leaves none of {steps} steps"
        )));
    }
    sigmas.drain(..first as usize);
    let image = from_host(brought, "the latent", DType::F32, &Device::Cpu)?;
    let sigma = f64::from(sigmas[0]);
    let latent = ((noise * sigma)? + (image * (1.0 - sigma))?)?;
    Ok(Start { sigmas, latent })
}
