//! HunyuanVideo's text encoder and tokenizer, and FramePack's encoder of pictures, against transformers and diffusers
//! (`fixtures/make_hunyuan_text_fixtures.py`).

mod pictures;
mod text;
mod tokens;

use std::collections::HashMap;

use candle_core::{DType, Tensor};

use crate::device::ON_CPU;
use crate::numbers::{distance, tensors};

const FOLDER: &str = "hunyuan-text-tiny";

/// A file of the fixtures.
pub(crate) fn path(file: &str) -> String {
    format!("{FOLDER}/{file}")
}

pub(crate) type Tensors = HashMap<String, Tensor>;

/// Weights in f32: the fixtures have them in bf16.
pub(crate) fn weights(component: &str) -> Tensors {
    let wide = |t: Tensor| t.to_dtype(DType::F32).expect("f32");
    let tensors = tensors(&path(&format!("{component}/model.safetensors")));
    tensors.into_iter().map(|(name, t)| (name, wide(t))).collect()
}

pub(crate) fn narrow(tensors: Tensors, dtype: DType) -> Tensors {
    let narrow = |t: Tensor| t.to_dtype(dtype).expect("numbers");
    tensors.into_iter().map(|(name, t)| (name, narrow(t))).collect()
}

pub(crate) fn renamed(tensors: Tensors, rename: impl Fn(&str) -> String) -> Tensors {
    tensors.into_iter().map(|(name, t)| (rename(&name), t)).collect()
}

pub(crate) fn error_of(mutated: &Tensor, expected: &Tensor) -> f64 {
    distance(mutated, expected) / ON_CPU.component
}

/// An error, and the change of the tensors that simulates it.
pub(crate) type Mutation = (&'static str, fn(&mut Tensors));

pub(crate) fn swap(tensors: &mut Tensors, one: &str, other: &str) {
    let (of_one, of_other) = (tensors[one].clone(), tensors[other].clone());
    tensors.insert(one.to_owned(), of_other);
    tensors.insert(other.to_owned(), of_one);
}

pub(crate) fn neutral(tensors: &mut Tensors, name: &str, number: f64) {
    let ones = tensors[name].ones_like().unwrap();
    tensors.insert(name.to_owned(), (ones * number).unwrap());
}
