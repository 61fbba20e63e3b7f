//! Editing: FLUX.1 Kontext, which takes a reference picture, and FLUX.1 Fill, which takes a masked picture and its mask.
//!
//! References are diffusers' `FluxKontextPipeline` and `FluxFillPipeline`. A Kontext reference is encoded without a draw, and
//! follows the generated picture in the sequence. Fill's masked picture is encoded with a separate draw, after the draws of the
//! start and of the noise.

use candle_core::{Device, Tensor};
use model::bounds::PIXELS_PER_TOKEN;
use model::{Field, Reads};

use super::config::{MASK_WIDTH, TransformerConfig};
use super::control_net::{OpenControlNet, acts_in};
use super::model::FluxModel;
use super::transformer::pack;
use crate::start::{changes, steps_run};
use crate::{ControlUse, Image, InitImage, Request, RequestError, StageError, StagePlan, ValueShape};

/// Names of the stages. That of a control picture is followed by its number.
pub(super) const ENCODE_CONTROL: &str = "encode_control_";
pub(super) const ENCODE_REFERENCE: &str = "encode_reference";
pub(super) const ENCODE_MASKED: &str = "encode_masked";

/// Name of the reference's latent, f32 `[1, channels, h, w]` in the transformer's scale.
pub(super) const REFERENCE: &str = "reference";
/// Name of a control picture's latent, of the shape of the latent, followed by its number.
pub(super) const CONTROL: &str = "control_";
/// Name of the masked picture's latent, of the shape of the latent.
pub(super) const MASKED: &str = "masked";

/// Pixels of a latent's cell along each axis.
const PIXELS_PER_CELL: usize = 8;

/// The inputs from which a checkpoint generates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    /// A prompt, and possibly a picture to start from.
    Plain,
    /// A prompt, and possibly a reference picture.
    Kontext,
    /// A prompt, a picture, and a mask of its part that changes.
    Fill,
}

impl Variant {
    /// By the pipeline's class, the name of a single file, and the transformer's inputs. A single file of Kontext has the
    /// tensors of dev.
    pub(super) fn of(class: &str, file_name: &str, config: &TransformerConfig) -> Variant {
        let is_kontext = |name: &str| name.to_ascii_lowercase().contains("kontext");
        match config.takes_mask() {
            true => Variant::Fill,
            false if is_kontext(class) || is_kontext(file_name) => Variant::Kontext,
            false => Variant::Plain,
        }
    }

    /// The optional fields of a request that the model reads.
    pub(super) fn reads(self) -> Reads {
        const EVERY: Reads = Reads::of(&[
            Field::InitImage,
            Field::InitLatent,
            Field::Mask,
            Field::Controls,
            Field::Adapters,
            Field::StepCache,
            Field::Fp8Attention,
        ]);
        const PLAIN: Reads = EVERY.and(&[Field::NegativePrompt, Field::TrueGuidance]);
        match self {
            Variant::Plain => PLAIN,
            Variant::Kontext => PLAIN.and(&[Field::References]),
            // The reference pipeline of Fill has no second pass.
            Variant::Fill => EVERY,
        }
    }
}

/// Width and height of the pictures that Kontext was trained on (`PREFERRED_KONTEXT_RESOLUTIONS`).
const PREFERRED: [(u32, u32); 17] = [
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
    (1024, 1024),
    (1104, 944),
    (1184, 880),
    (1248, 832),
    (1328, 800),
    (1392, 752),
    (1456, 720),
    (1504, 688),
    (1568, 672),
];

/// The preferred size whose aspect is closest to that of a picture of this size, in whole tokens.
pub(super) fn preferred_size(width: u32, height: u32) -> Result<(u32, u32), RequestError> {
    let cut = |side: u32| side / PIXELS_PER_TOKEN * PIXELS_PER_TOKEN;
    let (width, height) = (cut(width), cut(height));
    if width == 0 || height == 0 {
        let problem = format!("one has a side of less than {PIXELS_PER_TOKEN} pixels");
        return Err(RequestError::new("references", problem));
    }
    let aspect = f64::from(width) / f64::from(height);
    let apart = |&(width, height): &(u32, u32)| (aspect - f64::from(width) / f64::from(height)).abs();
    let closest = PREFERRED.into_iter().min_by(|a, b| apart(a).total_cmp(&apart(b)));
    Ok(closest.unwrap_or((1024, 1024)))
}

impl FluxModel {
    /// The ControlNets of a request that act in at least one of its steps, by their numbers. The others are not needed, but
    /// their random draws are still made.
    pub(super) fn controls_of<'a, 'i: 'a>(
        &'a self,
        request: &Request,
        image: &'i Image,
    ) -> impl Iterator<Item = (usize, &'i ControlUse, &'a OpenControlNet)> + use<'a, 'i> {
        let net = |each: &ControlUse| self.control_nets.iter().find(|net| net.name == each.name);
        let steps = self.steps_of(request) as usize;
        let acts =
            move |each: &ControlUse| each.scale != 0.0 && (0..steps).any(|step| acts_in(each, step, steps));
        let controls = image.controls.iter().enumerate();
        let acting = controls.filter(move |(_, each)| acts(each));
        acting.filter_map(move |(number, each)| Some((number, each, net(each)?)))
    }

    /// Problems of a request's ControlNets.
    pub(super) fn control_problem(&self, image: &Image) -> Option<RequestError> {
        for (index, each) in image.controls.iter().enumerate() {
            let field = |name: &str| format!("controls[{index}].{name}");
            let Some(net) = self.control_nets.iter().find(|net| net.name == each.name) else {
                let problem = format!("{} is not attached to the model", each.name);
                return Some(RequestError::new(field("id"), problem));
            };
            let modes = net.config.num_mode;
            if let Some(modes) = modes
                && each.mode.is_none_or(|mode| mode as usize >= modes)
            {
                let (name, last) = (&each.name, modes.saturating_sub(1));
                let problem = match each.mode {
                    None => format!("is missing: {name} is a union ControlNet, whose modes are 0 to {last}"),
                    Some(mode) => format!("is {mode}; the modes of {name} are 0 to {last}"),
                };
                return Some(RequestError::new(field("mode"), problem));
            }
        }
        None
    }

    /// The stages that encode the pictures of an edit.
    pub(super) fn editing_stages(&self, request: &Request, image: &Image) -> Vec<StagePlan> {
        let autoencoder = self.autoencoder();
        let controls = self.controls_of(request, image).map(|(i, ..)| {
            let (stage, value) = (format!("{ENCODE_CONTROL}{i}"), format!("{CONTROL}{i}"));
            autoencoder.encode_stage_named(&stage, &value, image)
        });
        let mut stages: Vec<StagePlan> = controls.collect();
        if self.variant == Variant::Fill {
            stages.push(autoencoder.encode_stage_named(ENCODE_MASKED, MASKED, image));
        }
        let references = image.references.iter();
        stages.extend(
            references.map(|reference| autoencoder.reference_stage(ENCODE_REFERENCE, REFERENCE, reference)),
        );
        stages
    }

    /// Values of the stages of [`FluxModel::editing_stages`].
    pub(super) fn editing_values(&self, request: &Request, image: &Image) -> Vec<ValueShape> {
        let latent = |name: &str, image: &Image| {
            let shape = self.autoencoder().latent(image).shape;
            ValueShape::new(name, shape)
        };
        let masked = (self.variant == Variant::Fill).then(|| latent(MASKED, image));
        let references = image.references.iter();
        let references = references.map(|r| latent(REFERENCE, &Image::of(r.width, r.height)));
        let controls = self.controls_of(request, image);
        let controls = controls.map(|(i, ..)| latent(&format!("{CONTROL}{i}"), image));
        masked.into_iter().chain(references).chain(controls).collect()
    }

    /// Whether sampling starts from the latent of a request's picture. Fill does not start from it if it runs the whole
    /// schedule.
    pub(super) fn starts_from_latent(&self, request: &Request) -> bool {
        let is_whole = request.strength >= 1.0 && !request.from_values;
        crate::start::is_from_latent(request) && !(self.variant == Variant::Fill && is_whole)
    }

    /// Steps that are run.
    pub(super) fn steps_of(&self, request: &Request) -> u32 {
        match self.starts_from_latent(request) {
            true => steps_run(request),
            false => request.steps,
        }
    }

    /// Tokens of reference pictures.
    pub(super) fn reference_tokens(&self, image: &Image) -> usize {
        let tokens =
            |r: &InitImage| (r.width / PIXELS_PER_TOKEN) as usize * (r.height / PIXELS_PER_TOKEN) as usize;
        image.references.iter().map(tokens).sum()
    }
}

/// Fill's conditioning, f32 `[1, tokens, width + 256]` in host memory: the packed masked latent, and the mask's pixels, 8 by 8
/// of each cell as channels, packed alike.
///
/// # Errors
/// When shapes do not match.
pub(super) fn fill_conditioning(image: &Image, masked: &Tensor) -> Result<Tensor, StageError> {
    let (width, height) = (image.width as usize, image.height as usize);
    let (h, w) = (height / PIXELS_PER_CELL, width / PIXELS_PER_CELL);
    let cell = PIXELS_PER_CELL;
    let mut pixels = vec![0f32; cell * cell * h * w];
    for y in 0..height {
        for x in 0..width {
            if changes(image.mask.as_ref(), y * width + x) {
                let channel = (y % cell) * cell + x % cell;
                pixels[(channel * h + y / cell) * w + x / cell] = 1.0;
            }
        }
    }
    let mask = Tensor::from_vec(pixels, (1, cell * cell, h, w), &Device::Cpu)?;
    let mask = pack(&mask)?;
    debug_assert_eq!(mask.dim(2).unwrap_or_default(), MASK_WIDTH);
    Ok(Tensor::cat(&[&pack(masked)?, &mask], 2)?)
}
