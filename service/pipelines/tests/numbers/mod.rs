//! Reading of fixtures, and error norms.
#![allow(dead_code, clippy::expect_used)] // Each binary takes what it needs; what tests share is outside of them.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::InitImage;
use serde::de::DeserializeOwned;

use crate::device::{crate_folder, here};

/// The folder of the fixtures.
pub(crate) fn fixtures() -> PathBuf {
    crate_folder().join("fixtures")
}

/// All tensors of a fixture file, in host memory.
pub(crate) fn tensors(path: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(fixtures().join(path), &Device::Cpu).expect("a fixture")
}

/// A component with these tensors, on the device of the tests.
pub(crate) fn resident(tensors: &HashMap<String, Tensor>) -> ComponentTensors {
    let copies = tensors.iter().map(|(name, tensor)| (name.clone(), here(tensor)));
    ComponentTensors::new(copies.collect())
}

/// A component of a fixture's pipeline, on the device of the tests.
pub(crate) fn component(path: &str) -> ComponentTensors {
    resident(&tensors(path))
}

/// A JSON file below the fixtures.
pub(crate) fn json<T: DeserializeOwned>(path: &str) -> T {
    let text = std::fs::read_to_string(fixtures().join(path)).expect("a fixture");
    serde_json::from_str(&text).expect("a fixture's JSON")
}

/// All elements of a tensor.
pub(crate) fn numbers(tensor: &Tensor) -> Vec<f32> {
    let flat = tensor
        .to_dtype(DType::F32)
        .and_then(|t| t.flatten_all())
        .and_then(|t| t.to_vec1());
    flat.expect("numbers")
}

/// Relative L2 error, in f64. Infinite if shapes differ or a value is not finite.
pub(crate) fn distance(found: &Tensor, expected: &Tensor) -> f64 {
    if found.dims() != expected.dims() {
        return f64::INFINITY;
    }
    let [found, expected] = [found, expected].map(|tensor| {
        let tensor = tensor
            .to_device(&Device::Cpu)
            .and_then(|t| t.to_dtype(DType::F64));
        let flat = tensor.and_then(|t| t.flatten_all()?.to_vec1::<f64>());
        flat.expect("numbers")
    });
    let length = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let apart = length(&mut found.iter().zip(&expected).map(|(f, e)| f - e));
    let relative = apart / length(&mut expected.iter().copied());
    if relative.is_finite() {
        relative
    } else {
        f64::INFINITY
    }
}

/// Largest absolute difference.
pub(crate) fn largest_difference(found: &Tensor, expected: &Tensor) -> f32 {
    assert_eq!(found.dims(), expected.dims());
    numbers(found)
        .iter()
        .zip(numbers(expected))
        .map(|(f, e)| (f - e).abs())
        .fold(0.0, f32::max)
}

/// A picture of a fixture, `[height, width, 3]` bytes, to start from.
pub(crate) fn init_image(picture: &Tensor) -> InitImage {
    let (height, width, _) = picture.dims3().expect("a picture");
    let rgb = picture.flatten_all().and_then(|bytes| bytes.to_vec1::<u8>());
    InitImage {
        width: width as u32,
        height: height as u32,
        rgb: rgb.expect("bytes").into(),
    }
}
