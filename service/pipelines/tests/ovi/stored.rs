//! Files in fp8, with and without scales, as people have them.

use std::path::Path;

use candle_core::{Device, Tensor};
use gpu::{Fp8Scales, Weight, WeightFormat};
use pipelines::Preset;
use safetensors::tensor::{Dtype, TensorView};

use crate::given::{Tensors, file, folder, request};
use crate::numbers::{distance, numbers};
use crate::open_model::{Delivered, F32, OpenModel, on_cpu};
use crate::tiny_ovi::save;

/// The code whose number is nearest.
fn code_of(number: f32) -> u8 {
    let codes = (0..=u8::MAX).filter(|code| gpu::e4m3_to_f32(*code).is_finite());
    let apart = |code: u8| (gpu::e4m3_to_f32(code) - number).abs();
    codes
        .min_by(|a, b| apart(*a).total_cmp(&apart(*b)))
        .expect("a code")
}

/// Writes tensors with the linear layers of blocks in fp8, and returns the numbers that these stand for.
fn write_fp8(tensors: &Tensors, has_scales: bool, path: &Path) -> Tensors {
    let mut raw: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    let mut held = tensors.clone();
    let bytes = |values: &[f32]| values.iter().flat_map(|number| number.to_le_bytes()).collect();
    for (name, tensor) in tensors {
        let (shape, values) = (tensor.dims().to_vec(), numbers(tensor));
        let layer = name
            .strip_suffix(".weight")
            .filter(|layer| layer.contains(".blocks."));
        let Some(layer) = layer.filter(|_| shape.len() == 2) else {
            raw.push((name.clone(), Dtype::F32, shape, bytes(&values)));
            continue;
        };
        let scale = if has_scales { 0.01 } else { 1.0 };
        let codes: Vec<u8> = values.iter().map(|number| code_of(number / scale)).collect();
        let decoded: Vec<f32> = codes.iter().map(|code| gpu::e4m3_to_f32(*code) * scale).collect();
        let decoded = Tensor::from_vec(decoded, shape.clone(), &Device::Cpu).expect("numbers");
        held.insert(name.clone(), decoded);
        raw.push((name.clone(), Dtype::F8_E4M3, shape, codes));
        if has_scales {
            let scale = (
                format!("{layer}.scale_weight"),
                Dtype::F32,
                Vec::new(),
                bytes(&[scale]),
            );
            raw.push(scale);
        }
    }
    if has_scales {
        raw.push(("scaled_fp8".to_owned(), Dtype::F8_E4M3, vec![0], Vec::new()));
    }
    let views = raw.iter().map(|(name, dtype, shape, bytes)| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor");
        (name.clone(), view)
    });
    safetensors::serialize_to_file(views, None, path).expect("a file");
    held
}

fn latents(path: &Path) -> [Tensor; 2] {
    let open = OpenModel::open("ovi", path, &F32);
    let values = open
        .sampled(&request(true), &mut Delivered::default())
        .expect("latents");
    ["latent", "sound_latent"].map(|name| on_cpu(&values[name]))
}

#[test]
fn fp8_stands_for_its_numbers() {
    let folder = folder();
    let path = file(&folder);
    let tensors = candle_core::safetensors::load(&path, &Device::Cpu).expect("a file");
    for has_scales in [false, true] {
        let held = write_fp8(&tensors, has_scales, &path);
        let open = OpenModel::open("ovi", &path, &F32);
        let layer = "audio_model.blocks.1.attn2.k_fusion.weight";
        let format = match open.tensors("transformer").weight(layer).expect("a layer") {
            Weight::Full(_) => None,
            Weight::Quantized(weight) => Some(weight.format),
        };
        let scales = if has_scales {
            Fp8Scales::Tensor
        } else {
            Fp8Scales::None
        };
        assert_eq!(format, Some(WeightFormat::Fp8(scales)));
        let found = latents(&path);
        save(&held, &path);
        for (found, expected) in found.iter().zip(latents(&path)) {
            let error = distance(found, &expected);
            println!("fp8, scales {has_scales}: {error:.2e}");
            assert!(error < 1e-4, "{error:e}");
        }
    }
}

#[test]
fn presets_quantize_the_large_components_alone() {
    let folder = folder();
    let precision = pipelines::Precision {
        quantization: pipelines::Quantization::preset(Preset::EightBit),
        ..F32
    };
    let open = OpenModel::open("ovi", &file(&folder), &precision);
    let is_quantized = |component: &str, tensor: &str| {
        let weight = open.tensors(component).weight(tensor).expect("a tensor");
        matches!(weight, Weight::Quantized(_))
    };
    assert!(is_quantized(
        "transformer",
        "video_model.blocks.0.attn2.v_fusion.weight"
    ));
    assert!(!is_quantized(
        "transformer",
        "audio_model.patch_embedding.2.w1.weight"
    ));
    assert!(!is_quantized(
        "transformer",
        "video_model.blocks.0.attn2.norm_k_fusion.weight"
    ));
    assert!(!is_quantized("audio_vae", "decoder.mid.attn_1.qkv.weight"));
    assert!(!is_quantized("vocoder", "conv_pre.weight_v"));
}
