//! The toy family of docs/ADDING_A_FAMILY.md: as small as a family can be that is planned, loaded and run as all others are. Its
//! models are single files, `NAME.toy.safetensors`, and paint colour gradients.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes as Data;
use candle_core::{DType, Device, Tensor};
use gpu::{CheckpointFile, LoadPlan};
use pipelines::noise::Generator;
use pipelines::{
    Family, HostTensor, HostType, Image, Medium, Memo, Model, ModelError, ModelFile, ModelParts, Observer,
    Piece, Precision, PreviewNeed, Reads, Request, RequestError, Role, Rung, StageError, StagePlan, StageRun,
    ValueShape, Values, provisional_identity,
};
use residency::{Bytes, Component};

const FAMILY: &str = "toy";
const FILE_ENDING: &str = ".toy.safetensors";

/// The components, each with the name and the shape of its only tensor in the file.
const COMPONENTS: [(&str, &str, &[usize]); 3] = [
    ("text_encoder", "text_encoder.table", &[256, WIDTH]),
    ("transformer", "transformer.weight", &[3, WIDTH]),
    ("vae", "vae.bias", &[3]),
];

/// Numbers of an encoded prompt.
const WIDTH: usize = 8;
/// Pixels per number of a latent, along each axis.
const GRAIN: u32 = 8;
const MAX_SIDE: u32 = 2048;
const MAX_STEPS: u32 = 100;
/// For the prediction of how long a component takes to be read again.
const BYTES_PER_SECOND: f64 = 1e9;

/// Names of the stages, and of the values between them.
const ENCODE_TEXT: &str = "encode_text";
const DENOISE: &str = "denoise";
const DECODE: &str = "decode";
const TEXT: &str = "text";
const LATENT: &str = "latent";

/// The family: it recognizes its files, and opens them.
pub(crate) struct Toy;

impl Family for Toy {
    fn name(&self) -> &'static str {
        FAMILY
    }

    fn file_endings(&self) -> &'static [&'static str] {
        &[FILE_ENDING]
    }

    fn open(
        &self,
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<Arc<dyn Model>>, ModelError> {
        let is_ours = path.to_string_lossy().ends_with(FILE_ENDING);
        let Some(file) = file.filter(|_| is_ours) else {
            return Ok(None); // another family's
        };
        let damaged = |problem: String| ModelError::Damaged {
            path: path.to_owned(),
            problem,
        };
        if let Some((component, format)) = precision.quantization.formats(&[]).iter().next() {
            return Err(ModelError::Quantization {
                component: component.to_owned(),
                problem: format!("{component} is too small to become {format}: leave its quantization out"),
            });
        }
        let defaults = Request::of(Medium::Image(Image::of(64, 64)), 4, 1.0, 77);
        let mut parts = ModelParts::new(FAMILY, defaults, &[], precision);
        for (name, tensor, shape) in COMPONENTS {
            let source = file.source(tensor, tensor, precision.dtype);
            let source = source.filter(|source| source.shape == *shape);
            let source = source.ok_or_else(|| damaged(format!("{tensor} of shape {shape:?} is missing")))?;
            let files = vec![ModelFile {
                path: Arc::clone(file.path()),
                stamp: *file.stamp(),
            }];
            let plan = LoadPlan::Files(vec![source]);
            let bytes = plan.bytes();
            let component = Component {
                id: provisional_identity(path, &files, name, precision.dtype, None),
                name: name.to_owned(),
                bytes,
                reload_seconds: bytes.0 as f64 / BYTES_PER_SECOND,
                parts: residency::Parts::default(),
            };
            parts.push(component, plan, files);
        }
        Ok(Some(Arc::new(ToyModel(parts))))
    }
}

/// An open model: it holds no weights, plans requests, and computes stages over tensors that the caller passes.
struct ToyModel(ModelParts);

impl Model for ToyModel {
    fn parts(&self) -> &ModelParts {
        &self.0
    }

    fn reads(&self) -> Reads {
        Reads::NOTHING
    }

    fn stages_of(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>> {
        let image = request.image().map_err(|other| vec![other])?;
        let wrong = problems(request, image);
        if !wrong.is_empty() {
            return Err(wrong);
        }
        let text = ValueShape::new(TEXT, vec![1, WIDTH]);
        let latent = ValueShape::new(LATENT, latent_shape(image));
        let shape = format!("{}x{}", image.width, image.height);
        let latent_bytes = Bytes(latent.shape.iter().product::<usize>() as u64 * 4);
        let encode = StagePlan {
            gives: vec![TEXT.to_owned()],
            // All requests of which this part is equal share the encoding.
            memo: Some(Memo::of(read_by_encode(request))),
            ..StagePlan::of(
                ENCODE_TEXT,
                Role::Encode,
                ["text_encoder"],
                vec![Rung::whole(Bytes(64 << 10))],
            )
        };
        let denoise = StagePlan {
            shape: shape.clone(),
            steps: request.steps,
            takes: vec![text],
            gives: vec![LATENT.to_owned()],
            per_item: true, // it reads the seed
            preview: request.preview.then_some(PreviewNeed::NOTHING),
            ..StagePlan::of(
                DENOISE,
                Role::Sample,
                ["transformer"],
                vec![Rung::whole(Bytes(4 * latent_bytes.0))],
            )
        };
        let pixels = u64::from(image.width) * u64::from(image.height);
        // The picture in bytes, and the part that is enlarged in f32 at a time: all of it, or the rows of one row of the
        // latent.
        let rung = |label: &str, rows: u64| {
            Rung::new(
                label,
                Bytes(3 * pixels + 3 * 4 * 2 * u64::from(image.width) * rows),
            )
        };
        let rungs = vec![
            rung("whole", image.height.into()),
            rung("strips of 8", GRAIN.into()),
        ];
        let decode = StagePlan {
            shape,
            takes: vec![latent],
            per_item: true,
            ..StagePlan::of(DECODE, Role::Decode, ["vae"], rungs)
        };
        Ok(vec![encode, denoise, decode])
    }

    fn request_of(&self, values: &[ValueShape]) -> Option<Request> {
        let [only] = values else { return None };
        let [1, 3, rows, columns] = only.shape[..] else {
            return None;
        };
        let side = |numbers: usize| u32::try_from(numbers).ok()?.checked_mul(GRAIN);
        let medium = Medium::Image(Image::of(side(columns)?, side(rows)?));
        Some(Request {
            medium,
            ..self.defaults()
        })
    }

    fn smaller(&self, request: &Request) -> Vec<(String, Request)> {
        let Ok(image) = request.image() else {
            return Vec::new();
        };
        let half = |side: u32| side / 2 / GRAIN * GRAIN;
        let (width, height) = (half(image.width), half(image.height));
        let smaller = Request {
            medium: Medium::Image(Image::of(width, height)),
            ..request.clone()
        };
        let is_one = width > 0 && height > 0;
        is_one
            .then(|| (format!("{width}x{height}"), smaller))
            .into_iter()
            .collect()
    }

    fn smallest(&self) -> Request {
        Request {
            steps: 1,
            medium: Medium::Image(Image::of(GRAIN, GRAIN)),
            ..self.defaults()
        }
    }

    fn run(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError> {
        match stage.plan.name.as_str() {
            ENCODE_TEXT => encode(stage),
            DENOISE => denoise(stage, observer),
            DECODE => decode(stage, observer),
            other => Err(StageError::BadInput(format!("{FAMILY} has no stage {other}"))),
        }
    }
}

/// All fields that are out of bounds, each by its name.
fn problems(request: &Request, image: &Image) -> Vec<RequestError> {
    let side_is_right = |side: u32| (GRAIN..=MAX_SIDE).contains(&side) && side.is_multiple_of(GRAIN);
    let checks = [
        (
            side_is_right(image.width),
            "width",
            "must be a multiple of 8 from 8 to 2048",
        ),
        (
            side_is_right(image.height),
            "height",
            "must be a multiple of 8 from 8 to 2048",
        ),
        (
            (1..=MAX_STEPS).contains(&request.steps),
            "steps",
            "must be from 1 to 100",
        ),
        (
            request.slots == 1,
            "slots",
            "must be 1: this model runs each request alone",
        ),
    ];
    let wrong = checks.into_iter().filter(|(holds, ..)| !holds);
    wrong
        .map(|(_, field, problem)| RequestError::new(field, problem))
        .collect()
}

/// The part of a request that its text's stage reads, and fixed values for the rest.
fn read_by_encode(request: &Request) -> Request {
    Request {
        prompt: request.prompt.clone(),
        ..Request::of(
            Medium::Image(Image::of(0, 0)),
            1,
            0.0,
            request.max_sequence_length,
        )
    }
}

fn latent_shape(image: &Image) -> Vec<usize> {
    vec![
        1,
        3,
        (image.height / GRAIN) as usize,
        (image.width / GRAIN) as usize,
    ]
}

/// The mean of the rows of the table that the prompt's bytes name.
fn encode(stage: &StageRun<'_>) -> Result<Values, StageError> {
    let table = tensor(stage, "text_encoder", "text_encoder.table", &[256, WIDTH])?;
    let bytes = stage
        .request
        .prompt
        .bytes()
        .take(stage.request.max_sequence_length as usize);
    let numbers: Vec<u32> = std::iter::once(0).chain(bytes.map(u32::from)).collect();
    let numbers = Tensor::new(numbers, stage.device)?;
    let text = table.index_select(&numbers, 0)?.mean_keepdim(0)?;
    Ok(Values::from([(TEXT.to_owned(), to_host(&text)?)]))
}

/// From noise to the prompt's colour, darker from left to right, in steps.
fn denoise(stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError> {
    let request = stage.request;
    let shape = latent_shape(request.image()?);
    let text = from_host(stage.value(TEXT)?, stage.device)?;
    let weight = tensor(stage, "transformer", "transformer.weight", &[3, WIDTH])?;
    let colour = text
        .matmul(&weight.to_dtype(DType::F32)?.t()?)?
        .reshape((1, 3, 1, 1))?;
    let ramp = Tensor::arange(0_u32, shape[3] as u32, stage.device)?;
    let ramp = ramp
        .to_dtype(DType::F32)?
        .affine(-1.0 / shape[3] as f64, 1.0)?
        .reshape((1, 1, 1, ()))?;
    let target = colour.broadcast_mul(&ramp)?;
    let noise = Generator::new(request.seed).normal(shape.iter().product());
    let mut latent = Tensor::from_vec(noise, shape, stage.device)?;
    for step in 1..=request.steps {
        observer.check_cancelled()?;
        // Some noise is left after the last step, so that seeds give different results.
        let part = 1.0 / f64::from(request.steps + 2 - step);
        latent =
            (latent.affine(1.0 - part, 0.0)? + target.affine(part, 0.0)?.broadcast_as(latent.shape())?)?;
        observer.step(step, request.steps);
        if request.preview && observer.wants_preview() {
            let (_, _, height, width) = latent.dims4()?;
            observer.preview(width as u32, height as u32, rgb(&latent)?);
        }
    }
    if !ops::all_finite(&latent)? {
        return Err(StageError::NotFinite {
            component: "transformer".to_owned(),
            step: request.steps,
        });
    }
    Ok(Values::from([(LATENT.to_owned(), to_host(&latent)?)]))
}

/// Enlarges a latent to a picture: all at once, or strip by strip, with the same bytes.
fn decode(stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError> {
    let image = stage.request.image()?;
    let latent = from_host(stage.value(LATENT)?, stage.device)?;
    let bias = tensor(stage, "vae", "vae.bias", &[3])?;
    let latent = latent.broadcast_add(&bias.to_dtype(DType::F32)?.reshape((1, 3, 1, 1))?)?;
    let rows = latent.dim(2)?;
    let at_once = if stage.rung == 0 { rows } else { 1 };
    let mut picture = Vec::new();
    for first in (0..rows).step_by(at_once) {
        observer.check_cancelled()?;
        let strip = latent.narrow(2, first, at_once)?;
        let enlarged = strip.upsample_nearest2d(at_once * GRAIN as usize, image.width as usize)?;
        picture.extend(rgb(&enlarged)?);
    }
    observer.deliver(Piece::image(image.width, image.height, picture));
    Ok(Values::new())
}

/// A tensor of a component, which is resident while the stage runs.
fn tensor(stage: &StageRun<'_>, component: &str, name: &str, shape: &[usize]) -> Result<Tensor, StageError> {
    let found = (stage.tensors)(component)?.shaped(name, shape);
    found.map_err(|missing| StageError::Missing {
        component: component.to_owned(),
        missing,
    })
}

/// The pixels of planes of numbers from 0 to 1.
fn rgb(planes: &Tensor) -> Result<Vec<u8>, StageError> {
    let pixels = planes.squeeze(0)?.permute((1, 2, 0))?.clamp(0.0, 1.0)?;
    Ok(pixels
        .affine(255.0, 0.5)?
        .to_dtype(DType::U8)?
        .flatten_all()?
        .to_vec1()?)
}

/// Values between stages are in host memory. (Families of the crate have `tensors.rs` for the two functions below.)
fn to_host(tensor: &Tensor) -> Result<HostTensor, StageError> {
    let numbers = tensor
        .to_dtype(DType::F32)?
        .to_device(&Device::Cpu)?
        .flatten_all()?
        .to_vec1::<f32>()?;
    Ok(HostTensor {
        dtype: HostType::F32,
        shape: tensor.dims().to_vec(),
        data: Data::from_iter(numbers.iter().flat_map(|number| number.to_le_bytes())),
    })
}

/// The value on the device of the stage. It may come from a client, so its bytes are held against its shape.
fn from_host(value: &HostTensor, device: &Device) -> Result<Tensor, StageError> {
    let (numbers, rest) = value.data.as_chunks::<4>();
    if value.dtype != HostType::F32
        || !rest.is_empty()
        || numbers.len() != value.shape.iter().product::<usize>()
    {
        return Err(StageError::BadInput(
            "a value whose bytes do not fit its shape".to_owned(),
        ));
    }
    let numbers: Vec<f32> = numbers.iter().map(|&number| f32::from_le_bytes(number)).collect();
    Ok(Tensor::from_vec(numbers, value.shape.as_slice(), device)?)
}
