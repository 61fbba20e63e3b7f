//! Adapters: the same pictures as diffusers with `load_lora_weights` and `set_adapters`, one adapter in every spelling,
//! every weight format, and files that are refused.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use gpu::WeightFormat;
use pipelines::flux::FluxModel;
use pipelines::{
    AdapterError, AdapterFile, AdapterUse, Image, Medium, Model, ModelError, Precision, Quantization,
    Request, StageError, StrengthCurve, Unobserved,
};
use serde::Deserialize;

use crate::device::tolerances;
use crate::given::{copy_of, folder, request};
use crate::numbers::{distance, fixtures, json, largest_difference, numbers, tensors};
use crate::open_model::{F32, OpenModel, on_cpu};

/// The largest difference of a picture that is allowed on a CPU, from 0 to 1.
const PICTURE: f64 = 1e-4;

fn model(precision: &Precision) -> FluxModel {
    let folder = folder("dev");
    let model = FluxModel::open(folder.path(), precision);
    model.expect("a sound model").expect("a FLUX model")
}

fn file(name: &str) -> AdapterFile {
    AdapterFile {
        name: name.to_owned(),
        path: fixtures().join("flux-lora-tiny").join(name),
        kind: pipelines::AdapterKind::Lora,
        ignores_unknown: false,
    }
}

fn adapted(precision: &Precision, names: &[&str]) -> Result<FluxModel, ModelError> {
    let files: Vec<AdapterFile> = names.iter().map(|name| file(name)).collect();
    model(precision).adapted(&files)
}

fn with(names: &[&str]) -> OpenModel<FluxModel> {
    OpenModel::of(Arc::new(adapted(&F32, names).expect("adapters")))
}

/// An adapter of a request with a strength for each step, or one for all.
fn used(name: &str, strengths: &[f32]) -> AdapterUse {
    let last = strengths.len().saturating_sub(1).max(1) as f32;
    let points = strengths.iter().enumerate();
    let points = points.map(|(step, strength)| (step as f32 / last, *strength));
    AdapterUse {
        name: name.to_owned(),
        strength: StrengthCurve::of(points.collect()).expect("strengths"),
        text_strength: strengths[0],
    }
}

/// The small request with one adapter.
fn request_with(name: &str, strengths: &[f32]) -> Request {
    Request {
        adapters: vec![used(name, strengths)],
        ..request()
    }
}

/// An entry of `flux-lora-tiny/expected.json`.
#[derive(Deserialize)]
struct Case {
    name: String,
    adapters: Vec<String>,
    strengths: Vec<Vec<f32>>,
    prompt: String,
    seed: u64,
    width: u32,
    height: u32,
    steps: u32,
    guidance_scale: f32,
    max_sequence_length: u32,
}

#[test]
fn pictures_with_adapters_equal_the_references() {
    let expected = tensors("flux-lora-tiny/expected.safetensors");
    let cases: Vec<Case> = json("flux-lora-tiny/expected.json");
    let mut latents = BTreeMap::new();
    for case in &cases {
        let names: Vec<&str> = case.adapters.iter().map(String::as_str).collect();
        let opened = with(&names);
        let medium = Medium::Image(Image::of(case.width, case.height));
        let uses = names.iter().zip(&case.strengths);
        let request = Request {
            prompt: case.prompt.clone(),
            seed: case.seed,
            adapters: uses.map(|(name, strengths)| used(name, strengths)).collect(),
            ..Request::of(medium, case.steps, case.guidance_scale, case.max_sequence_length)
        };
        let latent = on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"));
        let apart = distance(&latent, &expected[&format!("{}.latent", case.name)]);
        let picture = opened.picture(&latent);
        let reference = &expected[&format!("{}.picture", case.name)];
        let largest = f64::from(largest_difference(&picture, reference));
        println!("{}: latent {apart:.2e}, picture {largest:.2e}", case.name);
        let tolerance = tolerances().pipeline;
        assert!(apart < tolerance, "{}: {apart:e}", case.name);
        assert!(largest < tolerance.max(PICTURE), "{}: {largest:e}", case.name);
        latents.insert(case.name.clone(), latent);
    }
    // Every case is another picture: an adapter that did nothing would pass as the base.
    for (name, latent) in &latents {
        for (other, theirs) in latents.iter().filter(|(other, _)| *other > name) {
            let apart = distance(latent, theirs);
            assert!(
                apart > 100.0 * tolerances().pipeline,
                "{name} is {other}: {apart:e}"
            );
        }
    }
}

/// All tensors and scales of the adapter's parts.
fn content(opened: &OpenModel<FluxModel>) -> BTreeMap<String, Vec<f32>> {
    let components = opened.model.components().iter();
    let parts = components.filter(|component| component.name.starts_with("adapter:"));
    let mut all = BTreeMap::new();
    for part in parts {
        let base = part.name.rsplit(':').next().unwrap_or_default();
        let tensors = opened.tensors(&part.name);
        for name in tensors.names() {
            let tensor = tensors.get(name).expect("a tensor");
            all.insert(format!("{base}:{name}"), numbers(&tensor));
        }
    }
    all
}

#[test]
fn one_adapter_in_every_spelling_is_the_same_tensors() {
    let groups: [(&str, &[&str]); 4] = [
        (
            "diffusers-peft.safetensors",
            &[
                "diffusers-alpha.safetensors",
                "kohya.safetensors",
                "kohya-bf16-i64alpha.safetensors",
                "comfy.safetensors",
                "comfy-down.safetensors",
                "onetrainer.safetensors",
                "peft",
            ],
        ),
        (
            "modulators.safetensors",
            &["modulators-kohya.safetensors", "modulators-comfy.safetensors"],
        ),
        (
            "text-encoder.safetensors",
            &["text-encoder-bare.safetensors", "text-encoder-kohya.safetensors"],
        ),
        ("xlabs-diffusers.safetensors", &[]),
    ];
    for (first, others) in groups {
        let request_of = |name: &str| request_with(name, &[0.7]);
        let expected = with(&[first]);
        let latent = expected
            .latent(&request_of(first), &mut Unobserved)
            .expect("a latent");
        for name in others {
            let found = with(&[name]);
            assert_eq!(content(&found), content(&expected), "{name}");
            let found = found.latent(&request_of(name), &mut Unobserved);
            assert_eq!(found.expect("a latent"), latent, "{name}");
        }
    }
}

#[test]
fn spellings_with_folded_or_sparse_factors_give_the_same_latents() {
    for (first, others) in [
        ("diffusers-peft.safetensors", &["fal.safetensors"][..]),
        (
            "xlabs-diffusers.safetensors",
            &["xlabs.safetensors", "xlabs-kohya.safetensors"],
        ),
        (
            "kohya-sparse-diffusers.safetensors",
            &["kohya-sparse.safetensors"],
        ),
    ] {
        let latent = |name: &str| {
            let given = with(&[name]).latent(&request_with(name, &[0.7]), &mut Unobserved);
            on_cpu(&given.expect("a latent"))
        };
        let expected = latent(first);
        for name in others {
            let apart = distance(&latent(name), &expected);
            println!("{name}: {apart:.2e}");
            assert!(apart < tolerances().pipeline, "{name}: {apart:e}");
        }
    }
}

#[test]
fn the_text_encoders_change_as_in_the_reference() {
    let expected = tensors("flux-lora-tiny/expected.safetensors");
    let name = "text-encoders-comfy.safetensors";
    let opened = with(&[name]);
    let request = request_with(name, &[1.0]);
    let plan = opened.stage(&request, "encode_text");
    let given = opened.run(&plan, 0, &request, &pipelines::Values::new(), &mut Unobserved);
    let given = given.expect("encodings");
    for (value, reference) in [("pooled", "clip.pooled"), ("sequence", "t5.last_hidden")] {
        let reference = &expected[reference];
        let found = on_cpu(&given[value])
            .reshape(reference.dims())
            .expect("the shape");
        let apart = distance(&found, reference);
        println!("{value}: {apart:.2e}");
        assert!(apart < tolerances().component, "{value}: {apart:e}");
    }
}

#[test]
fn strength_zero_is_the_base_exactly_and_needs_no_adapter() {
    let name = "diffusers-peft.safetensors";
    let opened = with(&[name]);
    let base = OpenModel::of(Arc::new(model(&F32)));
    let expected = base.latent(&request(), &mut Unobserved).expect("a latent");
    for without in [request_with(name, &[0.0]), request()] {
        let found = opened.latent(&without, &mut Unobserved).expect("a latent");
        assert_eq!(found, expected);
        let plan = opened.stage(&without, "denoise");
        assert_eq!(plan.components, base.stage(&request(), "denoise").components);
    }
    // Steps before a curve leaves zero are the base's as well; one step more is not.
    let late = request_with(name, &[0.0, 0.0, 0.0, 1.0]);
    let found = opened.latent(&late, &mut Unobserved).expect("a latent");
    assert!(distance(&on_cpu(&found), &on_cpu(&expected)) > 100.0 * tolerances().pipeline);
}

#[test]
fn the_text_memo_depends_on_the_text_strength_of_an_adapter() {
    let name = "text-encoder-bare.safetensors";
    let opened = with(&[name]);
    let memo = |request: &Request| opened.stage(request, "encode_text").memo;
    let strong = request_with(name, &[1.0]);
    let mut weak = request_with(name, &[1.0]);
    weak.adapters[0].text_strength = 0.5;
    assert_ne!(memo(&strong), memo(&weak));
    assert_ne!(memo(&strong), memo(&request()));
    weak.adapters[0].text_strength = 0.0;
    assert_eq!(memo(&weak), memo(&request()));
    // An adapter of the transformer alone changes no text.
    let name = "diffusers-peft.safetensors";
    let opened = with(&[name]);
    let memo = |request: &Request| opened.stage(request, "encode_text").memo;
    assert_eq!(memo(&request_with(name, &[1.0])), memo(&request()));
}

#[test]
fn adapters_apply_to_weights_of_every_format() {
    // The adapter's term is the same whatever the base is held in. The results of later layers differ, most in four bits
    // and in a model so small; merged into four bits, the change would be lost (over 1).
    let name = "diffusers-peft.safetensors";
    for format in WeightFormat::MADE_AT_LOAD {
        let formats = [("transformer", &*format.to_string())];
        let quantization = Quantization::of(pipelines::Preset::Full, formats).expect("a format");
        let precision = Precision {
            dtype: DType::F32,
            quantization,
        };
        let opened = OpenModel::of(Arc::new(adapted(&precision, &[name]).expect("an adapter")));
        let latent = |strength: f32| -> Tensor {
            let request = Request {
                steps: 1,
                ..request_with(name, &[strength])
            };
            on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"))
        };
        let full = with(&[name]);
        let reference = |strength: f32| -> Tensor {
            let request = Request {
                steps: 1,
                ..request_with(name, &[strength])
            };
            on_cpu(&full.latent(&request, &mut Unobserved).expect("a latent"))
        };
        let change = |with: &Tensor, without: &Tensor| (with - without).expect("a change");
        let found = change(&latent(0.05), &latent(0.0));
        let expected = change(&reference(0.05), &reference(0.0));
        let apart = distance(&found, &expected);
        println!("{format}: the change differs by {apart:.3}");
        assert!(apart < 0.8, "{format}: {apart}");
    }
}

#[test]
fn an_adapter_in_the_machines_memory_gives_the_same() {
    let name = "diffusers-peft.safetensors";
    let opened = with(&[name]);
    let request = request_with(name, &[0.7]);
    let values = opened.sampled(&request, &mut Unobserved).expect("values");
    let plan = opened.stage(&request, "denoise");
    let [with_copies, whole, from_host] = &plan.rungs[..] else {
        panic!("{:?}", plan.rungs)
    };
    assert_eq!(from_host.from_host, [format!("adapter:{name}:transformer")]);
    assert!(from_host.scratch > whole.scratch);
    // Of layers with many rows, by the scratch of a copy of each.
    assert!(
        with_copies
            .copies
            .iter()
            .any(|layer| layer.ends_with("attn.to_q"))
    );
    assert!(!with_copies.copies.iter().any(|layer| layer.contains("norm")));
    assert!(with_copies.scratch > whole.scratch);
    let given = opened
        .run(&plan, 2, &request, &values, &mut Unobserved)
        .expect("a latent");
    assert_eq!(given["latent"], values["latent"]);
}

#[test]
fn several_adapters_add_up_in_any_order() {
    let (a, b) = ("diffusers-peft.safetensors", "modulators.safetensors");
    let latent = |names: [&str; 2]| {
        let request = Request {
            adapters: names.map(|name| used(name, &[0.5])).to_vec(),
            ..request()
        };
        on_cpu(&with(&names).latent(&request, &mut Unobserved).expect("a latent"))
    };
    let apart = distance(&latent([a, b]), &latent([b, a]));
    assert!(apart < tolerances().pipeline, "{apart:e}");
}

/// dev and schnell have different blocks here, so that the same file gives them different tensors.
#[test]
fn an_adapter_has_an_identity_for_each_set_of_layers() {
    let name = "kohya.safetensors";
    let lenient = AdapterFile {
        ignores_unknown: true,
        ..file(name)
    };
    let loaded = |kind: &str| {
        let folder = folder(kind);
        let model = FluxModel::open(folder.path(), &F32)
            .expect("a sound model")
            .expect("a FLUX model");
        let model = model.adapted(std::slice::from_ref(&lenient)).expect("an adapter");
        let name = format!("adapter:{name}:transformer");
        let component = model.components().iter().find(|component| component.name == name);
        component.expect("a component").clone()
    };
    let (dev, schnell) = (loaded("dev"), loaded("schnell"));
    assert_ne!(dev.bytes, schnell.bytes);
    assert_ne!(dev.id, schnell.id);
    assert_eq!(dev.id, loaded("dev").id);
}

#[test]
fn an_adapter_is_a_component_with_exact_bytes() {
    let name = "kohya.safetensors";
    let model = adapted(&F32, &[name, "text-encoders-comfy.safetensors"]).expect("adapters");
    let components = model.components().iter().map(|component| component.name.as_str());
    let adapters: Vec<&str> = components.filter(|name| name.starts_with("adapter:")).collect();
    assert_eq!(
        adapters,
        [
            "adapter:kohya.safetensors:transformer",
            "adapter:text-encoders-comfy.safetensors:text_encoder",
            "adapter:text-encoders-comfy.safetensors:text_encoder_2",
        ]
    );
    for component in model.components() {
        let plan = model.load_plan(&component.name).expect("a plan");
        assert_eq!(plan.bytes(), component.bytes, "{}", component.name);
        assert!(!model.files_of(&component.name).is_empty());
    }
    let report = &model.adapters()[0];
    assert_eq!((report.rank, report.ignored.len()), (6, 0));
    // Two double blocks of 12 linear layers, and single blocks of 5.
    assert!(report.layers["transformer"] > 24, "{:?}", report.layers);
}

/// The error of a file of `bad`.
fn refusal(name: &str) -> AdapterError {
    match adapted(&F32, &[&format!("bad/{name}")]) {
        Err(ModelError::Adapter { error, .. }) => error,
        Err(other) => panic!("{name}: {other}"),
        Ok(_) => panic!("{name} was accepted"),
    }
}

#[test]
fn files_that_are_no_adapter_of_the_model_are_refused_by_name() {
    for good in ["bad/good.safetensors", "bad/good-kohya.safetensors"] {
        assert!(adapted(&F32, &[good]).is_ok(), "{good}");
    }
    let unsupported = |name: &str| match refusal(name) {
        AdapterError::Unsupported { kind, .. } | AdapterError::Separate { kind, .. } => kind,
        other => panic!("{name}: {other}"),
    };
    assert_eq!(unsupported("lokr.safetensors"), "LoKr");
    assert_eq!(unsupported("loha.safetensors"), "LoHa");
    assert_eq!(unsupported("dora.safetensors"), "DoRA");
    assert_eq!(unsupported("peft-dora"), "DoRA");
    assert_eq!(unsupported("peft-loha"), "another kind of adapter than LoRA");
    assert_eq!(
        unsupported("conv-mid.safetensors"),
        "LoCon with a middle convolution"
    );
    assert!(unsupported("diff.safetensors").starts_with("a difference"));
    unsupported("bfl-control.safetensors");
    let vae = refusal("vae.safetensors");
    assert!(
        vae.to_string()
            .starts_with("it is no LoRA: it is the autoencoder"),
        "{vae}"
    );
    for name in ["wan", "sdxl-kohya"] {
        let error = refusal(&format!("{name}.safetensors"));
        assert!(
            matches!(error, AdapterError::OtherFamily { .. }),
            "{name}: {error}"
        );
    }
    for name in ["unknown-module", "absent-block"] {
        let error = refusal(&format!("{name}.safetensors"));
        assert!(matches!(error, AdapterError::Unknown { .. }), "{name}: {error}");
    }
    let half = refusal("half-pair.safetensors");
    assert!(matches!(half, AdapterError::Half { .. }), "{half}");
    for name in ["wrong-inputs", "wrong-outputs", "rank-mismatch"] {
        let error = refusal(&format!("{name}.safetensors"));
        assert!(matches!(error, AdapterError::Shape { .. }), "{name}: {error}");
    }
    let scale = refusal("infinite-alpha.safetensors");
    assert!(matches!(scale, AdapterError::Scale(_)), "{scale}");
    for name in ["empty", "truncated", "absent"] {
        let error = refusal(&format!("{name}.safetensors"));
        assert!(matches!(error, AdapterError::File(_)), "{name}: {error}");
    }
}

#[test]
fn unknown_tensors_are_ignored_if_asked() {
    let file = AdapterFile {
        ignores_unknown: true,
        ..file("bad/unknown-module.safetensors")
    };
    let model = model(&F32).adapted(&[file]).expect("an adapter");
    assert!(
        model.adapters()[0]
            .ignored
            .iter()
            .all(|name| name.contains("to_w"))
    );
    assert!(!model.adapters()[0].ignored.is_empty());
}

#[test]
fn a_number_that_is_not_finite_is_reported_with_its_adapter() {
    let name = "bad/nan.safetensors";
    let error = with(&[name]).latent(&request_with(name, &[1.0]), &mut Unobserved);
    match error.unwrap_err() {
        StageError::NotFinite { component, .. } => {
            assert!(component.contains("adapter:bad/nan.safetensors"), "{component}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_request_names_only_adapters_that_are_attached() {
    let problems = model(&F32)
        .plan(&request_with("kohya.safetensors", &[1.0]))
        .unwrap_err();
    assert_eq!(problems[0].field, "adapters");
    assert!(
        Path::new(&problems[0].problem)
            .to_string_lossy()
            .contains("kohya")
    );
}

/// The transformer with the names of Nunchaku's files, whose single blocks have two last layers. The bias of the one is halved
/// over both.
fn in_names_of_nunchaku() -> HashMap<String, Tensor> {
    let mut theirs = HashMap::new();
    let mut of_one_layer: BTreeMap<String, BTreeMap<&str, Tensor>> = BTreeMap::new();
    const FUSED: [(&str, &str); 6] = [
        (".attn.to_q.", "0"),
        (".attn.to_k.", "1"),
        (".attn.to_v.", "2"),
        (".attn.add_q_proj.", "0"),
        (".attn.add_k_proj.", "1"),
        (".attn.add_v_proj.", "2"),
    ];
    const RENAMED: [(&str, &str); 11] = [
        (".attn.to_out.0.", ".out_proj."),
        (".attn.to_add_out.", ".out_proj_context."),
        (".ff.net.0.proj.", ".mlp_fc1."),
        (".ff.net.2.", ".mlp_fc2."),
        (".ff_context.net.0.proj.", ".mlp_context_fc1."),
        (".ff_context.net.2.", ".mlp_context_fc2."),
        (".proj_mlp.", ".mlp_fc1."),
        (".attn.norm_q.", ".norm_q."),
        (".attn.norm_k.", ".norm_k."),
        (".attn.norm_added_q.", ".norm_added_q."),
        (".attn.norm_added_k.", ".norm_added_k."),
    ];
    for (name, tensor) in tensors("flux-tiny/transformer/diffusion_pytorch_model.safetensors") {
        if let Some((layer, place)) = FUSED.iter().find(|(layer, _)| name.contains(layer)) {
            let fused = match layer.contains("add") {
                true => ".qkv_proj_context.",
                false => ".qkv_proj.",
            };
            let parts = of_one_layer.entry(name.replace(layer, fused)).or_default();
            parts.insert(place, tensor);
        } else if name.starts_with("single_") && name.contains(".proj_out.") {
            let [attended, inner] = [".out_proj.", ".mlp_fc2."].map(|part| name.replace(".proj_out.", part));
            let (first, second) = match tensor.dims() {
                [outputs] => {
                    let half = (&tensor * 0.5).expect("half of a bias");
                    assert_eq!(half.dims(), [*outputs]);
                    (half.clone(), half)
                }
                [outputs, inputs] => (
                    tensor.narrow(1, 0, *outputs).expect("columns"),
                    tensor.narrow(1, *outputs, inputs - outputs).expect("columns"),
                ),
                other => panic!("{name} is {other:?}"),
            };
            theirs.insert(attended, first.contiguous().expect("a copy"));
            theirs.insert(inner, second.contiguous().expect("a copy"));
        } else {
            let renamed = RENAMED.iter().find(|(layer, _)| name.contains(layer));
            let name = renamed.map_or(name.clone(), |(layer, in_file)| name.replace(layer, in_file));
            theirs.insert(name, tensor);
        }
    }
    for (name, parts) in of_one_layer {
        let parts: Vec<&Tensor> = parts.values().collect();
        theirs.insert(name, Tensor::cat(&parts, 0).expect("a fused layer"));
    }
    theirs
}

/// The last layer of a single block in two layers, alone and with an adapter of the layer that diffusers has.
#[test]
fn nunchakus_names_are_read_and_an_adapter_of_a_layer_that_is_two_there_has_its_effect() {
    let root = copy_of(&["flux-tiny"]);
    let whole = root.path().join("svdq-int4_r32-flux.1-dev.safetensors");
    candle_core::safetensors::save(&in_names_of_nunchaku(), &whole).expect("a file");
    let of_file = || {
        let model = FluxModel::open(&whole, &F32).expect("a sound model");
        model.expect("a FLUX model")
    };
    let latent = |model: FluxModel, request: &Request| {
        let opened = OpenModel::of(Arc::new(model));
        on_cpu(&opened.latent(request, &mut Unobserved).expect("a latent"))
    };
    let plain = latent(model(&F32), &request());
    assert!(distance(&latent(of_file(), &request()), &plain) < tolerances().pipeline);

    let config: serde_json::Value = json("flux-tiny/transformer/config.json");
    let width = config["attention_head_dim"]
        .as_u64()
        .zip(config["num_attention_heads"].as_u64());
    let width = width.map_or(0, |(head, heads)| (head * heads) as usize);
    let wave = |shape: (usize, usize), by: f64| {
        let numbers = Tensor::arange(0f32, (shape.0 * shape.1) as f32, &candle_core::Device::Cpu);
        let numbers = numbers.and_then(|numbers| (numbers * by)?.sin()?.reshape(shape));
        numbers.expect("numbers")
    };
    let layer = "transformer.single_transformer_blocks.0.proj_out";
    let factors = HashMap::from([
        (format!("{layer}.lora_A.weight"), wave((2, 5 * width), 0.7)),
        (format!("{layer}.lora_B.weight"), wave((width, 2), 1.3)),
    ]);
    let path = root.path().join("one-layer.safetensors");
    candle_core::safetensors::save(&factors, &path).expect("a file");
    let adapter = [AdapterFile {
        path,
        ..file("one-layer")
    }];
    let request = request_with("one-layer", &[0.2]);
    let expected = latent(model(&F32).adapted(&adapter).expect("adapted"), &request);
    let found = latent(of_file().adapted(&adapter).expect("adapted"), &request);
    assert!(distance(&expected, &plain) > 1e-3, "the adapter has an effect");
    assert!(distance(&found, &expected) < tolerances().pipeline);
}
