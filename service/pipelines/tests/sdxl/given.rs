//! Folders, models and requests to begin with.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Tensor};
use pipelines::autoencoders::kl::{Chunking, VaeConfig, VaeDecoder};
use pipelines::{Image, InitImage, Mask, Medium, Precision, Request};
use tempfile::TempDir;

use crate::device::here;
use crate::numbers::{fixtures, json, tensors};
use crate::open_model::{OpenModel, copy};

/// A folder of the whole pipeline that a test may modify.
pub(crate) fn folder() -> TempDir {
    let folder = TempDir::new().expect("a folder");
    copy(&fixtures().join("sdxl-tiny"), folder.path());
    folder
}

/// Changes a JSON file of a folder.
pub(crate) fn edit(folder: &Path, file: &str, change: impl FnOnce(&mut serde_json::Value)) {
    let path = folder.join(file);
    let text = std::fs::read_to_string(&path).expect("a file");
    let mut value = serde_json::from_str(&text).expect("JSON");
    change(&mut value);
    std::fs::write(&path, value.to_string()).expect("a file");
}

/// The same pipeline with a UNet of nine channels.
pub(crate) fn inpaint_folder() -> TempDir {
    let folder = folder();
    let mut weights = tensors("sdxl-tiny/unet/diffusion_pytorch_model.safetensors");
    let wide = tensors("sdxl-tiny/expected/inpaint.safetensors");
    weights.extend(wide.into_iter().map(|(name, tensor)| {
        let narrow = tensor.to_dtype(DType::BF16).expect("numbers");
        (name, narrow)
    }));
    let unet = folder.path().join("unet/diffusion_pytorch_model.safetensors");
    candle_core::safetensors::save(&weights, unet).expect("a file");
    edit(folder.path(), "unet/config.json", |config| {
        config["in_channels"] = 9.into()
    });
    folder
}

/// Puts the noise of a fixture's case into a folder.
pub(crate) fn predict(folder: &Path, prediction: &str) {
    edit(
        folder,
        "scheduler/scheduler_config.json",
        |config| match prediction {
            "epsilon" => {}
            "v_prediction" => config["prediction_type"] = "v_prediction".into(),
            "zero_snr" => {
                config["prediction_type"] = "v_prediction".into();
                config["rescale_betas_zero_snr"] = true.into();
                config["timestep_spacing"] = "trailing".into();
            }
            other => panic!("{other}"),
        },
    );
}

/// An SDXL model with all components resident.
pub(crate) fn open(path: &Path, precision: &Precision) -> OpenModel {
    OpenModel::open("sdxl", path, precision)
}

impl OpenModel {
    /// Decodes a latent of the UNet to floats of 0 to 1, as `output_type="pt"`.
    pub(crate) fn picture(&self, latent: &Tensor) -> Tensor {
        let config: VaeConfig = json("sdxl-tiny/vae/config.json");
        let decoder = VaeDecoder::new(&config, &self.tensors("vae")).expect("a decoder");
        let own = config.unscaled(&here(latent)).expect("a latent");
        decoder
            .decode(&own, Chunking::Whole, &|| false)
            .expect("a picture")
            .affine(0.5, 0.5)
            .and_then(|picture| picture.clamp(0f32, 1f32))
            .expect("a picture")
    }
}

/// A small request, with sides that are not confused with others.
pub(crate) fn request() -> Request {
    Request {
        prompt: "a red circle on a blue square".to_owned(),
        negative_prompt: Some(String::new()),
        true_guidance: 5.0,
        seed: 7,
        ..Request::of(Medium::Image(Image::of(80, 48)), 3, 0.0, 225)
    }
}

/// A picture of this size.
pub(crate) fn picture(width: u32, height: u32) -> InitImage {
    let rgb = (0..3 * width * height).map(|i| (i % 251) as u8);
    InitImage {
        width,
        height,
        rgb: rgb.collect(),
    }
}

/// The same request from a picture, with previews.
pub(crate) fn from_picture() -> Request {
    let image = Image {
        init_image: Some(picture(80, 48)),
        ..Image::of(80, 48)
    };
    Request {
        preview: true,
        steps: 5,
        strength: 0.8,
        medium: Medium::Image(image),
        ..request()
    }
}

/// The same request from a picture of which a part changes.
pub(crate) fn with_mask() -> Request {
    let grey = (0..80 * 48).map(|place| if place % 80 < 37 { 255u8 } else { 0 });
    let image = Image {
        init_image: Some(picture(80, 48)),
        mask: Some(Mask {
            width: 80,
            height: 48,
            grey: grey.collect(),
        }),
        ..Image::of(80, 48)
    };
    Request {
        medium: Medium::Image(image),
        ..from_picture()
    }
}

/// The pipeline as a single file in a folder of its own, beside the folder of its tokenizers and configurations. `further` are
/// tensors that programs add.
pub(crate) fn single_file(further: &[&str]) -> TempDir {
    let root = TempDir::new().expect("a folder");
    copy(&fixtures().join("sdxl-tiny"), &root.path().join("base"));
    let parts = [
        ("unet", "diffusion_pytorch_model.safetensors"),
        ("vae", "diffusion_pytorch_model.safetensors"),
        ("text_encoder", "model.safetensors"),
        ("text_encoder_2", "model.safetensors"),
    ];
    let mut all: HashMap<String, Tensor> = HashMap::new();
    for (component, file) in parts {
        std::fs::remove_file(root.path().join("base").join(component).join(file)).expect("a file");
        let of_component = tensors(&format!("sdxl-tiny/{component}/{file}"));
        all.extend(
            of_component
                .into_iter()
                .map(|(name, t)| (format!("{component}/{name}"), t)),
        );
    }
    let names: Vec<HashMap<String, String>> = json("sdxl-tiny/expected/single.json");
    let made = |of: &str| -> candle_core::Result<Tensor> {
        let (component, names) = of.split_once('/').expect("a component");
        let parts = names.split('|').map(|name| {
            let tensor = &all[&format!("{component}/{}", name.trim_end_matches('^'))];
            match name.ends_with('^') {
                true => tensor.t()?.contiguous(),
                false => Ok(tensor.clone()),
            }
        });
        Tensor::cat(&parts.collect::<candle_core::Result<Vec<_>>>()?, 0)
    };
    let mut file: HashMap<String, Tensor> = names[0]
        .iter()
        .map(|(name, of)| (name.clone(), made(of).expect("a tensor")))
        .collect();
    for name in further {
        let empty = Tensor::zeros(1, DType::F32, &candle_core::Device::Cpu).expect("a tensor");
        file.insert((*name).to_owned(), empty);
    }
    let path = root.path().join("model.safetensors");
    candle_core::safetensors::save(&file, path).expect("a file");
    root
}
