//! The model: what it needs, and how long it pretends to compute.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gpu::{ComponentTensors, LoadPlan, ScratchGuard, WeightFormat, simulated_scratch};
use residency::{Bytes, Component, ComponentId};

use super::colour::{CHANNELS, PIXELS_PER_LATENT, colour_of, encode, fill, latent_of, mean_of, read_latent};
use super::{DescribedComponent, Description};
use crate::family::{
    EncodedText, Model, Observer, Rung, StageError, StageInput, StageKind, StageOutput, StagePlan,
};
use crate::quantization::Quantization;
use crate::request::{Defaults, ImageRequest, RequestError};

/// What a component's reload is predicted to run at, in bytes a second.
const LOAD_SPEED: f64 = 25e9;

/// The longest sleep between two looks at whether anybody still wants the result.
const SLICE: Duration = Duration::from_millis(1);

/// Every size is a multiple of this.
const GRAIN: u32 = 16;

/// An opened instant model.
pub(super) struct InstantModel {
    description: Description,
    components: Vec<Component>,
    formats: Vec<Option<WeightFormat>>,
    plans: Vec<LoadPlan>,
}

/// Bytes of a component in the format that it is held in. What is made at load takes its part of bf16: half for 8 bits;
/// for nf4 half a byte for each number and 4 for each block of 64; with double quantization 1 for each block and 4 for
/// each 256 of them.
fn bytes_in(described: &DescribedComponent, format: Option<WeightFormat>) -> Bytes {
    let (numerator, denominator) = match format {
        _ if described.stored.is_some() => (1, 1),
        None | Some(WeightFormat::Gguf(_)) => (1, 1),
        Some(WeightFormat::Int8 | WeightFormat::Fp8(_)) => (1, 2),
        Some(WeightFormat::Nf4) => (9, 32),
        Some(WeightFormat::Nf4Double) => (2113, 8192),
    };
    Bytes((u128::from(described.bytes.0) * numerator / denominator) as u64)
}

impl InstantModel {
    pub(super) fn new(description: Description, quantization: &Quantization) -> InstantModel {
        let described = description.components.iter();
        let formats: Vec<Option<WeightFormat>> = described
            .clone()
            .map(|c| c.stored.or_else(|| quantization.format_of(&c.name)))
            .collect();
        let components: Vec<Component> = described
            .zip(&formats)
            .map(|(c, &format)| {
                let bytes = bytes_in(c, format);
                // What is stored so has it in its identity; what is made differs from what it was made of.
                let id = match format.filter(|_| c.stored.is_none()) {
                    Some(format) => format!("instant:{}:{format}", c.identity),
                    None => format!("instant:{}", c.identity),
                };
                Component {
                    id: ComponentId::new(id),
                    name: c.name.clone(),
                    bytes,
                    reload_seconds: bytes.0 as f64 / LOAD_SPEED,
                }
            })
            .collect();
        let plans = components.iter().map(|c| LoadPlan::Synthetic(c.bytes)).collect();
        InstantModel {
            description,
            components,
            formats,
            plans,
        }
    }

    /// Those of these components that the model has.
    fn named(&self, names: &[&str]) -> Vec<Component> {
        self.components
            .iter()
            .filter(|c| names.contains(&c.name.as_str()))
            .cloned()
            .collect()
    }

    /// Bytes for a picture of the default size, as many as one of this size takes.
    fn scaled(&self, bytes: Option<Bytes>, width: u32, height: u32) -> Bytes {
        let defaults = &self.description.defaults;
        let usual = (u128::from(defaults.width) * u128::from(defaults.height)).max(1);
        let pixels = u128::from(width) * u128::from(height);
        Bytes((u128::from(bytes.unwrap_or_default().0) * pixels / usual) as u64)
    }

    fn rungs(&self, kind: StageKind, width: u32, height: u32) -> Vec<Rung> {
        let whole = self.description.scratch.of(kind);
        let rung = |label: &str, part: u64, approximate: bool| Rung {
            label: label.to_owned(),
            scratch: Bytes(self.scaled(whole, width, height).0 / part),
            approximate,
        };
        match kind {
            // Text has one size, whatever the picture's.
            StageKind::EncodeText => {
                vec![Rung {
                    label: WHOLE.to_owned(),
                    scratch: whole.unwrap_or_default(),
                    approximate: false,
                }]
            }
            StageKind::Denoise => vec![rung(WHOLE, 1, false)],
            StageKind::EncodeImage | StageKind::Decode => {
                vec![
                    rung(WHOLE, 1, false),
                    rung("strips of 16", 2, false),
                    rung("tiles of 64", 4, true),
                ]
            }
        }
    }

    /// Denoising steps that are run: all of them from noise, the last ones from an image.
    fn steps_of(&self, request: &ImageRequest) -> u32 {
        let from_image = request.init_image.is_some();
        let part = if from_image {
            request.strength.clamp(0.0, 1.0)
        } else {
            1.0
        };
        ((request.steps as f32 * part).round() as u32).clamp(1, request.steps.max(1))
    }

    fn plan(&self, kind: StageKind, request: &ImageRequest) -> StagePlan {
        let (width, height) = (request.width, request.height);
        let components = match kind {
            StageKind::EncodeText => self.named(&["text_encoder", "text_encoder_2"]),
            StageKind::Denoise if request.preview => self.named(&["transformer", "vae"]),
            StageKind::Denoise => self.named(&["transformer"]),
            StageKind::EncodeImage | StageKind::Decode => self.named(&["vae"]),
        };
        let shape = match kind {
            StageKind::EncodeText => format!("t{}", request.max_sequence_length),
            StageKind::Denoise => format!("{width}x{height} t{}", request.max_sequence_length),
            StageKind::EncodeImage | StageKind::Decode => format!("{width}x{height}"),
        };
        let steps = if kind == StageKind::Denoise {
            self.steps_of(request)
        } else {
            1
        };
        StagePlan {
            kind,
            components,
            rungs: self.rungs(kind, width, height),
            shape,
            steps,
        }
    }

    /// What the rung really takes: the file's own prediction, unless the file says otherwise. What a plan says of it
    /// may have been learned from here.
    fn real_scratch(&self, kind: StageKind, rung: usize, request: &ImageRequest) -> Bytes {
        let Some(real) = self.description.real_scratch.of(kind) else {
            let rungs = self.rungs(kind, request.width, request.height);
            return rungs.get(rung).map_or(Bytes::ZERO, |r| r.scratch);
        };
        let part = 1_u64 << rung.min(2);
        match kind {
            StageKind::EncodeText => real,
            StageKind::Denoise | StageKind::EncodeImage | StageKind::Decode => {
                Bytes(self.scaled(Some(real), request.width, request.height).0 / part)
            }
        }
    }

    fn denoise(
        &self,
        plan: &StagePlan,
        request: &ImageRequest,
        input: &StageInput,
        observer: &mut dyn Observer,
    ) -> Result<StageOutput, StageError> {
        let text: &EncodedText = input
            .text
            .as_ref()
            .ok_or_else(|| StageError::BadInput("denoising needs encoded text".to_owned()))?;
        let init = input.latent.as_ref().map(read_latent).transpose()?;
        let colour = colour_of(text, request, init.map(|(colour, ..)| colour));
        let pretended = Duration::from_millis(self.description.steps_ms);
        for step in 1..=plan.steps {
            sleep(pretended, observer)?;
            if self.description.not_finite_at_step == Some(step) {
                return Err(StageError::NotFinite {
                    component: "transformer".to_owned(),
                    step,
                });
            }
            observer.step(step, plan.steps);
            if request.preview && observer.wants_preview() {
                let (width, height) = (request.width / 8, request.height / 8);
                observer.preview(width, height, fill(colour, width, height));
            }
        }
        Ok(StageOutput::Latent(latent_of(
            colour,
            self.latent_shape(request.width, request.height),
        )))
    }

    fn encode_image(&self, request: &ImageRequest) -> Result<StageOutput, StageError> {
        let image = request
            .init_image
            .as_ref()
            .ok_or_else(|| StageError::BadInput("encoding needs an image".to_owned()))?;
        Ok(StageOutput::Latent(latent_of(
            mean_of(image),
            self.latent_shape(request.width, request.height),
        )))
    }

    fn decode(&self, input: &StageInput) -> Result<StageOutput, StageError> {
        let latent = input
            .latent
            .as_ref()
            .ok_or_else(|| StageError::BadInput("decoding needs a latent".to_owned()))?;
        let (colour, width, height) = read_latent(latent)?;
        Ok(StageOutput::Picture {
            width,
            height,
            rgb: fill(colour, width, height).into(),
        })
    }
}

/// The rung that is not cut into pieces.
const WHOLE: &str = "whole";

/// Activations of the simulated card that runs the stage; on another card it needs none.
fn take_scratch(bytes: Bytes, kind: StageKind) -> Result<Option<ScratchGuard>, StageError> {
    simulated_scratch(bytes).map_err(|_| StageError::OutOfMemory { stage: kind.name() })
}

/// Sleeps in slices, and ends early when nobody wants the result any more.
fn sleep(pretended: Duration, observer: &dyn Observer) -> Result<(), StageError> {
    let until = std::time::Instant::now() + pretended;
    loop {
        if observer.cancelled() {
            return Err(StageError::Cancelled);
        }
        let left = until.saturating_duration_since(std::time::Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(SLICE));
    }
}

impl Model for InstantModel {
    fn family(&self) -> &'static str {
        "instant"
    }

    fn defaults(&self) -> Defaults {
        Defaults::from(&self.description.defaults)
    }

    fn components(&self) -> &[Component] {
        &self.components
    }

    fn load_plan(&self, component_name: &str) -> Option<&LoadPlan> {
        let index = self.components.iter().position(|c| c.name == component_name)?;
        self.plans.get(index)
    }

    fn format_of(&self, component_name: &str) -> Option<WeightFormat> {
        let index = self.components.iter().position(|c| c.name == component_name)?;
        *self.formats.get(index)?
    }

    /// None: the identity stands in the model's file.
    fn files_of(&self, _component_name: &str) -> Vec<Arc<Path>> {
        Vec::new()
    }

    fn validate(&self, request: &ImageRequest) -> Result<(), Vec<RequestError>> {
        let mut wrong = Vec::new();
        let mut require = |holds: bool, field: &str, problem: &str| {
            if !holds {
                wrong.push(RequestError {
                    field: field.to_owned(),
                    problem: problem.to_owned(),
                });
            }
        };
        let size_is_right = |pixels: u32| (GRAIN..=8192).contains(&pixels) && pixels.is_multiple_of(GRAIN);
        let size = "must be a multiple of 16 between 16 and 8192";
        require(size_is_right(request.width), "width", size);
        require(size_is_right(request.height), "height", size);
        require(
            (1..=200).contains(&request.steps),
            "steps",
            "must be between 1 and 200",
        );
        require(
            request.guidance.is_finite() && request.guidance >= 0.0,
            "guidance",
            "must not be negative",
        );
        let tokens = (1..=512).contains(&request.max_sequence_length);
        require(tokens, "max_sequence_length", "must be between 1 and 512");
        if let Some(image) = &request.init_image {
            let strength = request.strength > 0.0 && request.strength <= 1.0;
            require(strength, "strength", "must be over 0 and at most 1");
            let same_size = (image.width, image.height) == (request.width, request.height);
            let all_there = image.rgb.len() == image.width as usize * image.height as usize * 3;
            require(
                same_size && all_there,
                "init_image",
                "must have the size of the picture",
            );
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    fn stages(&self, request: &ImageRequest) -> Vec<StagePlan> {
        let from_image = request.init_image.is_some();
        let asked = StageKind::ALL
            .into_iter()
            .filter(|&kind| kind != StageKind::EncodeImage || from_image);
        asked.map(|kind| self.plan(kind, request)).collect()
    }

    fn lone_stage(&self, kind: StageKind, width: u32, height: u32) -> StagePlan {
        let request = ImageRequest {
            width,
            height,
            ..self.defaults().request()
        };
        self.plan(kind, &request)
    }

    fn text_key(&self, request: &ImageRequest) -> Result<String, RequestError> {
        let prompt = blake3::hash(request.prompt.as_bytes()).to_hex();
        Ok(format!("instant:{prompt}:{}", request.max_sequence_length))
    }

    fn latent_shape(&self, width: u32, height: u32) -> Vec<usize> {
        let numbers = |pixels: u32| pixels as usize / PIXELS_PER_LATENT;
        vec![1, CHANNELS, numbers(height), numbers(width)]
    }

    fn run(
        &self,
        plan: &StagePlan,
        rung: usize,
        request: &ImageRequest,
        input: &StageInput,
        tensors: &dyn Fn(&str) -> Result<Arc<ComponentTensors>, StageError>,
        _device: &candle_core::Device,
        observer: &mut dyn Observer,
    ) -> Result<StageOutput, StageError> {
        // Kept to the end, as a real family's tensors are.
        let _resident: Vec<Arc<ComponentTensors>> = plan
            .components
            .iter()
            .map(|c| tensors(&c.name))
            .collect::<Result<_, _>>()?;
        let _scratch = take_scratch(self.real_scratch(plan.kind, rung, request), plan.kind)?;
        if observer.cancelled() {
            return Err(StageError::Cancelled);
        }
        assert_ne!(
            self.description.panic_at,
            Some(plan.kind),
            "the model's file asks for this panic"
        );
        match plan.kind {
            StageKind::EncodeText => Ok(StageOutput::Text(encode(request))),
            StageKind::EncodeImage => self.encode_image(request),
            StageKind::Denoise => self.denoise(plan, request, input, observer),
            StageKind::Decode => self.decode(input),
        }
    }
}
