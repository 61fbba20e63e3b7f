//! Masks for image to image, Kontext and Fill: the same latents and pictures as diffusers.

use std::collections::HashMap;

use candle_core::Tensor;
use pipelines::flux::FluxModel;
use pipelines::{
    HostTensor, Image, InitImage, Mask, Medium, Model, ReferenceFit, Request, Unobserved, Values, resized,
};
use serde::Deserialize;

use crate::device::tolerances;
use crate::given::{Folder, black, copy_of, folder, open, request};
use crate::numbers::{distance, init_image, json, largest_difference, tensors};
use crate::open_model::{Delivered, F32, OpenModel, on_cpu};

/// The largest difference of a picture that is allowed on a CPU, from 0 to 1.
const PICTURE: f64 = 1e-4;

/// An entry of a fixture's `pipelines.json` or `masks.json`.
#[derive(Deserialize)]
struct Case {
    name: String,
    prompt: String,
    width: u32,
    height: u32,
    steps: u32,
    seed: u64,
    max_sequence_length: u32,
    guidance: f32,
    #[serde(default)]
    strength: Option<f32>,
}

impl Case {
    fn request(&self, image: Image) -> Request {
        Request {
            prompt: self.prompt.clone(),
            seed: self.seed,
            strength: self.strength.unwrap_or(1.0),
            ..Request::of(
                Medium::Image(image),
                self.steps,
                self.guidance,
                self.max_sequence_length,
            )
        }
    }

    /// The picture with the case's start and mask, scaled as the reference scales them.
    fn masked(&self, expected: &HashMap<String, Tensor>) -> Image {
        let size = (self.width, self.height);
        let start = init_image(&expected[&format!("{}.init", self.name)]);
        let mask = mask_of(&expected[&format!("{}.mask", self.name)]);
        let grey = resized(&mask.grey, 1, (mask.width, mask.height), size);
        Image {
            init_image: Some(scaled(&start, size)),
            mask: Some(Mask {
                width: self.width,
                height: self.height,
                grey: grey.into(),
            }),
            ..Image::of(self.width, self.height)
        }
    }
}

/// A picture of a fixture in another size, scaled as the reference scales it.
pub(crate) fn scaled(image: &InitImage, (width, height): (u32, u32)) -> InitImage {
    let rgb = resized(&image.rgb, 3, (image.width, image.height), (width, height));
    InitImage {
        width,
        height,
        rgb: rgb.into(),
    }
}

/// A mask of a fixture, `[height, width]` bytes.
pub(crate) fn mask_of(grey: &Tensor) -> Mask {
    let (height, width) = grey.dims2().expect("a mask");
    let grey = grey
        .flatten_all()
        .and_then(|grey| grey.to_vec1::<u8>())
        .expect("bytes");
    Mask {
        width: width as u32,
        height: height as u32,
        grey: grey.into(),
    }
}

/// Compares the latent and the picture of a request with those of a reference.
pub(crate) fn assert_equal(
    opened: &OpenModel<FluxModel>,
    request: &Request,
    case: &str,
    expected: &HashMap<String, Tensor>,
) -> HostTensor {
    let host = opened.latent(request, &mut Unobserved).expect("a latent");
    let latent = on_cpu(&host);
    let apart = distance(&latent, &expected[&format!("{case}.latent")]);
    let picture = opened.picture(&latent);
    let largest = f64::from(largest_difference(
        &picture,
        &expected[&format!("{case}.picture")],
    ));
    let tolerance = tolerances().pipeline;
    assert!(apart < tolerance, "{case}: {apart:e}");
    assert!(largest < tolerance.max(PICTURE), "{case}: {largest:e}");
    host
}

#[test]
fn masked_pictures_equal_the_references_and_keep_the_unmasked_part() {
    let expected = tensors("flux-tiny/expected/masks.safetensors");
    let folder = folder("dev");
    let opened = open(folder.path());
    for case in json::<Vec<Case>>("flux-tiny/expected/masks.json") {
        let image = case.masked(&expected);
        let request = case.request(image.clone());
        let latent = assert_equal(&opened, &request, &case.name, &expected);
        let plan = opened.stage(&request, "decode");
        let values = Values::from([("latent".to_owned(), latent)]);
        let mut delivered = Delivered::default();
        opened
            .run(&plan, 0, &request, &values, &mut delivered)
            .expect("a picture");
        let (before, mask) = (
            image.init_image.expect("a start").rgb,
            image.mask.expect("a mask"),
        );
        let pixels = delivered.0[0].data.chunks(3).zip(before.chunks(3));
        let mut changed = 0;
        for ((now, before), grey) in pixels.zip(mask.grey.iter()) {
            match grey {
                0 => assert_eq!(now, before, "{}: a pixel that is kept", case.name),
                _ => changed += usize::from(now != before),
            }
        }
        assert!(changed > 100, "{}: {changed} pixels changed", case.name);
    }
}

#[test]
fn a_mask_needs_a_picture_of_its_size() {
    let folder = folder("dev");
    let opened = open(folder.path());
    let mask = |width: u32, height: u32| Mask {
        width,
        height,
        grey: vec![255; (width * height) as usize].into(),
    };
    let refused = |image: Image| {
        let request = Request {
            medium: Medium::Image(image),
            ..request()
        };
        opened.model.plan(&request).unwrap_err()[0].field.clone()
    };
    let alone = Image {
        mask: Some(mask(64, 64)),
        ..Image::of(64, 64)
    };
    assert_eq!(refused(alone), "mask");
    let other_size = Image {
        init_image: Some(black(64, 64)),
        mask: Some(mask(64, 48)),
        ..Image::of(64, 64)
    };
    assert_eq!(refused(other_size), "mask");
    let reference = Image {
        references: vec![black(64, 64)],
        ..Image::of(64, 64)
    };
    assert_eq!(refused(reference), "references");
}

#[derive(Deserialize)]
struct KontextCase {
    #[serde(flatten)]
    case: Case,
    #[serde(default)]
    preferred_size: bool,
    #[serde(default)]
    reference_width: Option<u32>,
    #[serde(default)]
    reference_height: Option<u32>,
}

#[test]
fn kontext_edits_equal_the_references() {
    let expected = tensors("flux-kontext-tiny/expected/pipelines.safetensors");
    let folder = Folder::Copy(copy_of(&["flux-tiny", "flux-kontext-tiny"]));
    let opened = open(folder.path());
    let mut checked = 0;
    for KontextCase {
        case,
        preferred_size,
        reference_width,
        reference_height,
    } in json::<Vec<KontextCase>>("flux-kontext-tiny/expected/pipelines.json")
    {
        if preferred_size && reference_width.is_some() {
            continue; // of a million pixels
        }
        let reference = expected.get(&format!("{}.reference", case.name)).map(init_image);
        let reference = reference.zip(reference_width.zip(reference_height));
        let reference = reference.map(|(reference, size)| scaled(&reference, size));
        let image = Image {
            references: reference.into_iter().collect(),
            ..Image::of(case.width, case.height)
        };
        let has_reference = !image.references.is_empty();
        let request = case.request(image);
        assert_equal(&opened, &request, &case.name, &expected);
        assert_eq!(
            opened
                .stages(&request)
                .iter()
                .any(|stage| stage.name == "encode_reference"),
            has_reference
        );
        checked += 1;
    }
    assert_eq!(checked, 3);
}

#[derive(Deserialize)]
struct Sizes {
    references: Vec<ReferenceSize>,
}

#[derive(Deserialize)]
struct ReferenceSize {
    reference: (u32, u32),
    preferred: bool,
    resized: (u32, u32),
}

#[test]
fn references_get_the_size_that_the_reference_prefers() {
    let sizes: Sizes = json("flux-kontext-tiny/expected/sizes.json");
    let folder = Folder::Copy(copy_of(&["flux-tiny", "flux-kontext-tiny"]));
    let opened = open(folder.path());
    for size in sizes.references.iter().filter(|size| size.preferred) {
        let (width, height) = size.reference;
        let found = opened.model.reference_fit(width, height).expect("a size");
        assert_eq!(found, ReferenceFit::scaled_to(size.resized), "{width}x{height}");
    }
    assert!(opened.model.reference_fit(8, 400).is_err());
}

#[test]
fn encoded_references_are_reused_and_their_places_count() {
    let folder = Folder::Copy(copy_of(&["flux-tiny", "flux-kontext-tiny"]));
    let opened = open(folder.path());
    let grey = |width: u32, height: u32| InitImage {
        rgb: vec![90; (3 * width * height) as usize].into(),
        ..black(width, height)
    };
    let with = |reference: InitImage| Request {
        medium: Medium::Image(Image {
            references: vec![reference],
            ..Image::of(64, 64)
        }),
        ..request()
    };
    let memo = |request: &Request| opened.stage(request, "encode_reference").memo.expect("a memo");
    assert_eq!(memo(&with(grey(64, 48))), memo(&with(grey(64, 48))));
    assert_ne!(memo(&with(grey(64, 48))), memo(&with(grey(48, 64))));
    assert_ne!(memo(&with(grey(64, 48))), memo(&with(black(64, 48))));
    let shape = |request: &Request| opened.stage(request, "denoise").shape;
    assert_ne!(shape(&with(grey(64, 48))), shape(&with(grey(64, 64))));
}

fn fill() -> Folder {
    Folder::Copy(copy_of(&["flux-tiny", "flux-fill-tiny"]))
}

#[test]
fn fill_equals_the_reference() {
    let expected = tensors("flux-fill-tiny/expected/pipelines.safetensors");
    let folder = fill();
    let opened = open(folder.path());
    let mut checked = 0;
    for case in json::<Vec<Case>>("flux-fill-tiny/expected/pipelines.json") {
        let image = case.masked(&expected);
        assert_equal(&opened, &case.request(image), &case.name, &expected);
        checked += 1;
    }
    assert_eq!(checked, 3);
}

#[test]
fn fill_takes_no_negative_prompt_from_a_request_or_its_folder() {
    let folder = fill();
    let away = Request {
        negative_prompt: Some("blurred".to_owned()),
        true_guidance: 4.0,
        ..request()
    };
    let refused = open(folder.path()).model.plan(&away).unwrap_err();
    let fields: Vec<&str> = refused.iter().map(|problem| problem.field.as_str()).collect();
    assert_eq!(fields, ["negative_prompt", "true_guidance"]);

    let defaults = r#"{"negative_prompt": "blurred", "true_guidance": 4.0}"#;
    std::fs::write(folder.path().join("moored.json"), defaults).expect("a file");
    let refused = FluxModel::open(folder.path(), &F32)
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("negative_prompt is not taken by this model"),
        "{refused}"
    );
}

#[test]
fn fill_without_a_picture_generates_all_of_it() {
    let folder = fill();
    let opened = open(folder.path());
    let request = request();
    let names: Vec<String> = opened
        .stages(&request)
        .into_iter()
        .map(|stage| stage.name)
        .collect();
    assert_eq!(names, ["encode_text", "encode_masked", "denoise", "decode"]);
    assert!(opened.latent(&request, &mut Unobserved).is_ok());
}
