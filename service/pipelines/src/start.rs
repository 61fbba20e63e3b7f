//! The starting point of denoising.

use candle_core::{DType, Device, Tensor};
use model::first_step;

use crate::noise::Generator;
use crate::tensors::from_host;
use crate::{HostTensor, Image, Mask, Medium, Request, StageError};

/// Initial state of a request's denoising.
#[derive(Debug)]
pub(crate) struct Start {
    /// Sigmas of the steps that are run, and the final zero.
    pub(crate) sigmas: Vec<f32>,
    /// f32, in host memory.
    pub(crate) latent: Tensor,
    /// The unmasked part of the latent; `None` without a mask.
    pub(crate) kept: Option<Kept>,
}

/// The unmasked part of a latent, as in diffusers' inpainting pipelines. All f32, in host memory.
#[derive(Debug)]
pub(crate) struct Kept {
    /// 1 where the latent changes, else 0; between them where the cell changes in part.
    pub(crate) mask: Tensor,
    /// The noise that the start is mixed with.
    pub(crate) noise: Tensor,
    /// The latent of the start.
    pub(crate) image: Tensor,
}

/// How a family starts from a picture.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartRule {
    /// Draws of other stages before those of the start and of the noise.
    pub(crate) draws_before: usize,
    /// Whether the encoded start is a draw from its distribution, rather than its mode.
    pub(crate) is_drawn: bool,
    /// How the mask is read.
    pub(crate) cells: MaskCells,
}

impl StartRule {
    /// A start that is drawn, as in most families.
    pub(crate) fn drawn_after(draws_before: usize) -> StartRule {
        StartRule {
            draws_before,
            is_drawn: true,
            cells: MaskCells::TopLeft,
        }
    }
}

/// The pixels of a mask that decide over a cell of the latent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MaskCells {
    /// The top left one: the nearest to it in `torch.nn.functional.interpolate`.
    TopLeft,
    /// The mean of the four in the middle: `bilinear` in the same function. With two of them set, the cell changes by half.
    Middle,
}

impl Kept {
    /// The unmasked part with every tensor rearranged.
    ///
    /// # Errors
    /// Errors of `arrange`.
    pub(crate) fn arranged(
        &self,
        arrange: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Kept> {
        Ok(Kept {
            mask: arrange(&self.mask)?.contiguous()?,
            noise: arrange(&self.noise)?.contiguous()?,
            image: arrange(&self.image)?.contiguous()?,
        })
    }

    /// The latent after a step to `sigma`, with the unmasked part at that noise.
    ///
    /// # Errors
    /// When shapes do not match.
    pub(crate) fn blended(&self, latent: &Tensor, sigma: f32) -> candle_core::Result<Tensor> {
        let sigma = f64::from(sigma);
        let kept = ((&self.noise * sigma)? + (&self.image * (1.0 - sigma))?)?;
        let latent = latent.to_device(&Device::Cpu)?;
        (self.mask.affine(-1.0, 1.0)? * kept)? + (&self.mask * latent)?
    }
}

/// The cells of a mask, `[1, channels, h, w]` of 0 to 1, for a latent of this shape.
pub(crate) fn cells(mask: &Mask, by: MaskCells, shape: &[usize]) -> candle_core::Result<Tensor> {
    let &[_, channels, h, w] = shape else {
        candle_core::bail!("a mask for a latent of shape {shape:?}");
    };
    let (width, height) = (mask.width as usize, mask.height as usize);
    let changes = |y: usize, x: usize| {
        let grey = mask.grey.get(y * width + x);
        f32::from(u8::from(grey.is_some_and(|grey| *grey >= CHANGES)))
    };
    let cell = |row: usize, column: usize| match by {
        MaskCells::TopLeft => changes(row * height / h, column * width / w),
        MaskCells::Middle => {
            let middle = |at: usize, side: usize, cells: usize| (2 * at + 1) * side / (2 * cells);
            let (y, x) = (middle(row, height, h), middle(column, width, w));
            let rows = [y.saturating_sub(1), y].into_iter();
            let pixels = rows.flat_map(|y| [(y, x.saturating_sub(1)), (y, x)]);
            pixels.map(|(y, x)| changes(y, x)).sum::<f32>() / 4.0
        }
    };
    let cells: Vec<f32> = (0..h)
        .flat_map(|row| (0..w).map(move |column| cell(row, column)))
        .collect();
    Tensor::from_vec(cells, (1, 1, h, w), &Device::Cpu)?
        .broadcast_as((1, channels, h, w))?
        .contiguous()
}

/// The least grey of a mask's pixel that changes.
pub(crate) const CHANGES: u8 = 128;

/// The masked picture, f32 `[1, 3, height, width]` of -1 to 1: 0 in the part that changes, and everywhere without a picture. In
/// host memory.
pub(crate) fn masked_picture(image: &Image) -> candle_core::Result<Tensor> {
    let (width, height) = (image.width as usize, image.height as usize);
    let mut picture = vec![0f32; 3 * width * height];
    if let Some(init) = &image.init_image {
        for (place, pixel) in init.rgb.chunks_exact(3).enumerate() {
            if changes(image.mask.as_ref(), place) {
                continue;
            }
            for (channel, &byte) in pixel.iter().enumerate() {
                picture[channel * width * height + place] = 2.0 * (f32::from(byte) / 255.0) - 1.0;
            }
        }
    }
    Tensor::from_vec(picture, (1, 3, height, width), &Device::Cpu)
}

/// Whether a pixel changes; without a mask, all do.
pub(crate) fn changes(mask: Option<&Mask>, place: usize) -> bool {
    mask.is_none_or(|mask| mask.grey.get(place).is_none_or(|grey| *grey >= CHANGES))
}

/// Whether a request starts from a latent, encoded or supplied by the client, rather than from noise alone.
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

/// The initial noise of a request, mixed with a latent of the same shape if there is one: an encoded picture, or a latent from
/// the client. `get_timesteps` and `prepare_latents` of diffusers' image to image pipelines. `sigmas` are those of all steps,
/// with the final zero. `rule` says which draws precede that of the noise.
/// Computed in host memory: a card would have to load kernels for it.
///
/// # Errors
/// [`StageError::BadInput`] if the strength leaves no step.
pub(crate) fn start(
    mut sigmas: Vec<f32>,
    request: &Request,
    shape: &[usize],
    latent: Option<&HostTensor>,
    rule: StartRule,
) -> Result<Start, StageError> {
    let &Request {
        steps,
        seed,
        strength,
        ..
    } = request;
    let count = shape.iter().product();
    let mut generator = Generator::new(seed);
    let draws_start = rule.is_drawn && request.medium.has_start() && !request.from_values;
    for _ in 0..rule.draws_before + usize::from(draws_start) {
        let _sample_of_what_was_encoded = generator.normal(count);
    }
    let noise = Tensor::from_vec(generator.normal(count), shape, &Device::Cpu)?;
    let Some(encoded) = latent else {
        return Ok(Start {
            sigmas,
            latent: noise,
            kept: None,
        });
    };
    let first = first_step(steps, strength);
    if first >= steps {
        return Err(StageError::BadInput(format!(
            "a strength of {strength} leaves none of {steps} steps"
        )));
    }
    sigmas.drain(..first as usize);
    let image = from_host(encoded, "the latent", DType::F32, &Device::Cpu)?;
    let sigma = f64::from(sigmas[0]);
    let latent = ((&noise * sigma)? + (&image * (1.0 - sigma))?)?;
    let mask = match &request.medium {
        Medium::Image(picture) => picture.mask.as_ref(),
        Medium::Video(_) | Medium::Audio(_) => None,
    };
    let kept = mask.map(|mask| -> Result<Kept, StageError> {
        Ok(Kept {
            mask: cells(mask, rule.cells, shape)?,
            noise,
            image,
        })
    });
    Ok(Start {
        sigmas,
        latent,
        kept: kept.transpose()?,
    })
}
