//! fp8 with scales, as ComfyUI's users have it for the transformer and for the text encoder.

use std::collections::BTreeMap;
use std::fs::{create_dir_all, remove_file, rename};
use std::path::Path;

use candle_core::{Device, Tensor};
use gpu::{Fp8Scales, Weight, WeightFormat};
use safetensors::tensor::{Dtype, TensorView};

use crate::checkpoints::{beside, short, weights};
use crate::given::{T2V, open};
use crate::numbers::{distance, numbers};
use crate::open_model::{F32, OpenModel, on_cpu};
use crate::spellings::{Tensors, authors_name, authors_name_of_umt5, renamed, write};

/// The code whose number is nearest.
fn code_of(number: f32) -> u8 {
    let codes = (0..=u8::MAX).filter(|code| gpu::e4m3_to_f32(*code).is_finite());
    let apart = |code: u8| (gpu::e4m3_to_f32(code) - number).abs();
    codes
        .min_by(|a, b| apart(*a).total_cmp(&apart(*b)))
        .expect("a code")
}

/// A file of codes with a scale for each layer, and the numbers that these stand for.
struct Scaled {
    raw: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    numbers: Tensors,
}

/// Tensors of which those that `is_coded` names are in fp8.
fn scaled(tensors: &Tensors, is_coded: impl Fn(&str) -> bool) -> Scaled {
    let mut raw = BTreeMap::new();
    let mut held = Tensors::new();
    for (name, tensor) in tensors {
        let (shape, values) = (tensor.dims().to_vec(), numbers(tensor));
        let bytes = |values: &[f32]| values.iter().flat_map(|number| number.to_le_bytes()).collect();
        if !is_coded(name) {
            raw.insert(name.clone(), (Dtype::F32, shape, bytes(&values)));
            held.insert(name.clone(), tensor.clone());
            continue;
        }
        let largest = values.iter().fold(0f32, |most, number| most.max(number.abs()));
        let scale = largest / 448.0;
        let codes: Vec<u8> = values.iter().map(|number| code_of(number / scale)).collect();
        let decoded: Vec<f32> = codes.iter().map(|code| gpu::e4m3_to_f32(*code) * scale).collect();
        held.insert(
            name.clone(),
            Tensor::from_vec(decoded, shape.clone(), &Device::Cpu).expect("numbers"),
        );
        let layer = name.strip_suffix(".weight").expect("a weight");
        raw.insert(
            format!("{layer}.scale_weight"),
            (Dtype::F32, Vec::new(), bytes(&[scale])),
        );
        raw.insert(name.clone(), (Dtype::F8_E4M3, shape, codes));
    }
    raw.insert("scaled_fp8".to_owned(), (Dtype::F8_E4M3, vec![0], Vec::new()));
    Scaled { raw, numbers: held }
}

impl Scaled {
    fn write(&self, path: &Path) {
        let views = self.raw.iter().map(|(name, (dtype, shape, bytes))| {
            let view = TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor");
            (name.clone(), view)
        });
        safetensors::serialize_to_file(views, None, path).expect("a file");
    }
}

fn latent(opened: &OpenModel) -> Tensor {
    on_cpu(&opened.film(&short(T2V), 0).0["latent"])
}

fn format_of(opened: &OpenModel, component: &str, tensor: &str) -> Option<WeightFormat> {
    match opened.tensors(component).weight(tensor).expect("a tensor") {
        Weight::Full(_) => None,
        Weight::Quantized(weight) => Some(weight.format),
    }
}

/// Both spellings of UMT5, with the tokenizer that ComfyUI's has in it; and a transformer whose embedders are coded too.
#[test]
fn fp8_with_scales_stands_for_its_numbers() {
    let is_layer =
        |name: &str| name.ends_with(".weight") && !name.contains("norm") && !name.contains("patch");
    let authors = renamed(&weights("wan-tiny", "transformer"), authors_name);
    let transformer = scaled(&authors, |name| is_layer(name) && name.starts_with("blocks."));
    let text = weights("wan-tiny", "text_encoder");
    let is_of_layer = |name: &str| {
        name.ends_with(".weight")
            && [".SelfAttention.", ".DenseReluDense."]
                .iter()
                .any(|part| name.contains(part))
            && !name.contains("bias")
    };
    for (file, rename_text) in [
        (
            "umt5_xxl_fp8_e4m3fn_scaled",
            (|name: &str| name.to_owned()) as fn(&str) -> String,
        ),
        ("umt5-xxl-enc-fp8_e4m3fn", authors_name_of_umt5),
    ] {
        let coded: Vec<String> = text
            .keys()
            .filter(|name| is_of_layer(name))
            .map(|name| rename_text(name))
            .collect();
        let mut text = scaled(&renamed(&text, rename_text), |name| {
            coded.contains(&name.to_owned())
        });
        let of_numbers = text.numbers.clone();
        text.raw
            .insert("spiece_model".to_owned(), (Dtype::U8, vec![3], vec![1, 2, 3]));
        let made = |is_coded: bool| {
            let (root, path) = beside(T2V, "diffusion_models/wan.safetensors");
            rename(root.path().join("Wan"), root.path().join("diffusion_models/Wan")).expect("a folder");
            remove_file(
                root.path()
                    .join("diffusion_models/Wan/text_encoder/model.safetensors"),
            )
            .expect("a file");
            create_dir_all(root.path().join("text_encoders")).expect("a folder");
            let of_text = root.path().join(format!("text_encoders/{file}.safetensors"));
            match is_coded {
                true => {
                    transformer.write(&path);
                    text.write(&of_text);
                }
                false => {
                    write(&transformer.numbers, &path);
                    write(&of_numbers, &of_text);
                }
            }
            (root, path)
        };
        let (_root, path) = made(true);
        let opened = open(&path, &F32);
        let fp8 = Some(WeightFormat::Fp8(Fp8Scales::Tensor));
        for (component, tensor, format) in [
            ("transformer", "blocks.0.attn1.to_q.weight", fp8),
            ("transformer", "blocks.2.ffn.net.2.weight", fp8),
            ("transformer", "proj_out.weight", None),
            (
                "text_encoder",
                "encoder.block.1.layer.1.DenseReluDense.wo.weight",
                fp8,
            ),
            ("text_encoder", "shared.weight", None),
        ] {
            assert_eq!(format_of(&opened, component, tensor), format, "{file}: {tensor}");
        }
        let (_root, path) = made(false);
        let apart = distance(&latent(&opened), &latent(&open(&path, &F32)));
        println!("{file}: {apart:e}");
        assert!(apart <= 1e-5, "{file}: {apart:e}");
    }
}
