//! A model without weights, and requests for it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::DType;
use engine::job::{Call, JobOptions, JobSpec, JobWork, Run, Start};
use engine::library::Entry;
use gpu::{CheckpointFile, LoadPlan, WeightFormat};
use model::{
    AdapterFile, AdapterKind, AdapterUse, Field, Formats, HostTensor, HostType, Image, Medium, Memo, Model,
    ModelError, ModelParts, Observer, Passes, Precision, Preset, PreviewNeed, Quantization, Reads, Request,
    RequestError, Role, Rung, SharedPass, StageError, StagePlan, StageRun, StrengthCurve, ValueShape, Values,
};
use pipelines::Family;
use residency::{Bytes, Component, ComponentId};

/// Capacity of every card.
pub const CARD: Bytes = Bytes::gib(24);

/// One byte per two of bf16, or per four: close enough.
fn quantized(mut component: Component, formats: &Formats) -> Component {
    if let Some(format) = formats.of(&component.name) {
        let parts = match format {
            WeightFormat::Nf4 | WeightFormat::Nf4Double => 4,
            _ => 2,
        };
        component.bytes = Bytes(component.bytes.0 / parts);
        component.id = ComponentId::new(format!("{}:{format}", component.id));
    }
    component
}

/// All models share one T5; `a` has its own transformer and VAE, and so on. The transformers of `small` and `large`
/// differ in size.
pub struct FakeModel(ModelParts);

/// Components that presets quantize.
const LARGE: [&str; 2] = ["transformer", "text_encoder_2"];

fn component(id: &str, name: &str, gib: u64) -> Component {
    let reload_seconds = gib as f64;
    Component {
        id: ComponentId::new(id),
        name: name.into(),
        bytes: Bytes::gib(gib),
        reload_seconds,
        parts: residency::Parts::default(),
    }
}

impl FakeModel {
    pub fn named(name: &str, quantization: &Quantization) -> FakeModel {
        let precision = Precision {
            quantization: quantization.clone(),
            ..Precision::full(DType::F32)
        };
        let defaults = Request::of(Medium::Image(Image::of(1024, 1024)), 4, 0.0, 16);
        let mut parts = ModelParts::new("fake", defaults, &LARGE, &precision);
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
        let formats = quantization.formats(&LARGE);
        for component in components.into_iter().map(|c| quantized(c, &formats)) {
            let plan = LoadPlan::synthetic(component.bytes);
            parts.push(component, plan, Vec::new());
        }
        FakeModel(parts)
    }

    fn stage(&self, name: &str, role: Role, component: usize, rungs: Vec<Rung>, shape: String) -> StagePlan {
        StagePlan {
            name: name.into(),
            role,
            components: vec![self.components()[component].name.clone()],
            rungs,
            shape,
            steps: 1,
            takes: Vec::new(),
            gives: Vec::new(),
            per_item: true,
            memo: None,
            section: None,
            shared: None,
            passes: Passes::default(),
            reads_media: true,
            preview: None,
        }
    }

    /// The stage that samples.
    fn denoise(&self, request: &Request, rungs: Vec<Rung>, shape: String) -> StagePlan {
        let mut stage = self.stage("denoise", Role::Sample, 1, rungs, shape);
        stage.passes = Passes::of(SAMPLE_FLOPS);
        let adapters = request.adapters.iter().map(|each| component_of(&each.name));
        stage.components.extend(adapters);
        stage
    }

    fn of_vae(&self, name: &str, role: Role, image: &Image) -> StagePlan {
        let pixels = u64::from(image.width) * u64::from(image.height);
        let rungs = vec![rung("whole", pixels << 11), rung("strips", pixels << 10)];
        let shape = format!("{}x{}", image.width, image.height);
        self.stage(name, role, 2, rungs, shape)
    }
}

/// The prompt that is encoded anew for each item.
pub const EACH_ITEM: &str = "each item";

/// Operations of the stage that samples.
pub const SAMPLE_FLOPS: u64 = 10_000_000_000_000;

/// Scratch of each further stage in a pass.
pub const SCRATCH_EACH: Bytes = Bytes::gib(1);

/// Scratch of each stage in a pass of several sets of adapters.
pub const SCRATCH_OF_SET: Bytes = Bytes::mib(256);

/// Bytes of the copy of a weight for a set of adapters.
pub const COPY: Bytes = Bytes::gib(1);

/// Name of the component of an adapter, of a GiB.
pub fn component_of(adapter: &str) -> String {
    format!("adapter:{adapter}:transformer")
}

/// A specification's model with these adapters, all of which the request uses.
pub fn with_adapters(mut spec: JobSpec, adapters: &[&str]) -> JobSpec {
    let file = |name: &&str| AdapterFile {
        name: (*name).to_owned(),
        path: format!("/adapters/{name}").into(),
        kind: AdapterKind::Lora,
        ignores_unknown: false,
    };
    let one = |name: &&str| AdapterUse {
        name: (*name).to_owned(),
        strength: StrengthCurve::constant(1.0).unwrap(),
        text_strength: 0.0,
    };
    spec.entry = Arc::new(spec.entry.with_adapters(adapters.iter().map(file).collect()));
    run_of(&mut spec).request.adapters = adapters.iter().map(one).collect();
    spec
}

/// One layer is copied for adapters whose names begin so, of [`COPY`] bytes.
fn copied(request: &Request) -> BTreeMap<String, Bytes> {
    let copied = request
        .adapters
        .iter()
        .filter(|each| each.name.starts_with("copied"));
    copied.map(|_| ("layer".to_owned(), COPY)).collect()
}

fn shared(request: &Request, width: u32, height: u32) -> Option<SharedPass> {
    (request.slots > 1).then(|| SharedPass {
        key: format!("{width}x{height}"),
        adapters: (request.adapters.iter())
            .map(|each| format!("{}*{}", each.name, each.strength.first()))
            .collect::<Vec<_>>()
            .join(","),
        slots: request.slots,
        scratch_each: SCRATCH_EACH,
        scratch_of_set: SCRATCH_OF_SET,
        copies: copied(request),
    })
}

fn rung(label: &str, bytes: u64) -> Rung {
    Rung {
        label: label.into(),
        scratch: Bytes(bytes),
        approximate: false,
        from_host: Vec::new(),
        copies: Vec::new(),
    }
}

impl Model for FakeModel {
    fn parts(&self) -> &ModelParts {
        &self.0
    }
    fn with_adapters(&self, files: &[AdapterFile]) -> Result<Arc<dyn Model>, ModelError> {
        let mut parts = self.0.clone();
        for file in files {
            let id = format!("path:{}#adapter@F32", file.path.display());
            let component = component(&id, &component_of(&file.name), 1);
            let plan = LoadPlan::synthetic(component.bytes);
            parts.push(component, plan, Vec::new());
        }
        Ok(Arc::new(FakeModel(parts)))
    }
    fn reads(&self) -> Reads {
        Reads::of(&[
            Field::InitImage,
            Field::InitLatent,
            Field::Mask,
            Field::Adapters,
            Field::Cards,
        ])
    }
    fn stages_of(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let image = request.image().map_err(|problem| vec![problem])?;
        let &Image { width, height, .. } = image;
        if width == 0 {
            return Err(vec![RequestError::new("width", "is 0")]);
        }
        let pixels = u64::from(width) * u64::from(height);
        let whole = |bytes| vec![rung("whole", bytes)];
        let value = |name: &str| ValueShape::new(name, latent().shape);
        let of_image = image.init_image.is_some();
        let mut stages = vec![StagePlan {
            gives: vec!["sequence".into()],
            per_item: *request.prompt == *EACH_ITEM,
            memo: Some(Memo::of(Request {
                prompt: request.prompt.clone(),
                ..Request::of(Medium::Image(Image::of(0, 0)), 1, 0.0, 1)
            })),
            section: None,
            shared: None,
            reads_media: true,
            ..self.stage("encode_text", Role::Encode, 0, whole(1 << 20), "t16".into())
        }];
        if of_image && !request.from_values {
            stages.push(StagePlan {
                gives: vec!["latent".into()],
                ..self.of_vae("encode_image", Role::Encode, image)
            });
        }
        let start = (of_image || request.from_values).then(|| value("latent"));
        // Sampled in as many rounds as there are slots, which share passes with equal sizes.
        let state = |round: u32| format!("state_{round}");
        for round in 1..request.slots {
            let takes = [
                Some(value("sequence")),
                (round > 1).then(|| value(&state(round - 1))),
            ];
            stages.push(StagePlan {
                takes: takes.into_iter().flatten().collect(),
                gives: vec![state(round)],
                shared: shared(request, width, height),
                ..self.denoise(request, whole(pixels << 10), format!("{width}x{height}"))
            });
        }
        let start = start.or_else(|| (request.slots > 1).then(|| value(&state(request.slots - 1))));
        stages.push(StagePlan {
            steps: request.steps,
            takes: std::iter::once(value("sequence")).chain(start).collect(),
            gives: vec!["latent".into()],
            shared: shared(request, width, height),
            preview: request.preview.then(|| PreviewNeed {
                components: vec!["vae".into()],
                scratch: Bytes::gib(1),
            }),
            ..self.denoise(request, whole(pixels << 10), format!("{width}x{height}"))
        });
        stages.push(StagePlan {
            takes: vec![value("latent")],
            ..self.of_vae("decode", Role::Decode, image)
        });
        Ok(stages)
    }
    fn request_of(&self, values: &[ValueShape]) -> Option<Request> {
        (values.len() == 1).then(|| self.defaults())
    }
    fn smaller(&self, request: &Request) -> Vec<(String, Request)> {
        let smaller = [3, 2, 1].map(|quarters| {
            let Medium::Image(image) = &request.medium else {
                panic!()
            };
            let side = |side: u32| side * quarters / 4 / 16 * 16;
            let (width, height) = (side(image.width), side(image.height));
            let medium = Medium::Image(Image {
                width,
                height,
                ..image.clone()
            });
            (
                format!("{width}x{height}"),
                Request {
                    medium,
                    ..request.clone()
                },
            )
        });
        smaller.to_vec()
    }
    fn smallest(&self) -> Request {
        let medium = Medium::Image(Image::of(16, 16));
        Request {
            prompt: "the smallest".into(),
            steps: 1,
            medium,
            ..self.defaults()
        }
    }
    fn run(&self, _stage: &StageRun<'_>, _observer: &mut dyn Observer) -> Result<Values, StageError> {
        Err(StageError::Cancelled)
    }
}

/// A path whose openings are counted.
pub const COUNTED: &str = "/models/counted";
/// How often a model was opened at [`COUNTED`].
pub static OPENINGS_COUNTED: AtomicUsize = AtomicUsize::new(0);

pub struct FakeFamily;

impl Family for FakeFamily {
    fn name(&self) -> &'static str {
        "fake"
    }
    fn open(
        &self,
        path: &Path,
        _file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<Arc<dyn Model>>, ModelError> {
        if path == Path::new(COUNTED) {
            OPENINGS_COUNTED.fetch_add(1, Ordering::Relaxed);
        }
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
        quantization: model::Quantization::NONE,
        adapters: Vec::new(),
    })
}

pub fn request(prompt: &str) -> Request {
    Request {
        prompt: prompt.into(),
        seed: 7,
        strength: 0.6,
        ..Request::of(Medium::Image(Image::of(1024, 1024)), 4, 0.0, 16)
    }
}

/// The run of a specification.
pub fn run_of(spec: &mut JobSpec) -> &mut Run {
    match &mut spec.work {
        JobWork::Run(run) => run,
        JobWork::Load { .. } => panic!("a load"),
    }
}

/// The picture request of a specification.
pub fn image_of(spec: &mut JobSpec) -> &mut Image {
    match &mut run_of(spec).request.medium {
        Medium::Image(image) => image,
        other => panic!("{other:?}"),
    }
}

/// A picture of a latent in the store.
pub fn decode(latent: &str) -> JobWork {
    JobWork::Run(Run {
        call: Call::DecodeLatent,
        request: Request::of(Medium::Image(Image::of(1024, 1024)), 4, 0.0, 16),
        count: 1,
        start: Some(Start {
            latent: latent.into(),
            role: Role::Decode,
        }),
        until: Role::Decode,
        keep_latent: false,
        preview_interval_ms: 0,
    })
}

/// The quantization fallbacks of a refused full-precision model that would all fit, in the refusal's words.
pub const REDUCTIONS: [&str; 4] = [
    "quantization 8-bit (int8-convrot)",
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

/// A picture job of model `name` for a client; each prompt is new unless repeated.
pub fn picture(name: &str, client: &str, prompt: &str) -> JobSpec {
    let run = Run {
        call: Call::GenerateImage,
        request: request(prompt),
        count: 1,
        start: None,
        until: Role::Decode,
        keep_latent: false,
        preview_interval_ms: 0,
    };
    let options = JobOptions {
        client: client.into(),
        ..JobOptions::default()
    };
    JobSpec {
        options,
        entry: entry(name),
        work: JobWork::Run(run),
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

/// A load that replaces another model.
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

/// The same value as a client sends it: without a name.
pub fn brought() -> Values {
    Values::from([(String::new(), latent())])
}
