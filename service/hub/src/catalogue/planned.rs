//! Compares the catalogue with the planner. Checkpoints of the published shapes, of which only the headers are written, are opened and
//! planned like any other: their sizes are those of the catalogue, and on each card they run as the catalogue says.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use engine::admission::{Admission, choose_rung};
use engine::library::{Entry, Library, OpenModel};
use engine::need::Need;
use gpu::{CardDescription, CardKind, Uses};
use pipelines::ace_step::{ConditionConfig, TokenConfig, TransformerConfig as AceTransformer};
use pipelines::autoencoders::hunyuan::HunyuanVaeConfig;
use pipelines::autoencoders::kl::VaeConfig;
use pipelines::autoencoders::oobleck::OobleckConfig;
use pipelines::flux::TransformerConfig as FluxTransformer;
use pipelines::hunyuan::TransformerConfig as HunyuanTransformer;
use pipelines::text::clip::ClipConfig;
use pipelines::text::llama::LlamaConfig;
use pipelines::text::qwen3::Qwen3Config;
use pipelines::text::t5::T5Config;
use pipelines::vision::siglip::SiglipConfig;
use pipelines::z_image::TransformerConfig as ZImageTransformer;
use pipelines::{Medium, Preset, Quantization, Request, StagePlan};
use residency::{Bytes, Component, Ledger, Millis, Policy, part_after};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::needs::{ComponentSizes, EqualBlocks, RequestSizes, Sizes, StageSizes, all_sizes};
use super::{Extent, Fit, Model, Room, all, tables};

type Shapes = Vec<(String, Vec<usize>)>;

/// A folder of the checkout.
fn checkout(place: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(place)
}

fn fixture(place: &str) -> PathBuf {
    checkout("service/pipelines/fixtures").join(place)
}

/// Copies the files of a folder, but for weights and configurations of components.
fn copy_rest(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let (source, name) = (entry.as_ref().unwrap().path(), entry.unwrap().file_name());
        let is_left_out = |name: &str| {
            name.ends_with(".safetensors") || ["config.json", "moored.json", "expected"].contains(&name)
        };
        if is_left_out(&name.to_string_lossy()) {
            continue;
        }
        if source.is_dir() {
            fs::create_dir_all(to.join(&name)).unwrap();
            copy_rest(&source, &to.join(&name));
        } else {
            fs::copy(&source, to.join(&name)).unwrap();
        }
    }
}

/// Writes a component: its configuration, and a checkpoint of which all but the header is a hole.
fn write<C: DeserializeOwned>(folder: &Path, config: Value, stem: &str, shapes: impl FnOnce(C) -> Shapes) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in shapes(serde_json::from_value(config).unwrap()) {
        let begin = end;
        end += 2 * shape.iter().product::<usize>() as u64;
        header.insert(
            name,
            json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}),
        );
    }
    let header = Value::Object(header).to_string();
    let mut file = File::create(folder.join(format!("{stem}.safetensors"))).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
}

/// File names of weights, by diffusers and by transformers.
const DIFFUSERS: &str = "diffusion_pytorch_model";
const TRANSFORMERS: &str = "model";

/// The autoencoder of FLUX.1 and Z-Image.
fn write_vae(folder: &Path) {
    let (down, up) = (["DownEncoderBlock2D"; 4], ["UpDecoderBlock2D"; 4]);
    let config = json!({"latent_channels": 16, "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2,
        "sample_size": 1024, "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": false,
        "use_post_quant_conv": false, "down_block_types": down, "up_block_types": up});
    write(&folder.join("vae"), config, DIFFUSERS, |config: VaeConfig| {
        config.tensor_shapes()
    });
}

fn write_clip(folder: &Path, name: &str) {
    let config = json!({"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12});
    write(&folder.join(name), config, TRANSFORMERS, |config: ClipConfig| {
        config.tensor_shapes(&|_| false)
    });
}

fn write_flux(folder: &Path, has_guidance: bool) {
    copy_rest(&checkout("demo/model"), folder);
    let config = json!({"guidance_embeds": has_guidance});
    let shapes = |config: FluxTransformer| config.tensor_shapes().collect();
    write(&folder.join("transformer"), config, DIFFUSERS, shapes);
    write_vae(folder);
    write_clip(folder, "text_encoder");
    let config = json!({"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
        "feed_forward_proj": "gated-gelu"});
    let shapes = |config: T5Config| config.tensor_shapes(&|_| false);
    write(&folder.join("text_encoder_2"), config, TRANSFORMERS, shapes);
}

fn write_z_image(folder: &Path) {
    copy_rest(&fixture("z-image-tiny"), folder);
    let shapes = |config: ZImageTransformer| config.tensor_shapes().collect();
    write(&folder.join("transformer"), json!({}), DIFFUSERS, shapes);
    write_vae(folder);
    let config = json!({"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"}});
    let shapes = |config: Qwen3Config| config.tensor_shapes(config.num_hidden_layers, &|_| false);
    write(&folder.join("text_encoder"), config, TRANSFORMERS, shapes);
}

fn write_hunyuan(folder: &Path) {
    copy_rest(&fixture("hunyuan-tiny"), folder);
    fs::create_dir_all(folder.join("tokenizer_2")).unwrap();
    copy_rest(&checkout("demo/model/tokenizer"), &folder.join("tokenizer_2"));
    let shapes = |config: HunyuanTransformer| config.tensor_shapes().collect();
    write(&folder.join("transformer"), json!({}), DIFFUSERS, shapes);
    write(
        &folder.join("vae"),
        json!({}),
        DIFFUSERS,
        |config: HunyuanVaeConfig| config.tensor_shapes(),
    );
    let config = json!({"vocab_size": 128_320, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}});
    let shapes = |config: LlamaConfig| config.tensor_shapes(&|_| false);
    write(&folder.join("text_encoder"), config, TRANSFORMERS, shapes);
    write_clip(folder, "text_encoder_2");
}

/// FramePack's transformer, and the parts of other repositories that are pulled with it.
fn write_framepack(folder: &Path) {
    let config = json!({"_class_name": "HunyuanVideoTransformer3DModelPacked", "has_image_proj": true,
        "has_clean_x_embedder": true});
    let shapes = |config: HunyuanTransformer| config.tensor_shapes().collect();
    write(folder, config, DIFFUSERS, shapes);
    let beside = folder.parent().unwrap();
    let base = beside.join("HunyuanVideo");
    fs::create_dir_all(&base).unwrap();
    write_hunyuan(&base);
    let vision = beside.join("flux_redux_bfl");
    let processor = vision.join("feature_extractor");
    fs::create_dir_all(&processor).unwrap();
    let text = fs::read(fixture(
        "framepack-tiny/feature_extractor/preprocessor_config.json",
    ))
    .unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    config["size"] = json!({"height": 384, "width": 384});
    fs::write(processor.join("preprocessor_config.json"), config.to_string()).unwrap();
    let config = json!({"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "image_size": 384, "patch_size": 14});
    let shapes = |config: SiglipConfig| config.tensor_shapes(&|_| false);
    write(&vision.join("image_encoder"), config, TRANSFORMERS, shapes);
}

fn write_ace_step(folder: &Path) {
    /// Frames of silence that come with the condition encoder.
    const SILENCE_FRAMES: usize = 15_000;
    copy_rest(&fixture("ace-tiny"), folder);
    let config = json!({"is_turbo": true, "model_version": "turbo"});
    write(
        &folder.join("transformer"),
        config,
        DIFFUSERS,
        |config: AceTransformer| config.tensor_shapes(),
    );
    let shapes = |config: ConditionConfig| {
        let silence = (
            "silence_latent".to_owned(),
            vec![1, SILENCE_FRAMES, config.timbre_hidden_dim],
        );
        [config.tensor_shapes(), vec![silence]].concat()
    };
    write(&folder.join("condition_encoder"), json!({}), DIFFUSERS, shapes);
    let shapes = |config: TokenConfig| config.tokenizer_shapes();
    write(&folder.join("audio_tokenizer"), json!({}), DIFFUSERS, shapes);
    let shapes = |config: TokenConfig| config.detokenizer_shapes();
    write(
        &folder.join("audio_token_detokenizer"),
        json!({}),
        DIFFUSERS,
        shapes,
    );
    let config = json!({"vocab_size": 151_669, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8,
        "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"}});
    let shapes = |config: Qwen3Config| config.tensor_shapes_with_norm(&|_| false);
    write(&folder.join("text_encoder"), config, TRANSFORMERS, shapes);
    let config = json!({"downsampling_ratios": [2, 4, 4, 6, 10], "sampling_rate": 48_000});
    write(&folder.join("vae"), config, DIFFUSERS, |config: OobleckConfig| {
        config.tensor_shapes()
    });
}

/// Writes a checkpoint of the published shapes of a model.
fn write_model(name: &str, folder: &Path) {
    match name {
        "flux-schnell" => write_flux(folder, false),
        "flux-dev" => write_flux(folder, true),
        "z-image-turbo" => write_z_image(folder),
        "hunyuan-video" => write_hunyuan(folder),
        "framepack" => write_framepack(folder),
        "ace-step" => write_ace_step(folder),
        other => panic!("write the published shapes of {other} here"),
    }
}

/// A model as it is opened for cards that compute in one dtype.
struct Opened {
    name: String,
    preset: Preset,
    is_f32: bool,
    open: OpenModel,
}

/// All models of the catalogue, in all presets and dtypes. The folders have their checkpoints.
fn opened(folders: &mut Vec<TempDir>) -> Vec<Opened> {
    let library = Library::new(pipelines::families(), None);
    let mut opened = Vec::new();
    for model in all() {
        let root = TempDir::new().unwrap();
        let folder = root.path().join("it");
        fs::create_dir(&folder).unwrap();
        write_model(&model.name, &folder);
        for is_f32 in [false, true] {
            for preset in Preset::ALL {
                let formats = Quantization::preset(preset);
                let entry = Entry::new(String::new(), String::new(), folder.clone(), formats);
                let open = library.open(&entry, &card(is_f32)).unwrap();
                opened.push(Opened {
                    name: model.name.clone(),
                    preset,
                    is_f32,
                    open,
                });
            }
        }
        folders.push(root);
    }
    opened
}

fn card(is_f32: bool) -> CardDescription {
    CardDescription {
        id: String::new(),
        kind: CardKind::Simulated,
        name: String::new(),
        total: Bytes::ZERO,
        compute_capability: None,
        compute_dtype: if is_f32 { "f32" } else { "bf16" }.to_owned(),
    }
}

impl Opened {
    fn default_request(&self) -> Request {
        let model = &self.open.model;
        model.with_required_pictures(model.defaults())
    }

    /// The needs of the stages of a request.
    fn needs_of(&self, request: &Request) -> Vec<Need> {
        let stages = self.open.model.plan(request).unwrap();
        let need = |plan: StagePlan| Need {
            name: plan.name.as_str().into(),
            components: self.components_of(&plan).cloned().collect(),
            plan: Some(plan),
            headroom: Bytes::ZERO,
            later: Vec::new(),
        };
        stages.into_iter().map(need).collect()
    }

    fn components_of(&self, plan: &StagePlan) -> impl Iterator<Item = &Component> {
        let named = |component: &&Component| plan.components.contains(&component.name);
        self.open.components.iter().filter(named)
    }

    /// What the catalogue has of it.
    fn sizes(&self) -> Sizes {
        let request = self.default_request();
        let mut stages: Vec<StageSizes> = Vec::new();
        for need in self.needs_of(&request) {
            let stage = stage_sizes(&need);
            if !stages.contains(&stage) {
                stages.push(stage);
            }
        }
        let smaller = self.open.model.smaller(&request);
        let requests = std::iter::once((String::new(), request)).chain(smaller);
        Sizes {
            model: self.name.clone(),
            preset: self.preset.as_str().to_owned(),
            is_f32: self.is_f32,
            components: self
                .open
                .components
                .iter()
                .map(|component| self.component_sizes(component))
                .collect(),
            stages,
            requests: requests
                .map(|(label, request)| RequestSizes {
                    label,
                    extent: extent_of(&request),
                    least: self.needs_of(&request).iter().map(least_of).max().unwrap().0,
                })
                .collect(),
        }
    }

    fn component_sizes(&self, component: &Component) -> ComponentSizes {
        let mut blocks: Vec<EqualBlocks> = Vec::new();
        for block in self.open.model.load_plan(&component.name).unwrap().blocks() {
            let one = EqualBlocks {
                count: 1,
                bytes: block.bytes.0,
                in_ring: block.in_ring.0,
                once: block.uses == Uses::Once,
            };
            match blocks.last_mut() {
                Some(last)
                    if *last
                        == (EqualBlocks {
                            count: last.count,
                            ..one.clone()
                        }) =>
                {
                    last.count += 1
                }
                _ => blocks.push(one),
            }
        }
        ComponentSizes {
            name: component.name.clone(),
            bytes: component.bytes.0,
            blocks,
        }
    }
}

fn extent_of(request: &Request) -> Extent {
    let pixels = |width: u32, height: u32| Some(u64::from(width) * u64::from(height));
    match &request.medium {
        Medium::Image(image) => Extent {
            pixels: pixels(image.width, image.height),
            ..Extent::default()
        },
        Medium::Video(video) => Extent {
            pixels: pixels(video.width, video.height),
            frames: Some(video.frames),
            seconds: None,
        },
        Medium::Audio(audio) => Extent {
            seconds: Some(audio.seconds),
            ..Extent::default()
        },
    }
}

/// How stages run on a card, as the queue decides it for each of them.
fn fit_on(needs: &[Need], room: &Room) -> Option<Fit> {
    let ledger = Ledger::new(room.bytes, Bytes::ZERO);
    let mut most = Bytes::ZERO;
    for need in needs {
        let Admission::Run { moves, .. } = choose_rung(&ledger, need, Policy::Shared, Millis(0)) else {
            return None;
        };
        let part = |c: &Component| c.size_of(part_after(&ledger, &moves, c)).streamed;
        if need.plan.as_ref().is_some_and(|plan| plan.steps > 1) {
            most = most.max(need.components.iter().map(part).sum());
        }
    }
    Some(match most {
        Bytes::ZERO => Fit::Whole,
        each_step => Fit::Streamed { each_step },
    })
}

fn stage_sizes(need: &Need) -> StageSizes {
    let plan = need.plan.as_ref().unwrap();
    // Exact ways are tried before approximate ones.
    let (approximate, exact): (Vec<_>, Vec<_>) = plan.rungs.iter().partition(|rung| rung.approximate);
    StageSizes {
        name: plan.name.clone(),
        components: need.components.iter().map(|c| c.name.clone()).collect(),
        passes: plan.steps,
        scratch: exact
            .into_iter()
            .chain(approximate)
            .map(|rung| rung.scratch.0)
            .collect(),
    }
}

/// The least that a stage needs of a card, in any way to run it.
fn least_of(need: &Need) -> Bytes {
    let least = |rung: usize| {
        need.components
            .iter()
            .map(|c| c.bytes_of(c.least()))
            .sum::<Bytes>()
            + need.rungs()[rung].scratch
    };
    (0..need.rungs().len()).map(least).min().unwrap()
}

/// Cards on which the catalogue and the planner are compared.
fn rooms(is_f32: bool) -> impl Iterator<Item = Room> {
    let mib = (0..16 << 10)
        .step_by(384)
        .chain((16 << 10..96 << 10).step_by(4096));
    mib.map(move |mib| Room {
        bytes: Bytes::mib(mib),
        is_f32,
        is_cpu: false,
    })
}

#[test]
fn the_catalogue_and_the_planner_say_the_same() {
    let mut folders = Vec::new();
    let opened = opened(&mut folders);
    let sizes: Vec<Sizes> = opened.iter().map(Opened::sizes).collect();
    assert!(
        sizes == all_sizes(),
        "catalogue/sizes.toml is not what the planner says: {REFRESH}"
    );
    for one in &opened {
        let model: &Model = super::find(&one.name).unwrap();
        let needs = model.needs(one.preset, one.is_f32).unwrap();
        let of_stages = one.needs_of(&one.default_request());
        assert_eq!(
            needs.least(),
            of_stages.iter().map(least_of).max().unwrap(),
            "{}",
            one.name
        );
        assert_eq!(needs.weights(), one.open.components.iter().map(|c| c.bytes).sum());
        for room in rooms(one.is_f32) {
            let (says, runs) = (model.fit(one.preset, &room), fit_on(&of_stages, &room));
            assert_eq!(
                says,
                runs,
                "{} in {} on {}",
                one.name,
                one.preset.as_str(),
                room.bytes
            );
        }
    }
}

/// The file of sizes.
const SIZES: &str = "service/hub/src/catalogue/sizes.toml";
pub(super) const REFRESH: &str = "run `cargo test -p hub catalogue -- --ignored`";

const HEAD: &str = "\
# What the models of the catalogue need of a card, in bytes. Made by `cargo test -p hub catalogue -- --ignored`, not to be edited: checkpoints
# of the published shapes, without their numbers, are opened and planned. A test compares.
#
# components: bytes of all of each, and its blocks in the order of their use, which can be streamed; a block that is used once is not
# streamed again in each step. stages: those of the default request. passes: how often it goes over the blocks. scratch: working memory of each way
# to run it, the best first. requests: the default, then smaller ones, with the least that each needs of a card.
";

/// The text of the file.
fn text_of(all: &[Sizes]) -> String {
    let mut text = HEAD.to_owned();
    for sizes in all {
        write!(
            text,
            "\n[[sizes]]\nmodel = {:?}\npreset = {:?}\nis_f32 = {}\ncomponents = [\n",
            sizes.model, sizes.preset, sizes.is_f32
        )
        .unwrap();
        for component in &sizes.components {
            write!(
                text,
                "    {{ name = {:?}, bytes = {}",
                component.name, component.bytes
            )
            .unwrap();
            let blocks: Vec<String> = component.blocks.iter().map(line_of_blocks).collect();
            match blocks.is_empty() {
                true => text.push_str(" },\n"),
                false => writeln!(
                    text,
                    ", blocks = [\n        {},\n    ] }},",
                    blocks.join(",\n        ")
                )
                .unwrap(),
            }
        }
        text.push_str("]\nstages = [\n");
        for stage in &sizes.stages {
            writeln!(
                text,
                "    {{ name = {:?}, components = {:?}, passes = {}, scratch = {:?} }},",
                stage.name, stage.components, stage.passes, stage.scratch
            )
            .unwrap();
        }
        text.push_str("]\nrequests = [\n");
        for request in &sizes.requests {
            let extent = line_of_extent(request.extent);
            writeln!(
                text,
                "    {{ label = {:?}, extent = {{ {extent} }}, least = {} }},",
                request.label, request.least
            )
            .unwrap();
        }
        text.push_str("]\n");
    }
    text
}

fn line_of_extent(extent: Extent) -> String {
    let pixels = extent.pixels.map(|pixels| format!("pixels = {pixels}"));
    let frames = extent.frames.map(|frames| format!("frames = {frames}"));
    let seconds = extent.seconds.map(|seconds| format!("seconds = {seconds:?}"));
    let known: Vec<String> = [pixels, frames, seconds].into_iter().flatten().collect();
    known.join(", ")
}

fn line_of_blocks(blocks: &EqualBlocks) -> String {
    let EqualBlocks {
        count,
        bytes,
        in_ring,
        once,
    } = blocks;
    let once = if *once { ", once = true" } else { "" };
    format!("{{ count = {count}, bytes = {bytes}, in_ring = {in_ring}{once} }}")
}

/// Writes the sizes of the catalogue and, if they had been written before, the tables of the documents.
#[test]
#[ignore = "it writes files of the checkout"]
fn write_the_sizes_and_the_tables() {
    let mut folders = Vec::new();
    let sizes: Vec<Sizes> = opened(&mut folders).iter().map(Opened::sizes).collect();
    fs::write(checkout(SIZES), text_of(&sizes)).unwrap();
    assert!(
        sizes == all_sizes(),
        "the sizes are written: run this again, for the tables that are made of them"
    );
    tables::write(&checkout(""));
}
