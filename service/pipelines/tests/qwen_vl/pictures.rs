//! Sizes, the processor, and the vision tower.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use model::resized;
use pipelines::vision::qwen2_vl::{Grid, QwenImageProcessor, QwenVisionTower, size_of_area};
use serde::Deserialize;

use crate::device::{BF16_COMPONENT, tolerances};
use crate::numbers::{distance, fixtures, json, largest_difference, resident, tensors};
use crate::shapes_asked::{asked, words};
use crate::text::{WEIGHTS, config, weights};

const ANSWERS: &str = "qwen-vl-tiny/expected/vision.safetensors";

/// Names and sizes (width, height) of the pictures of `expected/vision.safetensors`.
pub(crate) const CASES: [(&str, (u32, u32)); 5] = [
    ("small", (84, 56)),
    ("odd", (70, 112)),
    ("borders", (196, 140)),
    ("strip", (28, 252)),
    ("whole", (224, 112)),
];

/// A picture: rows of interleaved RGB bytes, and width and height.
pub(crate) struct Picture {
    rgb: Vec<u8>,
    size: (u32, u32),
}

/// The picture that the fixture's script makes of a size.
fn formula((width, height): (u32, u32)) -> Picture {
    let pixels = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
    let byte = |(x, y): (u32, u32), c: u32| ((5 * x + 3 * y + 40 * c + x * y / 7) % 256) as u8;
    let rgb = pixels.flat_map(|at| (0..3).map(move |c| byte(at, c)));
    Picture {
        rgb: rgb.collect(),
        size: (width, height),
    }
}

/// That picture, scaled to an area as pipelines do; 0 leaves it as it is.
pub(crate) fn scaled(size: (u32, u32), area: u32) -> Picture {
    let picture = formula(size);
    if area == 0 {
        return picture;
    }
    let to = size_of_area(size, area);
    Picture {
        rgb: resized(&picture.rgb, 3, size, to),
        size: to,
    }
}

pub(crate) fn processor() -> QwenImageProcessor {
    QwenImageProcessor::open(&fixtures().join("qwen-vl-tiny/processor")).expect("a processor")
}

/// The tower's tensors by their names here: without a prefix, and with queries, keys and values apart.
pub(crate) fn tower_of(weights: &HashMap<String, Tensor>) -> HashMap<String, Tensor> {
    let mut tower = HashMap::new();
    for (name, tensor) in weights {
        let Some(name) = name.strip_prefix("model.visual.") else {
            continue;
        };
        match name.split_once(".qkv.") {
            None => drop(tower.insert(name.to_owned(), tensor.clone())),
            Some((layer, kind)) => {
                let parts = tensor.chunk(3, 0).expect("parts");
                for (part, tensor) in ["q", "k", "v"].into_iter().zip(parts) {
                    let tensor = tensor.contiguous().expect("rows");
                    tower.insert(format!("{layer}.{part}.{kind}"), tensor);
                }
            }
        }
    }
    tower
}

/// The tower in f32.
pub(crate) fn tower_tensors() -> ComponentTensors {
    resident(&tower_of(&weights()))
}

/// The patches of a picture.
pub(crate) fn patches_of(picture: &Picture) -> (Tensor, Grid) {
    let processor = processor();
    let patches = processor.patches(&picture.rgb, picture.size).expect("patches");
    (patches, processor.grid(picture.size).expect("a grid"))
}

/// The tower's tokens of a picture.
pub(crate) fn tokens_of(tower: &ComponentTensors, picture: &Picture) -> Tensor {
    let (patches, grid) = patches_of(picture);
    let tower = QwenVisionTower::new(&config().vision, "vision", tower).expect("a tower");
    tower.forward(&patches, grid, &|| false).expect("tokens")
}

#[test]
fn pictures_are_scaled_to_areas_and_whole_cells() {
    #[derive(Deserialize)]
    struct Sizes {
        size: (u32, u32),
        area_384: (u32, u32),
        area_1024: (u32, u32),
        grid_1003520: (usize, usize),
        grid_12845056: (usize, usize),
    }
    let sizes: Vec<Sizes> = json("qwen-vl-tiny/expected/sizes.json");
    for case in &sizes {
        assert_eq!(
            size_of_area(case.size, 384 * 384),
            case.area_384,
            "{:?}",
            case.size
        );
        assert_eq!(
            size_of_area(case.size, 1024 * 1024),
            case.area_1024,
            "{:?}",
            case.size
        );
        for (processor, (rows, columns)) in [
            (processor(), case.grid_1003520),
            (QwenImageProcessor::published(), case.grid_12845056),
        ] {
            let found = processor.grid(case.size).expect("a grid");
            assert_eq!(found, Grid { rows, columns }, "{:?}", case.size);
        }
    }
    assert!(sizes.len() > 10);
    for size in [(0, 10), (10, 0), (1, 201)] {
        assert!(processor().grid(size).is_err(), "{size:?}");
    }
}

#[test]
fn patches_equal_the_reference() {
    let picture = formula((84, 56));
    let found = processor().patches(&picture.rgb, picture.size).expect("patches");
    let expected = &tensors(ANSWERS)["small.patches"];
    let apart = largest_difference(&found, expected);
    println!("patches: {apart:.1e} at most");
    assert!(apart < 1e-6, "{apart:e}");
    assert!(processor().patches(&picture.rgb[3..], picture.size).is_err());
}

/// A picture that is resized has patches of the bytes that Pillow gives.
#[test]
fn resized_bytes_equal_pillows() {
    let all = tensors("qwen-vl-tiny/expected/resized.safetensors");
    for (name, size) in [("84x56", (84, 56)), ("70x112", (70, 112))] {
        let bytes = &all[name];
        let (height, width, _) = bytes.dims3().expect("a picture");
        let before = formula(size);
        let after = bytes.flatten_all().and_then(|bytes| bytes.to_vec1::<u8>());
        let patches = |rgb: &[u8], size| processor().patches(rgb, size).expect("patches");
        let found = patches(&before.rgb, before.size);
        let expected = patches(&after.expect("bytes"), (width as u32, height as u32));
        assert_eq!(largest_difference(&found, &expected), 0.0, "{name}");
    }
}

#[test]
fn the_towers_tokens_equal_transformers() {
    let (tower, expected) = (tower_tensors(), tensors(ANSWERS));
    for (name, size) in CASES {
        let apart = distance(
            &tokens_of(&tower, &formula(size)),
            &expected[&format!("{name}.tokens")],
        );
        println!("{name}: {apart:.2e}");
        assert!(apart < tolerances().component, "{name}: {apart:e}");
    }
}

#[test]
fn bf16_tokens_equal_f32_within_their_rounding() {
    let tower = resident(&tower_of(&tensors(WEIGHTS)));
    let found = tokens_of(&tower, &formula((196, 140)));
    assert_eq!(found.dtype(), DType::BF16);
    let apart = distance(&found, &tensors(ANSWERS)["borders.tokens"]);
    println!("in bf16: {apart:.2e}");
    assert!(apart < BF16_COMPONENT, "{apart:e}");
}

/// llama.cpp's files have a patch's times in two tensors.
#[test]
fn times_of_patches_may_be_apart() {
    let mut tower = tower_of(&weights());
    let joined = tower.remove("patch_embed.proj.weight").expect("a weight");
    for time in 0..2 {
        let one = joined
            .narrow(2, time, 1)
            .and_then(|one| one.squeeze(2)?.contiguous());
        tower.insert(format!("patch_embed.proj.{time}.weight"), one.expect("a time"));
    }
    let found = tokens_of(&resident(&tower), &formula((84, 56)));
    let apart = distance(&found, &tensors(ANSWERS)["small.tokens"]);
    assert!(apart < tolerances().component, "{apart:e}");
}

#[test]
fn the_shapes_of_attention_are_planned() {
    let tower = resident(&tower_of(&tensors(WEIGHTS)));
    for (name, size) in CASES {
        let (asked, _) = asked(|| tokens_of(&tower, &formula(size)));
        let grid = processor().grid(size).expect("a grid");
        let planned = config().vision.planned(grid, DType::BF16);
        assert_eq!(asked, words(&planned), "{name}");
    }
}

#[test]
fn wrong_patches_and_towers_are_refused() {
    let tensors = tower_tensors();
    let tower = QwenVisionTower::new(&config().vision, "vision", &tensors).expect("a tower");
    let patches = Tensor::zeros((8, 588), DType::F32, &Device::Cpu).expect("patches");
    let grid = |rows, columns| Grid { rows, columns };
    assert!(tower.forward(&patches, grid(2, 4), &|| false).is_ok());
    assert!(tower.forward(&patches, grid(2, 4), &|| true).is_err());
    for (rows, columns) in [(2, 2), (1, 8), (0, 4)] {
        assert!(tower.forward(&patches, grid(rows, columns), &|| false).is_err());
    }
    let mut some = tower_of(&weights());
    some.remove("blocks.7.attn.k.bias").expect("a tensor");
    let told = QwenVisionTower::new(&config().vision, "vision", &resident(&some))
        .expect_err("a gap")
        .to_string();
    assert!(told.contains("blocks.7.attn.k.bias"), "{told}");
}
