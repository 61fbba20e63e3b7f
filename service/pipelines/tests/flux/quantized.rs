//! Quantized weights, made at load and stored by other programs, against the reference with dequantized weights
//! (`fixtures/make_quantized_fixtures.py`); and refusals.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Tensor};
use gpu::{Fp8Scales, GgufType, LoadPlan, Target, Weight, WeightFormat};
use pipelines::flux::FluxModel;
use pipelines::text::t5::{T5Config, T5Encoder};
use pipelines::{Model, ModelError, Precision, Preset, Quantization, Request, Unobserved};
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

use crate::checkpoints::{set, write_json};
use crate::components::velocity;
use crate::device::tolerances;
use crate::given::{black, copy_of, from_image, open, open_in, request, sized};
use crate::numbers::{distance, fixtures, json, tensors};
use crate::open_model::{F32, OpenModel, on_cpu};

const EXPECTED: &str = "flux-tiny-quantized/expected.safetensors";
const WEIGHTS: &str = "transformer/diffusion_pytorch_model.safetensors";

/// f32, with these components in these formats.
fn quantized(components: &[(&str, &str)]) -> Precision {
    Precision {
        quantization: Quantization::of(Preset::Full, components.iter().copied()).expect("formats"),
        ..F32
    }
}

/// A schnell fixture that a test may modify.
fn schnell() -> TempDir {
    copy_of(&["flux-tiny", "flux-tiny-schnell"])
}

/// Copies a file of the quantized fixtures into a folder.
fn put(folder: &TempDir, from: &str, to: &str) -> std::path::PathBuf {
    let target = folder.path().join(to);
    std::fs::copy(fixtures().join("flux-tiny-quantized").join(from), &target).expect("a copy");
    target
}

/// Error of a opened's transformer against this output of the reference.
fn apart(opened: &OpenModel<FluxModel>, answer: &str) -> f64 {
    let inputs = tensors("flux-tiny/expected/transformer_schnell.safetensors");
    let found = velocity("flux-tiny-schnell", &opened.tensors("transformer"), &inputs);
    distance(&found, &tensors(EXPECTED)[answer])
}

/// Asserts the format of every tensor, and that the component has exactly the predicted bytes.
fn formats(opened: &OpenModel<FluxModel>, component: &str) -> BTreeMap<String, Option<WeightFormat>> {
    let tensors = opened.tensors(component);
    let (mut bytes, mut formats) = (0, BTreeMap::new());
    for name in tensors.names() {
        let (held, format) = match tensors.weight(name).expect("a tensor") {
            Weight::Full(tensor) => (tensor.elem_count() * tensor.dtype().size_in_bytes(), None),
            Weight::Quantized(quantized) => (quantized.bytes.elem_count(), Some(quantized.format)),
        };
        bytes += held as u64;
        formats.insert(name.to_owned(), format);
    }
    let components = opened.model.components().iter();
    let said: Vec<u64> = components
        .filter(|said| said.name == component)
        .map(|said| said.bytes.0)
        .collect();
    assert_eq!(said, [bytes], "{component}");
    formats
}

#[test]
fn a_transformer_quantized_at_load_equals_the_reference_with_dequantized_weights() {
    let folder = schnell();
    for name in ["int8", "fp8", "nf4", "nf4-double"] {
        let opened = open_in(folder.path(), quantized(&[("transformer", name)]));
        let format: WeightFormat = name.parse().expect("a format");
        let held = formats(&opened, "transformer");
        assert_eq!(held["transformer_blocks.0.norm1.linear.weight"], Some(format));
        assert_eq!(held["single_transformer_blocks.0.proj_out.weight"], Some(format));
        assert_eq!(held["norm_out.linear.weight"], Some(format));
        for full in [
            "x_embedder.weight",
            "transformer_blocks.0.attn.norm_q.weight",
            "proj_out.bias",
        ] {
            assert_eq!(held[full], None, "{full}");
        }
        assert_eq!(opened.model.format_of("transformer"), Some(format));
        assert_eq!(opened.model.format_of("vae"), None);
        let apart = apart(&opened, name);
        assert!(apart < tolerances().component, "{name}: {apart:e}");
    }
    // The outputs differ by more than the tolerance: a wrong format would be detected.
    let answers = tensors(EXPECTED);
    let between = distance(&answers["nf4"], &answers["nf4-double"]);
    assert!(between > 10.0 * tolerances().component, "{between:e}");
}

#[test]
fn stored_nf4_in_a_single_file_with_fused_rows_equals_the_reference() {
    let folder = schnell();
    let file = put(&folder, "nf4.safetensors", "nf4.safetensors");
    let opened = open(&file);
    let held = formats(&opened, "transformer");
    for name in [
        "transformer_blocks.0.attn.add_v_proj.weight",
        "norm_out.linear.weight",
        "x_embedder.weight",
    ] {
        assert_eq!(held[name], Some(WeightFormat::Nf4), "{name}");
    }
    let apart = apart(&opened, "stored_nf4");
    assert!(apart < tolerances().component, "{apart:e}");
    assert_eq!(opened.model.format_of("transformer"), Some(WeightFormat::Nf4));
}

/// A schnell whose transformer is in bitsandbytes' nf4 with double quantization.
fn nf4_double() -> TempDir {
    let folder = schnell();
    put(&folder, "nf4-double/config.json", "transformer/config.json");
    put(&folder, "nf4-double/diffusion_pytorch_model.safetensors", WEIGHTS);
    folder
}

#[test]
fn stored_nf4_with_double_quantization_equals_the_reference() {
    let folder = nf4_double();
    let opened = open(folder.path());
    let held = formats(&opened, "transformer");
    assert_eq!(held["proj_out.weight"], Some(WeightFormat::Nf4Double));
    let whole = apart(&opened, "stored_nf4_double");
    assert!(whole < tolerances().component, "{whole:e}");

    // The bytes of codes may have another declared type.
    let path = folder.path().join(WEIGHTS);
    let sound = Raw::open(&path);
    let mut renamed = sound.clone();
    let (_, _, codes) = sound.0["proj_out.weight"].clone();
    renamed.add("proj_out.weight", Dtype::BF16, &[codes.len() / 2, 1], codes);
    renamed.save(&path);
    let as_bf16 = apart(&open(folder.path()), "stored_nf4_double");
    assert!(as_bf16 < tolerances().component, "{as_bf16:e}");
    sound.save(&path);

    // Parts of one weight may be in different shards.
    let mut shards = [Raw::default(), Raw::default()];
    let mut weight_map = BTreeMap::new();
    for (i, (name, tensor)) in Raw::open(&path).0.into_iter().enumerate() {
        weight_map.insert(name.clone(), format!("shard{}.safetensors", i % 2));
        shards[i % 2].0.insert(name, tensor);
    }
    std::fs::remove_file(&path).expect("no whole file");
    for (i, shard) in shards.iter().enumerate() {
        shard.save(&folder.path().join(format!("transformer/shard{i}.safetensors")));
    }
    write_json(
        &path.with_extension("safetensors.index.json"),
        serde_json::json!({"weight_map": weight_map}),
    );
    let sharded = apart(&open(folder.path()), "stored_nf4_double");
    assert!(sharded < tolerances().component, "{sharded:e}");
}

#[test]
fn stored_int8_equals_the_reference() {
    let folder = schnell();
    put(&folder, "t5-int8/config.json", "text_encoder_2/config.json");
    put(
        &folder,
        "t5-int8/model.safetensors",
        "text_encoder_2/model.safetensors",
    );
    let opened = open(folder.path());
    let held = formats(&opened, "text_encoder_2");
    let block = "encoder.block.0.layer";
    assert_eq!(
        held[&format!("{block}.0.SelfAttention.q.weight")],
        Some(WeightFormat::Int8)
    );
    assert_eq!(held[&format!("{block}.1.DenseReluDense.wo.weight")], None);
    let config: T5Config = json("flux-tiny/text_encoder_2/config.json");
    let encoder =
        T5Encoder::new(&config, "text_encoder_2", &opened.tensors("text_encoder_2")).expect("an encoder");
    let ids = tensors("flux-tiny/expected/t5.safetensors")["0.ids"].clone();
    let ids: Vec<u32> = ids
        .flatten_all()
        .and_then(|ids| ids.to_dtype(DType::U32)?.to_vec1())
        .expect("ids");
    let found = encoder.forward(&ids, &|| false).expect("an encoding");
    let apart = distance(&found, &tensors(EXPECTED)["t5_int8"]);
    println!("t5_int8: {apart:.2e}");
    assert!(apart < tolerances().component, "{apart:e}");
}

/// Tensors of a file in dtypes that are created from bytes.
#[derive(Clone, Default)]
struct Raw(BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>);

impl Raw {
    fn open(path: &Path) -> Raw {
        let bytes = std::fs::read(path).expect("a file");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
        let tensor = |(name, view): (String, TensorView<'_>)| {
            (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        };
        Raw(file.tensors().into_iter().map(tensor).collect())
    }

    fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize], data: Vec<u8>) {
        self.0.insert(name.to_owned(), (dtype, shape.to_vec(), data));
    }

    fn save_with(&self, path: &Path, metadata: Option<HashMap<String, String>>) {
        let views = self.0.iter().map(|(name, (dtype, shape, data))| {
            let view = TensorView::new(*dtype, shape.clone(), data).expect("a tensor");
            (name, view)
        });
        safetensors::serialize_to_file(views, metadata, path).expect("a file");
    }

    fn save(&self, path: &Path) {
        self.save_with(path, None);
    }

    /// Names of layers with a weight, and its row count.
    fn layers(&self) -> Vec<(String, usize)> {
        let weights = self.0.iter().filter(|(_, (_, shape, _))| shape.len() == 2);
        let layers = weights.filter_map(|(name, (_, shape, _))| {
            Some((name.strip_suffix(".weight")?.to_owned(), *shape.first()?))
        });
        layers.collect()
    }
}

fn floats(numbers: impl IntoIterator<Item = f32>) -> Vec<u8> {
    numbers.into_iter().flat_map(f32::to_le_bytes).collect()
}

#[test]
fn stored_fp8_with_no_scale_one_scale_or_row_scales_equals_the_reference() {
    let folder = schnell();
    let file = put(&folder, "fp8.safetensors", "fp8.safetensors");
    let codes = Raw::open(&file);
    let check = |answer: &str, format: WeightFormat, outside: Option<WeightFormat>| {
        let opened = open(&file);
        let held = formats(&opened, "transformer");
        assert_eq!(held["transformer_blocks.0.attn.to_k.weight"], Some(format));
        assert_eq!(held["norm_out.linear.weight"], Some(format));
        assert_eq!(held["x_embedder.weight"], outside);
        assert_eq!(held["transformer_blocks.0.attn.to_k.bias"], None);
        assert_eq!(held["transformer_blocks.0.attn.norm_k.weight"], None);
        let apart = apart(&opened, answer);
        assert!(apart < tolerances().component, "{answer}: {apart:e}");
    };
    check("fp8_unscaled", WeightFormat::Fp8(Fp8Scales::None), None);

    // ComfyUI's older and newer names.
    let tensor_scale = WeightFormat::Fp8(Fp8Scales::Tensor);
    for (scale, shape, unused) in [
        ("scale_weight", &[][..], "scale_input"),
        ("weight_scale", &[1][..], "input_scale"),
    ] {
        let mut scaled = codes.clone();
        for (layer, _) in codes.layers() {
            scaled.add(&format!("{layer}.{scale}"), Dtype::F32, shape, floats([0.75]));
            scaled.add(&format!("{layer}.{unused}"), Dtype::F32, &[], floats([7.0]));
        }
        let metadata = match scale {
            "scale_weight" => {
                scaled.add("scaled_fp8", Dtype::F8_E4M3, &[0], Vec::new());
                None
            }
            _ => {
                let said = r#"{"format_version": "1.0", "layers": {"img_in": {"format": "float8_e4m3fn"}}}"#;
                Some([("_quantization_metadata".to_owned(), said.to_owned())].into())
            }
        };
        scaled.save_with(&file, metadata);
        check("fp8_tensor", tensor_scale, Some(tensor_scale));
    }

    let mut by_rows = codes.clone();
    for (layer, rows) in codes.layers() {
        let scales = (0..rows).map(|row| 0.5 + (row % 7) as f32 * 0.125);
        by_rows.add(
            &format!("{layer}.weight_scale"),
            Dtype::F32,
            &[rows],
            floats(scales),
        );
    }
    by_rows.save(&file);
    let row_scales = WeightFormat::Fp8(Fp8Scales::Rows);
    check("fp8_rows", row_scales, Some(row_scales));
}

#[test]
fn fp8_scales_of_every_shape_are_read_or_refused() {
    let folder = schnell();
    let file = put(&folder, "fp8.safetensors", "fp8.safetensors");
    let codes = Raw::open(&file);
    let layer = "double_blocks.0.img_attn.proj";
    let rows = codes.0[&format!("{layer}.weight")].1[0];
    let of = |name: &str, dtype: Dtype, shape: &[usize]| {
        let width = match dtype {
            Dtype::F32 => 4,
            Dtype::F64 => 8,
            Dtype::F8_E4M3 => 1,
            _ => 2,
        };
        let mut scaled = codes.clone();
        let data = vec![0; shape.iter().product::<usize>() * width];
        scaled.add(&format!("{layer}.{name}"), dtype, shape, data);
        scaled.save(&file);
        match FluxModel::open(&file, &F32) {
            Ok(Some(model)) => {
                let Some(LoadPlan::Files(sources)) = model.load_plan("transformer") else {
                    panic!("no plan")
                };
                let source = sources
                    .iter()
                    .find(|source| source.name == "transformer_blocks.0.attn.to_out.0.weight");
                Ok(source.expect("the layer").target)
            }
            Ok(None) => panic!("not recognised"),
            Err(error @ ModelError::Unsupported { .. }) => Err(error.to_string()),
            Err(error) => panic!("{error}"),
        }
    };
    let fp8 = |scales| Ok(Target::Quantized(WeightFormat::Fp8(scales)));
    for name in ["weight_scale", "scale_weight"] {
        for shape in [&[][..], &[1], &[1, 1]] {
            for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F64] {
                assert_eq!(
                    of(name, dtype, shape),
                    fp8(Fp8Scales::Tensor),
                    "{dtype:?} {shape:?}"
                );
            }
        }
        for shape in [&[rows][..], &[rows, 1]] {
            assert_eq!(of(name, Dtype::F32, shape), fp8(Fp8Scales::Rows), "{shape:?}");
        }
        // Per column, per block, and with missing or surplus elements; and in unsupported scale types.
        for (dtype, shape) in [
            (Dtype::F32, &[1, rows][..]),
            (Dtype::F32, &[2, rows / 2]),
            (Dtype::F32, &[rows, 1, 1]),
            (Dtype::F32, &[0]),
            (Dtype::F32, &[rows + 1]),
            (Dtype::F16, &[rows]),
            (Dtype::F8_E4M3, &[rows]),
        ] {
            let said = of(name, dtype, shape).expect_err("refused");
            for words in [&format!("{layer}.weight"), "are read", "what is read is"] {
                assert!(said.contains(words), "{dtype:?} {shape:?}: {said}");
            }
        }
    }
    // Scales under another name: without them the codes would be wrong. Also for an encoder, which may have
    // additional tensors.
    let said = of("weight_scale_inv", Dtype::F32, &[]).expect_err("refused");
    assert!(said.contains("weight_scale_inv"), "{said}");
    let t5 = folder.path().join("text_encoder_2/model.safetensors");
    let mut raw = Raw::open(&t5);
    let layer = "encoder.block.0.layer.0.SelfAttention.q";
    let shape = raw.0[&format!("{layer}.weight")].1.clone();
    let codes = vec![0x38; shape.iter().product()];
    raw.add(&format!("{layer}.weight"), Dtype::F8_E4M3, &shape, codes);
    raw.add(&format!("{layer}.input_scale"), Dtype::F32, &[], floats([7.0]));
    raw.save(&t5);
    let held = formats(&open(folder.path()), "text_encoder_2");
    assert_eq!(
        held[&format!("{layer}.weight")],
        Some(WeightFormat::Fp8(Fp8Scales::None))
    );
    raw.add(
        &format!("{layer}.weight_scale_inv"),
        Dtype::F32,
        &[],
        floats([2.0]),
    );
    raw.save(&t5);
    assert_unsupported(folder.path(), &[layer, "weight_scale_inv", "what is read is"]);
}

#[test]
fn a_partly_quantized_checkpoint_is_read_tensor_by_tensor() {
    // fp8 codes for one layer, in a full-precision checkpoint; its bias is fp8 too.
    let folder = schnell();
    let path = folder.path().join(WEIGHTS);
    let sound = Raw::open(&path);
    let layer = "single_transformer_blocks.0.proj_mlp";
    let mut some = sound.clone();
    for kind in ["weight", "bias"] {
        let name = format!("{layer}.{kind}");
        let shape = sound.0[&name].1.clone();
        let codes = (0..shape.iter().product::<usize>()).map(|i| (i % 0x38) as u8);
        some.add(&name, Dtype::F8_E4M3, &shape, codes.collect());
    }
    some.save(&path);
    let unscaled = WeightFormat::Fp8(Fp8Scales::None);
    let opened = open(folder.path());
    let held = formats(&opened, "transformer");
    for (name, format) in held {
        let expected = (name == format!("{layer}.weight")).then_some(unscaled);
        assert_eq!(format, expected, "{name}");
    }
    assert_eq!(opened.model.format_of("transformer"), Some(unscaled));
    // The same values in full precision.
    let found = apart(&opened, "pth");
    for kind in ["weight", "bias"] {
        let (_, shape, codes) = some.0[&format!("{layer}.{kind}")].clone();
        let numbers = codes.into_iter().map(gpu::e4m3_to_f32);
        some.add(&format!("{layer}.{kind}"), Dtype::F32, &shape, floats(numbers));
    }
    some.save(&path);
    let expected = apart(&open(folder.path()), "pth");
    assert!(expected > 1e-2, "the layer shows: {expected}");
    assert!(
        (found - expected).abs() < tolerances().component,
        "{found} {expected}"
    );

    // A scale without quantized weight, and a norm with one.
    let mut scaled = sound.clone();
    scaled.add(&format!("{layer}.weight_scale"), Dtype::F32, &[], floats([2.0]));
    scaled.save(&path);
    assert_unsupported(folder.path(), &[layer, "has a scale", "what is read is"]);
    let norm = "single_transformer_blocks.0.attn.norm_q";
    let mut scaled = sound.clone();
    let shape = sound.0[&format!("{norm}.weight")].1.clone();
    let codes = vec![0x38; shape.iter().product()];
    scaled.add(&format!("{norm}.weight"), Dtype::F8_E4M3, &shape, codes);
    scaled.save(&path);
    assert_eq!(
        formats(&open(folder.path()), "transformer")[&format!("{norm}.weight")],
        None
    );
    scaled.add(&format!("{norm}.weight_scale"), Dtype::F32, &[], floats([2.0]));
    scaled.save(&path);
    assert_unsupported(folder.path(), &[norm, "full precision is needed"]);
}

#[test]
fn int8_with_missing_or_wrong_scales_is_refused() {
    let folder = schnell();
    put(&folder, "t5-int8/config.json", "text_encoder_2/config.json");
    let to = "text_encoder_2/model.safetensors";
    let path = put(&folder, "t5-int8/model.safetensors", to);
    let sound = Raw::open(&path);
    let layer = "encoder.block.0.layer.0.SelfAttention.q";
    let rows = sound.0[&format!("{layer}.weight")].1[0];
    let with = |change: &dyn Fn(&mut Raw)| {
        let mut spoilt = sound.clone();
        change(&mut spoilt);
        spoilt.save(&path);
        refused(folder.path(), &F32)
    };
    let scales = format!("{layer}.SCB");
    for (dtype, count) in [(Dtype::F32, rows + 1), (Dtype::F32, 1), (Dtype::F16, rows)] {
        let width = if dtype == Dtype::F32 { 4 } else { 2 };
        let error = with(&|spoilt| spoilt.add(&scales, dtype, &[count], vec![0; count * width]));
        assert!(matches!(error, ModelError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains(&scales), "{error}");
    }
    let error = with(&|spoilt| {
        spoilt.0.remove(&scales);
    });
    assert!(error.to_string().contains("missing"), "{error}");
    let error = with(&|spoilt| {
        spoilt.0.remove(&scales);
        spoilt.add(
            &format!("{layer}.weight_scale"),
            Dtype::F32,
            &[rows],
            vec![0; 4 * rows],
        );
    });
    assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
    assert!(
        error.to_string().contains("weight_scale: what is read"),
        "{error}"
    );
    let error = with(&|spoilt| spoilt.add(&format!("{layer}.weight_format"), Dtype::U8, &[1], vec![2]));
    assert!(error.to_string().contains("in the order of a card"), "{error}");
    // Rows and columns the other way round.
    let error = with(&|spoilt| {
        let weight = format!("{layer}.weight");
        let (dtype, shape, data) = spoilt.0[&weight].clone();
        spoilt.add(&weight, dtype, &[shape[0] * 2, shape[1] / 2], data.clone());
        spoilt.add(&scales, Dtype::F32, &[shape[0] * 2], vec![0; 8 * shape[0]]);
    });
    assert!(error.to_string().contains("is expected"), "{error}");
}

#[test]
fn scratch_of_quantized_layers_counts_the_tokens_of_the_stage() {
    let folder = copy_of(&["flux-tiny"]);
    let open = |precision: &Precision| {
        FluxModel::open(folder.path(), precision)
            .expect("sound")
            .expect("FLUX")
    };
    let full = open(&F32);
    let formats = ["transformer", "text_encoder_2"].map(|name| (name, "int8"));
    let quantized = open(&quantized(&formats));
    let small = request();
    // Enough tokens that results are larger than weights.
    let large = Request {
        max_sequence_length: 512,
        ..sized(512, 512)
    };
    for (request, components) in [
        (small, &["transformer"][..]),
        (large, &["transformer", "text_encoder_2"]),
    ] {
        let (width, height) = request.medium.size().expect("a picture");
        let (text, picture) = (
            request.max_sequence_length as usize,
            (width / 16 * height / 16) as usize,
        );
        for (component, name, tokens) in [
            ("transformer", "denoise", text + picture),
            // For short texts CLIP, which is not quantized, dominates.
            ("text_encoder_2", "encode_text", text),
        ] {
            if !components.contains(&component) {
                continue;
            }
            let Some(LoadPlan::Files(sources)) = quantized.load_plan(component) else {
                panic!("no plan")
            };
            let of_layer = |source: &gpu::TensorSource| {
                let (rows, columns) = gpu::rows_and_columns(&source.shape);
                match source.target {
                    Target::Quantized(format) => {
                        Some(ops::linear_scratch(format, rows, columns, tokens, DType::F32))
                    }
                    Target::Full(_) => None,
                }
            };
            // The layers of adaptive norms run before the buffers are allocated.
            let of_steps = |source: &&gpu::TensorSource| !source.name.ends_with(".linear.weight");
            let most = sources
                .iter()
                .filter(of_steps)
                .filter_map(of_layer)
                .max()
                .expect("a quantized layer");
            let scratch = |model: &FluxModel| {
                let stages = model.plan(&request).expect("a valid request");
                let stage = stages.iter().find(|stage| stage.name == name).expect("a stage");
                stage.rungs[0].scratch.0
            };
            let added = scratch(&quantized) - scratch(&full);
            assert_eq!(added, most, "{component} of {tokens} tokens");
        }
    }
}

/// Formats that are multiplied differently have different scratch: their learned peaks must be separate.
#[test]
fn a_stage_with_products_in_fp8_has_a_separate_shape_key() {
    let folder = copy_of(&["flux-tiny"]);
    let shapes = |format: &str| {
        let formats = ["transformer", "text_encoder_2"].map(|name| (name, format));
        let model = FluxModel::open(folder.path(), &quantized(&formats))
            .expect("sound")
            .expect("FLUX");
        let stages = model.plan(&request()).expect("a valid request");
        stages
            .into_iter()
            .map(|stage| (stage.name, stage.shape))
            .collect::<Vec<_>>()
    };
    let (int8, fp8, nf4) = (shapes("int8"), shapes("fp8"), shapes("nf4"));
    assert_eq!(nf4, shapes("nf4-double"));
    for (((name, int8), (_, fp8)), (_, nf4)) in int8.iter().zip(&fp8).zip(&nf4) {
        let are_equal = int8 == fp8 || int8 == nf4 || fp8 == nf4;
        assert_eq!(are_equal, name == "decode", "{name}: {int8}, {fp8}, {nf4}");
    }
}

#[test]
fn stored_gguf_equals_the_reference() {
    let folder = schnell();
    let file = put(&folder, "mixed.gguf", "mixed.gguf");
    let opened = open(&file);
    let held = formats(&opened, "transformer");
    let (q8, q4) = (
        Some(WeightFormat::Gguf(GgufType::Q8_0)),
        Some(WeightFormat::Gguf(GgufType::Q4_0)),
    );
    assert_eq!(held["transformer_blocks.0.attn.to_v.weight"], q8);
    assert_eq!(held["single_transformer_blocks.0.attn.to_v.weight"], q4);
    assert_eq!(held["norm_out.linear.weight"], None);
    assert_eq!(opened.model.format_of("transformer"), q8, "most of the bytes");
    let apart = apart(&opened, "gguf");
    assert!(apart < tolerances().component, "{apart:e}");
    let refused = FluxModel::open(&file, &quantized(&[("transformer", "nf4")]));
    let said = refused.expect_err("refused").to_string();
    assert_eq!(
        said,
        "transformer is stored as Q8_0 already: leave its quantization out, with transformer=full beside a preset"
    );
}

#[test]
fn a_pytorch_archive_is_read_and_quantized_like_any_file() {
    let folder = schnell();
    let file = put(&folder, "shared.pth", "shared.pth");
    let apart = apart(&open(&file), "pth");
    assert!(apart < tolerances().component, "{apart:e}");
    let opened = open_in(&file, quantized(&[("transformer", "int8")]));
    let held = formats(&opened, "transformer");
    assert_eq!(
        held["transformer_blocks.0.attn.to_q.weight"],
        Some(WeightFormat::Int8)
    );
}

#[test]
fn a_single_file_may_use_diffusers_names() {
    let folder = schnell();
    let file = folder.path().join("whole.safetensors");
    std::fs::copy(folder.path().join(WEIGHTS), &file).expect("a copy");
    let of_folder = open_in(folder.path(), quantized(&[("transformer", "int8")]));
    let of_file = open_in(&file, quantized(&[("transformer", "int8")]));
    assert_eq!(
        of_file.model.components()[0].bytes,
        of_folder.model.components()[0].bytes
    );
    let apart = apart(&of_file, "int8");
    assert!(apart < tolerances().component, "{apart:e}");
}

#[test]
fn each_component_may_have_another_format() {
    let folder = copy_of(&["flux-tiny"]);
    let full = open(folder.path());
    let asked = [
        ("transformer", "int8"),
        ("vae", "fp8"),
        ("text_encoder", "nf4"),
        ("text_encoder_2", "nf4-double"),
    ];
    let mixed = open_in(folder.path(), quantized(&asked));
    for (name, format) in asked {
        let format = format.parse().ok();
        let held = formats(&mixed, name);
        assert_eq!(mixed.model.format_of(name), format);
        assert_eq!(full.model.format_of(name), None);
        assert!(
            held.values().all(|held| held.is_none() || *held == format),
            "{name}"
        );
    }
    let vae = formats(&mixed, "vae");
    assert!(vae["decoder.conv_in.weight"].is_none() && vae["encoder.conv_out.weight"].is_none());
    assert!(vae["decoder.mid_block.attentions.0.to_q.weight"].is_some());
    for (mixed, full) in mixed.model.components().iter().zip(full.model.components()) {
        assert!(
            mixed.bytes.0 < full.bytes.0 && mixed.id != full.id,
            "{}",
            mixed.name
        );
    }
    let some = FluxModel::open(folder.path(), &quantized(&[("vae", "int8")]));
    let some = some.expect("sound").expect("FLUX");
    assert_eq!(some.components()[0].id, full.model.components()[0].id);
    assert_ne!(some.components()[1].id, mixed.model.components()[1].id);

    // The scratch of dequantization is in the prediction of every stage of this model, and of no other.
    let of_picture = from_image(black(64, 64), 0.5);
    let (with, without) = (mixed.stages(&of_picture), full.stages(&of_picture));
    assert_eq!((with.len(), without.len()), (4, 4));
    for (with, without) in with.iter().zip(&without) {
        assert_eq!(
            (&with.name, with.rungs.len()),
            (&without.name, without.rungs.len())
        );
        for (with, without) in with.rungs.iter().zip(&without.rungs) {
            assert!(with.scratch > without.scratch, "{}", with.label);
        }
    }

    let latent = |opened: &OpenModel<FluxModel>| {
        on_cpu(&opened.latent(&request(), &mut Unobserved).expect("a latent"))
    };
    let (found, expected) = (latent(&mixed), latent(&full));
    let far = distance(&found, &expected);
    println!("mixed: {far:.3} from full precision");
    assert!(far > 1e-3 && far < 0.3, "{far}");
    // The autoencoder alone, with the same latent.
    let pictures = distance(&mixed.picture(&expected), &full.picture(&expected));
    println!("vae in fp8: {pictures:.3}");
    assert!(pictures > 1e-4 && pictures < 0.1, "{pictures}");
}

/// The error of a checkpoint that is refused.
fn refused(path: &Path, precision: &Precision) -> ModelError {
    match FluxModel::open(path, precision) {
        Err(error) => error,
        Ok(model) => panic!("opened: {}", model.is_some()),
    }
}

#[test]
fn impossible_formats_are_refused_with_the_reason() {
    let folder = nf4_double();
    let error = refused(folder.path(), &quantized(&[("transformer", "int8")]));
    assert!(
        matches!(&error, ModelError::Quantization { component, .. } if component == "transformer"),
        "{error}"
    );
    assert_eq!(
        error.to_string(),
        "transformer is stored as nf4-double already: leave its quantization out, with transformer=full beside a preset"
    );
    let error = refused(folder.path(), &quantized(&[("unet", "int8")]));
    assert!(
        matches!(&error, ModelError::Quantization { component, .. } if component == "unet"),
        "{error}"
    );
    assert!(error.to_string().contains("text_encoder_2"), "{error}");
    // Another component of the same model may be quantized.
    assert!(FluxModel::open(folder.path(), &quantized(&[("text_encoder_2", "int8")])).is_ok());
}

fn assert_unsupported(path: &Path, words: &[&str]) {
    let error = refused(path, &F32);
    assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn unsupported_quantizations_are_detected_by_configuration() {
    for method in ["gptq", "quanto", "modelopt", "auto-round"] {
        let folder = schnell();
        set(
            &folder.path().join("transformer/config.json"),
            "quantization_config",
            serde_json::json!({"quant_method": method, "bits": 4}),
        );
        assert_unsupported(folder.path(), &[method, "bitsandbytes", "GGUF", "fp8"]);
    }
    let folder = schnell();
    set(
        &folder.path().join("text_encoder_2/config.json"),
        "quantization_config",
        serde_json::json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "int4"}),
    );
    assert_unsupported(folder.path(), &["bitsandbytes int4", "nf4"]);
}

#[test]
fn unsupported_quantizations_are_detected_by_tensor_names() {
    let folder = schnell();
    let file = folder.path().join("one.safetensors");
    let codes = Raw::open(&put(&folder, "fp8.safetensors", "one.safetensors"));
    let block = "double_blocks.0.img_attn.qkv";
    let cases: [(&str, Dtype, usize, &[&str]); 7] = [
        (
            "double_blocks.0.img_attn.qkv.wscales",
            Dtype::F16,
            2,
            &["SVDQuant", "Nunchaku"],
        ),
        ("double_blocks.0.img_attn.qkv.g_idx", Dtype::I32, 4, &["GPTQ"]),
        (
            "double_blocks.0.img_attn.qkv.qweight",
            Dtype::I32,
            4,
            &["two tensors are", "Nunchaku", "what is read is"],
        ),
        (
            "double_blocks.0.img_attn.qkv.weight_scale_2",
            Dtype::F32,
            4,
            &["weight_scale_2", "nvfp4"],
        ),
        (
            "double_blocks.0.img_attn.qkv.weight:_data",
            Dtype::I8,
            1,
            &["torchao"],
        ),
        (
            "double_blocks.0.img_attn.qkv.weight._data",
            Dtype::I8,
            1,
            &["quanto"],
        ),
        (
            "double_blocks.0.img_attn.qkv.bias",
            Dtype::I16,
            2,
            &["qkv.bias", "I16", "what is read is"],
        ),
    ];
    for (name, dtype, width, words) in cases {
        let mut foreign = codes.clone();
        foreign.add(name, dtype, &[2], vec![0; 2 * width]);
        foreign.save(&file);
        assert_unsupported(&file, words);
    }
    // Detected by ComfyUI's metadata.
    let said = format!(r#"{{"layers": {{"{block}": {{"format": "nvfp4"}}}}}}"#);
    codes.save_with(&file, Some([("_quantization_metadata".to_owned(), said)].into()));
    assert_unsupported(&file, &["nvfp4", "stored as F8E4M3"]);
    let mut noted = codes.clone();
    let note = br#"{"format": "mxfp6"}"#.to_vec();
    noted.add(&format!("{block}.comfy_quant"), Dtype::U8, &[note.len()], note);
    noted.save(&file);
    assert_unsupported(&file, &["mxfp6"]);
    // Unexplained bytes, and codes where full precision is required.
    let mut bytes = codes.clone();
    let (_, shape, data) = codes.0[&format!("{block}.weight")].clone();
    bytes.add(&format!("{block}.weight"), Dtype::U8, &shape, data);
    bytes.save(&file);
    assert_unsupported(&file, &["qkv.weight", "what is read is"]);
    codes.save(&file);
    assert!(FluxModel::open(&file, &F32).is_ok());
}

#[test]
fn contradictory_nf4_states_are_refused() {
    let folder = nf4_double();
    let path = folder.path().join(WEIGHTS);
    let sound = Raw::open(&path);
    let weight = "x_embedder.weight";
    let state = format!("{weight}.quant_state.bitsandbytes__nf4");
    let said: serde_json::Value = serde_json::from_slice(&sound.0[&state].2).expect("JSON");
    let with = |change: &dyn Fn(&mut Raw)| {
        let mut spoilt = sound.clone();
        change(&mut spoilt);
        spoilt.save(&path);
        refused(folder.path(), &F32).to_string()
    };
    let with_state = |key: &str, value: serde_json::Value| {
        with(&|spoilt| {
            let mut said = said.clone();
            said[key] = value.clone();
            let text = said.to_string().into_bytes();
            spoilt.add(&state, Dtype::U8, &[text.len()], text);
        })
    };
    assert!(with_state("blocksize", 128.into()).contains("blocks of 128"));
    assert!(with_state("nested_blocksize", 128.into()).contains("blocks of 128"));
    assert!(with_state("quant_type", "fp4".into()).contains("fp4"));
    for beyond in [1e39, -1e300] {
        assert!(with_state("nested_offset", beyond.into()).contains("offset"));
    }
    assert!(with_state("nested_offset", serde_json::Value::Null).contains("absmax"));
    assert!(with_state("shape", serde_json::json!([1u64 << 63, 1u64 << 63])).contains("x_embedder"));
    assert!(with_state("shape", serde_json::json!([0, 1u64 << 63, 1u64 << 63])).contains("x_embedder"));
    assert!(with_state("shape", serde_json::json!([64, 32])).contains("x_embedder"));
    assert!(with_state("shape", serde_json::json!("wide")).contains("cannot be parsed"));
    let long = with(&|spoilt| spoilt.add(&state, Dtype::U8, &[1 << 17], vec![b' '; 1 << 17]));
    assert!(long.contains("65536"), "{long}");
    for part in ["absmax", "nested_absmax", "quant_map", "nested_quant_map"] {
        let name = format!("{weight}.{part}");
        let missing = with(&|spoilt| {
            spoilt.0.remove(&name);
        });
        assert!(
            missing.contains(&name) && missing.contains("missing"),
            "{missing}"
        );
        let short = with(&|spoilt| spoilt.add(&name, Dtype::F32, &[3], vec![0; 12]));
        assert!(short.contains(&name) && short.contains("expected"), "{short}");
    }
}

#[test]
fn a_fused_weight_whose_blocks_cross_its_layers_is_refused() {
    // Rows of 1024 elements end inside blocks of 256 scales of 64.
    let folder = schnell();
    let file = put(&folder, "nf4.safetensors", "nf4.safetensors");
    let mut raw = Raw::open(&file);
    let weight = "model.diffusion_model.double_blocks.0.img_attn.qkv.weight";
    let state = format!("{weight}.quant_state.bitsandbytes__nf4");
    let mut said: serde_json::Value = serde_json::from_slice(&raw.0[&state].2).expect("JSON");
    said["nested_offset"] = 1.5.into();
    let text = said.to_string().into_bytes();
    raw.add(&state, Dtype::U8, &[text.len()], text);
    raw.add(&format!("{weight}.absmax"), Dtype::U8, &[48], vec![0; 48]);
    raw.add(&format!("{weight}.nested_absmax"), Dtype::F32, &[1], vec![0; 4]);
    raw.add(
        &format!("{weight}.nested_quant_map"),
        Dtype::F32,
        &[256],
        vec![0; 1024],
    );
    raw.save(&file);
    assert_unsupported(&file, &["img_attn.qkv.weight", "nf4-double", "several layers"]);
}

#[test]
fn a_tensor_that_is_not_finite_is_named_when_it_is_quantized() {
    let folder = schnell();
    let path = folder.path().join(WEIGHTS);
    let mut found = candle_core::safetensors::load(&path, &candle_core::Device::Cpu).expect("tensors");
    let name = "transformer_blocks.0.attn.to_k.weight";
    let spoilt = Tensor::full(f32::NAN, found[name].shape(), &candle_core::Device::Cpu).expect("a tensor");
    found.insert(name.to_owned(), spoilt);
    candle_core::safetensors::save(&found, &path).expect("a file");
    let model = FluxModel::open(folder.path(), &quantized(&[("transformer", "nf4")]));
    let model = model.expect("sound").expect("FLUX");
    let Some(plan @ LoadPlan::Files(_)) = model.load_plan("transformer") else {
        panic!("no plan")
    };
    let mut card = gpu::CpuCard::new(gpu::CpuSettings::default()).expect("a card");
    let loaded = gpu::Gpu::load(
        &mut card,
        &model.components()[0],
        plan,
        residency::Part::WHOLE,
        &mut |_| std::ops::ControlFlow::Continue(()),
    );
    let said = loaded.expect_err("refused").to_string();
    assert!(said.contains(name), "{said}");
}
