//! GGUF files as programs for ComfyUI write them.
#![allow(dead_code, clippy::expect_used)] // Each binary takes what it needs; what tests share is outside of them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Tensor};

use crate::numbers::numbers;

/// Numbers of ggml's types.
const F32: u32 = 0;
const F16: u32 = 1;
const Q8_0: u32 = 8;
/// Numbers of a block of Q8_0.
const BLOCK: usize = 32;

/// Writes all tensors in f32.
pub(crate) fn write_f32(tensors: &HashMap<String, Tensor>, path: &Path) {
    let coded = tensors.iter().map(|(name, tensor)| {
        let values = numbers(&tensor.to_dtype(DType::F32).expect("numbers"));
        let bytes = values.iter().flat_map(|number| number.to_le_bytes()).collect();
        (name.clone(), (F32, tensor.dims().to_vec(), bytes))
    });
    write(coded.collect(), path);
}

/// Writes the matrices of blocks in Q8_0 where their rows divide into its blocks, other tensors of several dimensions in f16, and
/// the rest in f32. Returns the numbers that the file stands for.
pub(crate) fn write_q8_0(tensors: &HashMap<String, Tensor>, path: &Path) -> HashMap<String, Tensor> {
    let mut held = HashMap::new();
    let mut coded = BTreeMap::new();
    for (name, tensor) in tensors {
        let (shape, values) = (
            tensor.dims().to_vec(),
            numbers(&tensor.to_dtype(DType::F32).expect("numbers")),
        );
        let is_of_block = name.contains("blocks.") && name.ends_with(".weight");
        let is_coded = is_of_block && shape.len() == 2 && shape[1].is_multiple_of(BLOCK);
        let (kind, bytes, decoded): (u32, Vec<u8>, Vec<f32>) = match (is_coded, shape.len()) {
            (true, _) => {
                let blocks = values.chunks(BLOCK).map(block_of);
                let (bytes, decoded): (Vec<Vec<u8>>, Vec<Vec<f32>>) = blocks.unzip();
                (Q8_0, bytes.concat(), decoded.concat())
            }
            (false, 2..) => {
                let halves: Vec<half::f16> =
                    values.iter().map(|number| half::f16::from_f32(*number)).collect();
                let bytes = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
                (F16, bytes, halves.iter().map(|half| half.to_f32()).collect())
            }
            (false, _) => {
                let bytes = values.iter().flat_map(|number| number.to_le_bytes()).collect();
                (F32, bytes, values)
            }
        };
        let decoded = Tensor::from_vec(decoded, shape.clone(), &Device::Cpu).expect("numbers");
        held.insert(name.clone(), decoded);
        coded.insert(name.clone(), (kind, shape, bytes));
    }
    write(coded, path);
    held
}

/// A block of Q8_0, and its numbers.
fn block_of(values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let largest = values.iter().fold(0f32, |most, number| most.max(number.abs()));
    let scale = half::f16::from_f32(largest / 127.0);
    let code = |number: &f32| (number / scale.to_f32()).round().clamp(-127.0, 127.0) as i8;
    let codes: Vec<i8> = values.iter().map(code).collect();
    let mut bytes = scale.to_le_bytes().to_vec();
    bytes.extend(codes.iter().map(|code| *code as u8));
    let decoded = codes.iter().map(|code| f32::from(*code) * scale.to_f32());
    (bytes, decoded.collect())
}

/// Dimensions are fastest first; the embeddings of patches have five.
fn write(tensors: BTreeMap<String, (u32, Vec<usize>, Vec<u8>)>, path: &Path) {
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    let mut header = b"GGUF".to_vec();
    header.extend(3u32.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend(1u64.to_le_bytes());
    text(&mut header, "general.architecture");
    header.extend(8u32.to_le_bytes());
    text(&mut header, "wan");
    let mut data: Vec<u8> = Vec::new();
    for (name, (kind, shape, bytes)) in tensors {
        text(&mut header, &name);
        header.extend((shape.len() as u32).to_le_bytes());
        for side in shape.iter().rev() {
            header.extend((*side as u64).to_le_bytes());
        }
        header.extend(kind.to_le_bytes());
        header.extend((data.len() as u64).to_le_bytes());
        data.extend(bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    header.resize(header.len().next_multiple_of(32), 0);
    header.extend(data);
    std::fs::write(path, header).expect("a file");
}
