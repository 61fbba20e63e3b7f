//! A model without numbers, and what is asked of it.

use std::path::Path;
use std::sync::Arc;

use candle_core::Device;
use engine::job::{Generate, JobOptions, JobSpec, JobWork};
use engine::library::Entry;
use gpu::{ComponentTensors, LoadPlan, WeightFormat};
use pipelines::{
    Defaults, Family, HostTensor, HostType, ImageRequest, Model, ModelError, Observer, Precision, Preset,
    Quantization, RequestError, Rung, StageError, StageInput, StageKind, StageOutput, StagePlan,
};
use residency::{Bytes, Component, ComponentId};

/// Capacity of every card.
pub const CARD: Bytes = Bytes::gib(24);

/// A byte for each two of bf16, or for each four: near enough.
fn quantized(mut component: Component, quantization: &Quantization) -> Component {
    if let Some(format) = quantization.format_of(&component.name) {
        let parts = match format {
            WeightFormat::Nf4 | WeightFormat::Nf4Double => 4,
            _ => 2,
        };
        component.bytes = Bytes(component.bytes.0 / parts);
        component.id = ComponentId::new(format!("{}:{format}", component.id));
    }
    component
}

/// All models share one T5; `a` has its own transformer and VAE, and so on. The transformers of `small` and `large` are that.
pub struct FakeModel {
    components: Vec<Component>,
}

fn component(id: &str, name: &str, gib: u64) -> Component {
    let reload_seconds = gib as f64;
    Component {
        id: ComponentId::new(id),
        name: name.into(),
        bytes: Bytes::gib(gib),
        reload_seconds,
    }
}

impl FakeModel {
    pub fn named(name: &str, quantization: &Quantization) -> FakeModel {
        let transformer_gib = match name {
            "small" => 2,
            "large" => 22,
            _ => 12,
        };
        let components = vec![
            component("path:/t5#text_encoder_2@F32", "text_encoder_2", 4),
            component(
                &format!("path:/{name}#transformer@F32"),
                "transformer",
                transformer_gib,
            ),
            component(&format!("path:/{name}#vae@F32"), "vae", 1),
        ];
        let components = components.into_iter().map(|c| quantized(c, quantization));
        FakeModel {
            components: components.collect(),
        }
    }

    fn plan(&self, kind: StageKind, component: usize, rungs: Vec<Rung>, shape: String) -> StagePlan {
        StagePlan {
            kind,
            components: vec![self.components[component].clone()],
            rungs,
            shape,
            steps: 1,
        }
    }
}

fn rung(label: &str, bytes: u64) -> Rung {
    Rung {
        label: label.into(),
        scratch: Bytes(bytes),
        approximate: false,
    }
}

impl Model for FakeModel {
    fn family(&self) -> &'static str {
        "fake"
    }
    fn defaults(&self) -> Defaults {
        Defaults {
            steps: 4,
            guidance: 0.0,
            max_sequence_length: 16,
            width: 1024,
            height: 1024,
        }
    }
    fn components(&self) -> &[Component] {
        &self.components
    }
    fn load_plan(&self, _component_name: &str) -> Option<&LoadPlan> {
        None
    }
    fn files_of(&self, _component_name: &str) -> Vec<Arc<Path>> {
        Vec::new()
    }
    fn validate(&self, request: &ImageRequest) -> Result<(), Vec<RequestError>> {
        if request.width == 0 {
            return Err(vec![RequestError {
                field: "width".into(),
                problem: "is 0".into(),
            }]);
        }
        Ok(())
    }
    fn stages(&self, request: &ImageRequest) -> Vec<StagePlan> {
        let pixels = u64::from(request.width) * u64::from(request.height);
        let shape = format!("{}x{}", request.width, request.height);
        let whole = |bytes| vec![rung("whole", bytes)];
        let mut stages = vec![self.plan(StageKind::EncodeText, 0, whole(1 << 20), "t16".into())];
        if request.init_image.is_some() {
            stages.push(self.lone_stage(StageKind::EncodeImage, request.width, request.height));
        }
        stages.push(StagePlan {
            steps: request.steps,
            ..self.plan(StageKind::Denoise, 1, whole(pixels << 10), shape)
        });
        stages.push(self.lone_stage(StageKind::Decode, request.width, request.height));
        stages
    }
    fn lone_stage(&self, kind: StageKind, width: u32, height: u32) -> StagePlan {
        let pixels = u64::from(width) * u64::from(height);
        let rungs = vec![rung("whole", pixels << 11), rung("strips", pixels << 10)];
        self.plan(kind, 2, rungs, format!("{width}x{height}"))
    }
    fn text_key(&self, request: &ImageRequest) -> Result<String, RequestError> {
        Ok(request.prompt.clone())
    }
    fn latent_shape(&self, width: u32, height: u32) -> Vec<usize> {
        vec![1, 1, height as usize / 8, width as usize / 8]
    }
    fn run(
        &self,
        _plan: &StagePlan,
        _rung: usize,
        _request: &ImageRequest,
        _input: &StageInput,
        _tensors: &dyn Fn(&str) -> Result<Arc<ComponentTensors>, StageError>,
        _device: &Device,
        _observer: &mut dyn Observer,
    ) -> Result<StageOutput, StageError> {
        Err(StageError::Cancelled)
    }
}

pub struct FakeFamily;

impl Family for FakeFamily {
    fn name(&self) -> &'static str {
        "fake"
    }
    fn open(&self, path: &Path, precision: &Precision) -> Result<Option<Arc<dyn Model>>, ModelError> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("a");
        if name == "broken" {
            let problem = "it is broken".to_owned();
            return Err(ModelError::Damaged {
                path: path.to_owned(),
                problem,
            });
        }
        Ok(Some(Arc::new(FakeModel::named(name, &precision.quantization))))
    }
}

pub fn entry(name: &str) -> Arc<Entry> {
    Arc::new(Entry {
        key: name.into(),
        id: name.into(),
        revision: String::new(),
        path: format!("/models/{name}").into(),
        quantization: pipelines::Quantization::NONE,
    })
}

pub fn request(prompt: &str) -> ImageRequest {
    ImageRequest {
        prompt: prompt.into(),
        width: 1024,
        height: 1024,
        steps: 4,
        guidance: 0.0,
        seed: 7,
        max_sequence_length: 16,
        init_image: None,
        strength: 0.6,
        preview: false,
    }
}

/// What a refusal says of the quantizations of a model in full precision that would all fit, in its words.
pub const REDUCTIONS: [&str; 4] = [
    "quantization 8-bit (int8)",
    "quantization text_encoder_2=fp8,transformer=fp8",
    "quantization 4-bit (nf4)",
    "quantization text_encoder_2=nf4-double,transformer=nf4-double",
];

/// A specification's model, with some of its components quantized.
pub fn with_formats(mut spec: JobSpec, formats: &[(&str, &str)]) -> JobSpec {
    let quantization = Quantization::of(Preset::Full, formats.iter().copied()).unwrap();
    spec.entry = Arc::new(spec.entry.quantized(quantization));
    spec
}

/// A picture of model `name` for a client; each prompt is encoded anew unless it was there before.
pub fn picture(name: &str, client: &str, prompt: &str) -> JobSpec {
    let generate = Generate {
        request: request(prompt),
        count: 1,
        keep_latent: false,
        latent_only: false,
        preview_interval_ms: 0,
        init_latent: None,
    };
    let options = JobOptions {
        client: client.into(),
        ..JobOptions::default()
    };
    JobSpec {
        options,
        entry: entry(name),
        work: JobWork::Generate(generate),
    }
}

/// A job of one stage.
pub fn load(name: &str, client: &str, components: &[&str]) -> JobSpec {
    let components = components.iter().map(|c| (*c).to_owned()).collect();
    let options = JobOptions {
        client: client.into(),
        ..JobOptions::default()
    };
    JobSpec {
        options,
        entry: entry(name),
        work: JobWork::Load {
            components,
            replace: None,
            prove: false,
        },
    }
}

/// A load that takes another model's place.
pub fn swap(new: &str, old: &str, client: &str) -> JobSpec {
    let mut spec = load(new, client, &[]);
    spec.work = JobWork::Load {
        components: Vec::new(),
        replace: Some(entry(old)),
        prove: false,
    };
    spec
}

pub fn latent() -> HostTensor {
    HostTensor {
        dtype: HostType::F32,
        shape: vec![1, 1, 128, 128],
        data: vec![0; 4 * 128 * 128].into(),
    }
}
