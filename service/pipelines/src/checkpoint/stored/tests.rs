//! Weights in the formats of other programs, as those programs write them (`fixtures/make_format_fixtures.py`), are what those
//! programs say that they are.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use gpu::QuantizedWeight;

use super::*;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/formats")
}

/// The checkpoint in a file, without the prefix of its names.
fn checkpoint(file: &str) -> Result<Checkpoint, ModelError> {
    let path = folder().join(file);
    let bare = |name: &str| Some(name.trim_start_matches("model.diffusion_model.").to_owned());
    Checkpoint::of_file(&open(&path)?, bare)
}

/// The weight of a layer in f32.
fn dequantized(checkpoint: &Checkpoint, layer: &str) -> Result<Tensor, ModelError> {
    let stored = checkpoint.tensor(&format!("{layer}.weight"))?;
    let mut bytes = Vec::new();
    for piece in &stored.parts {
        match piece {
            SourcePiece::Inline(inline) => bytes.extend_from_slice(inline),
            SourcePiece::File { file, range } => {
                let whole = std::fs::read(file).unwrap();
                let (begin, length) = (range.offset as usize, range.length as usize);
                bytes.extend_from_slice(&whole[begin..begin + length]);
            }
        }
    }
    let (rows, columns) = rows_and_columns(&stored.shape);
    let format = match stored.held {
        StoredAs::Quantized(format) => format,
        StoredAs::Plain(numbers) => {
            assert_eq!(numbers, Stored::Bf16, "{layer}");
            let tensor = Tensor::from_raw_buffer(&bytes, DType::BF16, &stored.shape, &Device::Cpu);
            return Ok(tensor.unwrap().to_dtype(DType::F32).unwrap());
        }
    };
    assert_eq!(bytes.len() as u64, format.bytes(rows, columns).0, "{layer}");
    let count = bytes.len();
    let weight = QuantizedWeight {
        bytes: Tensor::from_vec(bytes, count, &Device::Cpu).unwrap(),
        format,
        shape: stored.shape.clone(),
    };
    Ok(ops::dequantize(&weight, DType::F32).unwrap())
}

/// Relative L2 distance of the rows and columns that are there in both: files pad some weights.
fn apart(found: &Tensor, expected: &Tensor) -> f64 {
    let (rows, columns) = expected.dims2().unwrap();
    let found = found.narrow(0, 0, rows).unwrap().narrow(1, 0, columns).unwrap();
    let numbers = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let (found, expected) = (numbers(&found), numbers(expected));
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let pairs = found.iter().zip(&expected);
    let apart = square(&mut pairs.map(|(f, e)| f64::from(*f) - f64::from(*e)));
    (apart / square(&mut expected.iter().map(|e| f64::from(*e)))).sqrt()
}

/// Files of formats that are refused, and a word of the refusal.
const REFUSED: [(&str, &str); 8] = [
    ("comfy_awq_w4a16.safetensors", "awq_w4a16"),
    ("comfy_w6a8.safetensors", "four bits"),
    ("torchao.safetensors", "torchao"),
    ("torchao_more.safetensors", "torchao"),
    ("awq.safetensors", "AWQ"),
    ("svdq_int4.safetensors", "SVDQuant"),
    ("svdq_fp4.safetensors", "SVDQuant"),
    ("svdq_awq.safetensors", "SVDQuant"),
];

/// Layers of files that are read otherwise, and a word of the refusal.
const REFUSED_LAYERS: [(&str, &str, &str); 2] = [
    ("comfy_nvfp4.safetensors", "smoothed", "pre_quant_scale"),
    ("comfy_w4a8.safetensors", "f32_scales", "weight_s_rel"),
];

/// Files whose types of blocks are refused by the reader of headers.
const UNREAD_TYPES: [&str; 2] = ["gguf_iq.gguf", "gguf_fp4.gguf"];

#[test]
fn every_layer_is_what_its_own_program_reads_or_refused_by_name() {
    let all = candle_core::safetensors::load(folder().join("expected.safetensors"), &Device::Cpu).unwrap();
    let mut by_file: BTreeMap<&str, Vec<(&str, &Tensor)>> = BTreeMap::new();
    for (name, expected) in &all {
        let (file, layer) = name.split_once('/').unwrap();
        if !layer.ends_with(".stored_error") {
            by_file.entry(file).or_default().push((layer, expected));
        }
    }
    let (mut read, mut refused) = (0, 0);
    for (stem, layers) in by_file {
        let file = match folder().join(format!("{stem}.gguf")).is_file() {
            true => format!("{stem}.gguf"),
            false => format!("{stem}.safetensors"),
        };
        let opened = checkpoint(&file);
        if let Some((_, word)) = REFUSED.iter().find(|(name, _)| **name == file) {
            let of_layer = |(layer, _): &(&str, &Tensor)| {
                let checkpoint = checkpoint(&file)?;
                dequantized(&checkpoint, layer).map(|_| ())
            };
            for layer in &layers {
                let error = of_layer(layer).expect_err(&file).to_string();
                assert!(error.contains(word), "{file}: {error}");
                refused += 1;
            }
            continue;
        }
        if UNREAD_TYPES.contains(&&*file) {
            let error = opened.map(|_| ()).expect_err(&file).to_string();
            assert!(error.contains("what is read"), "{file}: {error}");
            refused += layers.len();
            continue;
        }
        let checkpoint = opened.unwrap();
        for (layer, expected) in layers {
            let bare = layer.trim_start_matches("model.diffusion_model.");
            let found = dequantized(&checkpoint, bare);
            let is_refused = REFUSED_LAYERS
                .iter()
                .find(|(name, refused, _)| **name == file && *refused == layer);
            if let Some((_, _, word)) = is_refused {
                let error = found.expect_err(layer).to_string();
                assert!(error.contains(word), "{file} {layer}: {error}");
                refused += 1;
                continue;
            }
            let distance = apart(&found.unwrap(), expected);
            println!("{file} {layer}: {distance:.1e}");
            // Rotations are sums in another order; all else is exact.
            assert!(distance < 1e-6, "{file} {layer}: {distance:e}");
            read += 1;
        }
    }
    assert_eq!((read, refused), (29, 23));
}

#[test]
fn scales_in_the_order_of_tensor_cores_are_cut_only_at_tiles() {
    let checkpoint = checkpoint("comfy_nvfp4.safetensors").unwrap();
    let stored = checkpoint.tensor("padded.weight").unwrap();
    let pieces = |first: usize, count: usize| stored.pieces(&[Rows { first, count }]);
    assert!(pieces(0, stored.shape[0]).is_ok());
    let error = pieces(0, 16).expect_err("a part of a tile").to_string();
    assert!(error.contains("reach over the ends"), "{error}");
    // Of so many rows one is a tile; its scales are as many as its blocks, four to a tile.
    let one = pieces(0, 128).unwrap();
    let blocks = stored.shape[1] / 16;
    let lengths: Vec<u64> = one.iter().map(SourcePiece::length).collect();
    let expected = [4, 12, 512 * blocks.div_ceil(4), 64 * stored.shape[1]].map(|bytes| bytes as u64);
    assert_eq!(lengths, expected);
}
