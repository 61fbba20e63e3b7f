//! Weights in the formats of other programs, as those programs write them (`fixtures/make_format_fixtures.py`), are what those
//! programs say that they are.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, CpuCard, CpuSettings, Gpu as _, InputShift, QuantizedWeight, Weight};
use model::ComponentFiles;
use residency::{Component, ComponentId, Part};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};

use super::*;
use crate::checkpoint::TensorSpec;
use crate::checkpoint::components::{Requested, component_of_specs, whole};
use crate::checkpoint::role::QuantizeRole;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/formats")
}

/// The checkpoint in a file, without the prefix of its names.
fn checkpoint(file: &str) -> Result<Checkpoint, ModelError> {
    let path = folder().join(file);
    let bare = |name: &str| Some(name.trim_start_matches("model.diffusion_model.").to_owned());
    Checkpoint::of_file(&open(&path)?, bare)
}

/// The bytes of pieces.
fn bytes_of(pieces: &[SourcePiece]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in pieces {
        match piece {
            SourcePiece::Inline(inline) => bytes.extend_from_slice(inline),
            SourcePiece::File { file, range } => {
                let whole = std::fs::read(file).unwrap();
                let (begin, length) = (range.offset as usize, range.length as usize);
                bytes.extend_from_slice(&whole[begin..begin + length]);
            }
        }
    }
    bytes
}

/// The weight of a layer in f32.
fn dequantized(checkpoint: &Checkpoint, layer: &str) -> Result<Tensor, ModelError> {
    let stored = checkpoint.tensor(&format!("{layer}.weight"))?;
    let count = stored.shape[0];
    dequantized_rows(&stored, &[Rows { first: 0, count }])
}

/// Rows of a weight in f32.
fn dequantized_rows(stored: &StoredTensor, rows: &[Rows]) -> Result<Tensor, ModelError> {
    let layer = &stored.name;
    let bytes = bytes_of(&stored.pieces(rows)?);
    let mut stored = stored.clone();
    stored.shape[0] = rows.iter().map(|rows| rows.count).sum();
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

/// Files whose types of blocks are refused by the reader of headers.
const UNREAD_TYPES: [&str; 1] = ["gguf_iq.gguf"];

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
            let distance = apart(&found.unwrap(), expected);
            println!("{file} {layer}: {distance:.1e}");
            // Rotations and low-rank products are sums in another order; all else is exact.
            assert!(distance < 1e-6, "{file} {layer}: {distance:e}");
            read += 1;
        }
    }
    assert_eq!((read, refused), (47, 5));
}

/// Cards compute in bf16, where numbers that opening a file computes, as biases and modulators of SVDQuant, are converted too.
#[test]
fn every_layer_loads_in_the_dtypes_of_cards() {
    let expected =
        candle_core::safetensors::load(folder().join("expected.safetensors"), &Device::Cpu).unwrap();
    let files: BTreeSet<&str> = expected
        .keys()
        .map(|name| name.split_once('/').unwrap().0)
        .collect();
    let mut biases = 0;
    for stem in files {
        let endings = ["safetensors", "gguf"].map(|ending| format!("{stem}.{ending}"));
        let file = endings
            .into_iter()
            .find(|file| folder().join(file).is_file())
            .unwrap();
        if UNREAD_TYPES.contains(&&*file) {
            continue;
        }
        let opened = checkpoint(&file).unwrap();
        let is_of_layer = |name: &&str| name.ends_with(".weight") || name.ends_with(".bias");
        let of_layers = opened.names().filter(is_of_layer).map(str::to_owned);
        let tensors: Vec<StoredTensor> = of_layers.map(|name| opened.tensor(&name).unwrap()).collect();
        for dtype in [DType::BF16, DType::F16] {
            let wanted = Requested {
                component: "transformer",
                dtype,
                format: None,
                role_of: |_| QuantizeRole::AsStored,
            };
            let shapes = tensors
                .iter()
                .map(|stored| (stored.name.clone(), stored.shape.clone()));
            let specs = whole(shapes.collect());
            let component = component_of_specs(&folder(), &opened, &specs, wanted, None).unwrap();
            let loaded = loaded(&component);
            for stored in &tensors {
                let all = Rows {
                    first: 0,
                    count: stored.shape[0],
                };
                match loaded.weight(&stored.name).unwrap() {
                    Weight::Quantized(weight) => {
                        let bytes = weight.bytes.to_vec1::<u8>().unwrap();
                        assert!(
                            bytes == bytes_of(&stored.pieces(&[all]).unwrap()),
                            "{file} {}",
                            stored.name
                        );
                    }
                    Weight::Full(numbers) => {
                        assert_eq!(
                            (numbers.dtype(), numbers.dims()),
                            (dtype, &*stored.shape),
                            "{file}"
                        );
                        biases += usize::from(stored.name.ends_with(".bias"));
                    }
                }
            }
        }
    }
    assert!(biases >= 8, "{biases} biases");
}

/// A component, loaded with the CPU card.
fn loaded(files: &ComponentFiles) -> Arc<ComponentTensors> {
    let component = Component {
        id: ComponentId::new("transformer"),
        name: "transformer".to_owned(),
        bytes: files.plan.bytes(),
        reload_seconds: 0.0,
        parts: files.plan.parts(),
    };
    let mut card = CpuCard::new(CpuSettings::default()).unwrap();
    let mut progress = |_| ControlFlow::Continue(());
    card.load(&component, &files.plan, Part::WHOLE, &mut progress)
        .unwrap();
    card.tensors(&component.id).unwrap()
}

/// Fused layers are cut into rows; a layer of one part or of two ranges has the rows of the whole.
#[test]
fn rows_of_a_weight_are_those_of_the_whole() {
    // File, layer, the rows of a part.
    for (file, layer, count) in [
        ("svdq_int4.safetensors", "layer", 128),
        ("comfy_awq_w4a16.safetensors", "layer", 8),
        ("svdq_awq.safetensors", "layer", 12),
        ("torchao.safetensors", "int4", 8),
        ("torchao_more.safetensors", "intx", 8),
        ("torchao_more.safetensors", "int8_zeros", 8),
        ("torchao_more.safetensors", "mxfp8", 8),
        ("torchao_more.safetensors", "nvfp4", 8),
        ("comfy_w6a8.safetensors", "layer", 8),
        ("comfy_w4a8.safetensors", "f32_scales", 8),
    ] {
        let checkpoint = checkpoint(file).unwrap();
        let stored = checkpoint.tensor(&format!("{layer}.weight")).unwrap();
        let whole = dequantized(&checkpoint, layer).unwrap();
        let range = |first| Rows { first, count };
        let last = dequantized_rows(&stored, &[range(count)]).unwrap();
        assert_eq!(
            apart(&last, &whole.narrow(0, count, count).unwrap()),
            0.0,
            "{file}"
        );
        let both = dequantized_rows(&stored, &[range(count), range(0)]).unwrap();
        let parts = [
            whole.narrow(0, count, count).unwrap(),
            whole.narrow(0, 0, count).unwrap(),
        ];
        let swapped = Tensor::cat(&parts, 0).unwrap();
        assert_eq!(apart(&both, &swapped), 0.0, "{file}");
    }
    for (file, rows) in [
        ("svdq_int4.safetensors", 64),
        ("awq.safetensors", 8),
        ("svdq_awq.safetensors", 6),
    ] {
        let stored = checkpoint(file).unwrap().tensor("layer.weight").unwrap();
        let error = stored
            .pieces(&[Rows {
                first: 0,
                count: rows,
            }])
            .expect_err(file);
        assert!(error.to_string().contains("reach over the ends"), "{error}");
    }
}

#[test]
fn biases_of_nunchaku_are_put_into_place() {
    for file in ["svdq_int4.safetensors", "svdq_fp4.safetensors"] {
        let checkpoint = checkpoint(file).unwrap();
        let stored = checkpoint.tensor("layer.bias").unwrap();
        assert!(matches!(stored.held, StoredAs::Plain(Stored::F32)));
        let whole = std::fs::read(folder().join(file)).unwrap();
        let in_file = SafeTensors::deserialize(&whole).unwrap();
        let in_file = in_file.tensor("layer.bias").unwrap();
        let in_file = Tensor::from_raw_buffer(in_file.data(), DType::BF16, in_file.shape(), &Device::Cpu);
        let in_file = in_file.unwrap().to_dtype(DType::F32).unwrap();
        // In tiles of 128: [8, 4, 2, 2] of the eights of rows, pairs, halves of 16 and rows of a pair.
        let tiles = in_file.elem_count() / 128;
        let tiles = in_file.reshape((tiles, 8, 4, 2, 2)).unwrap();
        let expected = tiles.permute((0, 1, 3, 2, 4)).unwrap().flatten_all().unwrap();
        let found: Vec<f32> = bytes_of(&stored.parts)
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            .collect();
        assert_eq!(found, expected.to_vec1::<f32>().unwrap(), "{file}");
        assert_ne!(found, in_file.to_vec1::<f32>().unwrap(), "{file}");
    }
}

/// A file with these tensors: names, types, shapes and bytes.
fn written(tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) -> (tempfile::TempDir, Checkpoint) {
    let root = tempfile::TempDir::new().unwrap();
    let path = root.path().join("one.safetensors");
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    serialize_to_file(views, None, &path).unwrap();
    let checkpoint = Checkpoint::of_file(&open(&path).unwrap(), |name| Some(name.to_owned())).unwrap();
    (root, checkpoint)
}

/// A modulator's rows are stored in the order (channel, part), and 1 is added to the biases of its scales.
#[test]
fn modulators_of_nunchaku_have_their_parts_one_after_the_other() {
    let columns = 64;
    for parts in [3, 6] {
        let rows = parts * columns;
        let codes: Vec<u8> = (0..rows * columns / 2).map(|at| (at * 37 % 251) as u8).collect();
        let halves = |count: usize, of: &dyn Fn(usize) -> f32| -> Vec<u8> {
            let numbers = (0..count).map(|at| half::bf16::from_f32(of(at)).to_le_bytes());
            numbers.flatten().collect()
        };
        let of_file = |rows: usize, codes: &[u8]| {
            vec![
                (
                    "norm1.linear.qweight",
                    Dtype::I32,
                    vec![rows / 4, columns / 2],
                    codes.to_vec(),
                ),
                (
                    "norm1.linear.wscales",
                    Dtype::BF16,
                    vec![1, rows],
                    halves(rows, &|at| 1.0 + at as f32),
                ),
                (
                    "norm1.linear.wzeros",
                    Dtype::BF16,
                    vec![1, rows],
                    halves(rows, &|at| at as f32 / 8.0),
                ),
                (
                    "norm1.linear.bias",
                    Dtype::BF16,
                    vec![rows],
                    halves(rows, &|at| at as f32 / 4.0),
                ),
            ]
        };
        let (_root, checkpoint) = written(&of_file(rows, &codes));
        let found = dequantized(&checkpoint, "norm1.linear").unwrap();
        // The same rows with more of them, which is no modulator: they stay in their places.
        let more: Vec<u8> = codes.iter().chain(&codes).copied().collect();
        let mut plain = of_file(2 * rows, &more);
        if parts == 3 {
            plain = of_file(rows + 4, &[codes.clone(), vec![0; 2 * columns]].concat());
        }
        let (_other, plain) = written(&plain);
        let plain = dequantized(&plain, "norm1.linear").unwrap();
        for row in 0..rows {
            let (part, channel) = (row / columns, row % columns);
            let number = |of: &Tensor, row: usize| of.get(row).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(
                number(&found, row),
                number(&plain, channel * parts + part),
                "{parts}: {row}"
            );
        }
        let bias = checkpoint.tensor("norm1.linear.bias").unwrap();
        let bias: Vec<f32> = bytes_of(&bias.parts)
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            .collect();
        for (row, found) in bias.into_iter().enumerate() {
            let (part, channel) = (row / columns, row % columns);
            let in_file = half::bf16::from_f32((channel * parts + part) as f32 / 4.0).to_f32();
            let added = if part % 3 == 1 { 1.0 } else { 0.0 };
            assert_eq!(found, in_file - added, "{parts}: {row}");
        }
    }
}

/// Layers after a GELU, whose int4 codes are multiplied by shifted inputs.
#[test]
fn only_int4_layers_after_a_gelu_shift_their_inputs() {
    for (file, layer, shift) in [
        (
            "svdq_int4.safetensors",
            "transformer_blocks.0.img_mlp.net.2",
            InputShift::Gelu,
        ),
        (
            "svdq_int4.safetensors",
            "transformer_blocks.0.ff.net.2",
            InputShift::Gelu,
        ),
        (
            "svdq_int4.safetensors",
            "transformer_blocks.0.attn.to_qkv",
            InputShift::None,
        ),
        (
            "svdq_fp4.safetensors",
            "transformer_blocks.0.img_mlp.net.2",
            InputShift::None,
        ),
    ] {
        let path = folder().join(file);
        let rename = |name: &str| Some(name.replace("layer.", &format!("{layer}.")));
        let checkpoint = Checkpoint::of_file(&open(&path).unwrap(), rename).unwrap();
        let stored = checkpoint.tensor(&format!("{layer}.weight")).unwrap();
        let StoredAs::Quantized(format) = stored.held else {
            panic!("{layer} is not quantized")
        };
        assert_eq!(format.input_shift(), shift, "{file} {layer}");
    }
}

/// Codes with scales under other names than ComfyUI's are no codes whose scales are missing.
#[test]
fn float8_of_torchao_and_in_blocks_has_its_scales() {
    for (file, layer) in [
        ("torchao.safetensors", "float8"),
        ("block_fp8.safetensors", "layer"),
    ] {
        let checkpoint = checkpoint(file).unwrap();
        let name = format!("{layer}.weight");
        let shape = checkpoint.tensor(&name).unwrap().shape;
        checkpoint
            .check_unscaled(&[TensorSpec::whole(name, shape)])
            .unwrap();
    }
}

#[test]
fn codes_beside_a_weight_and_other_layouts_are_refused() {
    let path = folder().join("awq.safetensors");
    let twice = |name: &str| Some(name.replace("layer.bias", "layer.weight"));
    let error = Checkpoint::of_file(&open(&path).unwrap(), twice)
        .map(|_| ())
        .unwrap_err();
    assert!(
        error.to_string().contains("two tensors are layer.weight"),
        "{error}"
    );
    let zeros = |bytes: usize| vec![0; bytes];
    // GPTQ has words of eight columns.
    let (_root, gptq) = written(&[
        ("layer.qweight", Dtype::I32, vec![8, 32], zeros(1024)),
        ("layer.qzeros", Dtype::I32, vec![1, 4], zeros(16)),
        ("layer.scales", Dtype::F16, vec![1, 32], zeros(64)),
    ]);
    let error = gptq.tensor("layer.weight").map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("GPTQ"), "{error}");
    // Codes of torchao without its header.
    let (_root, torchao) = written(&[
        ("layer._weight_qdata", Dtype::I8, vec![8, 32], zeros(256)),
        ("layer._weight_scale", Dtype::F32, vec![8, 1], zeros(32)),
    ]);
    let error = torchao
        .tensor("layer.weight")
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(error.contains("_weight_scale"), "{error}");
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
