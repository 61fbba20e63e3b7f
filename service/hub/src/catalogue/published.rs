//! Checkpoints of the published shapes of the catalogue's models, of which only the headers are written: their numbers are holes.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use pipelines::ace_step::{ConditionConfig, TokenConfig, TransformerConfig as AceTransformer};
use pipelines::autoencoders::hunyuan::HunyuanVaeConfig;
use pipelines::autoencoders::kl::VaeConfig;
use pipelines::autoencoders::mmaudio::MmAudioConfig;
use pipelines::autoencoders::mmaudio::vocoder::VocoderConfig;
use pipelines::autoencoders::oobleck::OobleckConfig;
use pipelines::autoencoders::wan::WanVaeConfig;
use pipelines::flux::TransformerConfig as FluxTransformer;
use pipelines::flux2::TransformerConfig as Flux2Transformer;
use pipelines::hunyuan::TransformerConfig as HunyuanTransformer;
use pipelines::ovi::FusionConfig;
use pipelines::qwen_image::TransformerConfig as QwenImageTransformer;
use pipelines::sdxl::UnetConfig;
use pipelines::text::clip::ClipConfig;
use pipelines::text::llama::LlamaConfig;
use pipelines::text::qwen2_vl::Qwen2VlConfig;
use pipelines::text::qwen3::Qwen3Config;
use pipelines::text::t5::T5Config;
use pipelines::vision::siglip::SiglipConfig;
use pipelines::wan::TransformerConfig as WanTransformer;
use pipelines::z_image::TransformerConfig as ZImageTransformer;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

type Shapes = Vec<(String, Vec<usize>)>;

/// A folder of the checkout.
pub(super) fn checkout(place: &str) -> PathBuf {
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

fn write_sdxl(folder: &Path) {
    copy_rest(&fixture("sdxl-tiny"), folder);
    let shapes = |config: UnetConfig| config.tensor_shapes().collect();
    write(&folder.join("unet"), json!({}), DIFFUSERS, shapes);
    let (down, up) = (["DownEncoderBlock2D"; 4], ["UpDecoderBlock2D"; 4]);
    let config = json!({"latent_channels": 4, "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2,
        "sample_size": 1024, "scaling_factor": 0.13025, "down_block_types": down, "up_block_types": up});
    write(&folder.join("vae"), config, DIFFUSERS, |config: VaeConfig| {
        config.tensor_shapes()
    });
    write_clip(folder, "text_encoder");
    let config = json!({"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
        "num_attention_heads": 20, "hidden_act": "gelu", "projection_dim": 1280});
    let shapes = |config: ClipConfig| {
        let mut shapes = config.tensor_shapes(&|_| false);
        shapes.push(config.projection_shape());
        shapes
    };
    write(&folder.join("text_encoder_2"), config, TRANSFORMERS, shapes);
}

/// Z-Image or Z-Image-Turbo, which differ in the shift of their schedulers.
fn write_z_image(folder: &Path, shift: f64) {
    copy_rest(&fixture("z-image-tiny"), folder);
    let scheduler = folder.join("scheduler/scheduler_config.json");
    let mut written: Value = serde_json::from_slice(&fs::read(&scheduler).unwrap()).unwrap();
    written["shift"] = shift.into();
    fs::write(&scheduler, written.to_string()).unwrap();
    let shapes = |config: ZImageTransformer| config.tensor_shapes().collect();
    write(&folder.join("transformer"), json!({}), DIFFUSERS, shapes);
    write_vae(folder);
    let config = json!({"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"}});
    let shapes = |config: Qwen3Config| config.tensor_shapes(config.num_hidden_layers, &|_| false);
    write(&folder.join("text_encoder"), config, TRANSFORMERS, shapes);
}

/// FLUX.2 klein of so many double and single blocks and heads, with the text encoder of this width.
fn write_flux2(folder: &Path, is_distilled: bool, blocks: [usize; 3], [width, inner]: [usize; 2]) {
    copy_rest(&fixture("flux2-tiny"), folder);
    let index = folder.join("model_index.json");
    let mut written: Value = serde_json::from_slice(&fs::read(&index).unwrap()).unwrap();
    written["is_distilled"] = is_distilled.into();
    fs::write(&index, written.to_string()).unwrap();
    let [double, single, heads] = blocks;
    let config = json!({"num_layers": double, "num_single_layers": single, "num_attention_heads": heads,
        "joint_attention_dim": 3 * width, "guidance_embeds": false});
    let shapes = |config: Flux2Transformer| config.tensor_shapes().collect();
    write(&folder.join("transformer"), config, DIFFUSERS, shapes);
    let (down, up) = (["DownEncoderBlock2D"; 4], ["UpDecoderBlock2D"; 4]);
    let config = json!({"latent_channels": 32, "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2,
        "sample_size": 1024, "patch_size": [2, 2], "down_block_types": down, "up_block_types": up});
    write(&folder.join("vae"), config, DIFFUSERS, |config: VaeConfig| {
        config.tensor_shapes()
    });
    let config = json!({"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"}});
    let shapes = |config: Qwen3Config| config.tensor_shapes(config.num_hidden_layers, &|_| false);
    write(&folder.join("text_encoder"), config, TRANSFORMERS, shapes);
}

/// Qwen-Image, or Qwen-Image-Edit-2511, with the text encoder and its vision tower in one file.
fn write_qwen_image(folder: &Path, class: &str) {
    for name in ["qwen-vl-tiny", "qwen-image-tiny"] {
        copy_rest(&fixture(name), folder);
    }
    let index = folder.join("model_index.json");
    let mut written: Value = serde_json::from_slice(&fs::read(&index).unwrap()).unwrap();
    written["_class_name"] = class.into();
    fs::write(&index, written.to_string()).unwrap();
    let config = json!({"zero_cond_t": class != "QwenImagePipeline"});
    let shapes = |config: QwenImageTransformer| config.tensor_shapes().collect();
    write(&folder.join("transformer"), config, DIFFUSERS, shapes);
    write(
        &folder.join("vae"),
        json!({}),
        DIFFUSERS,
        |config: WanVaeConfig| config.tensor_shapes(),
    );
    let shapes = |config: Qwen2VlConfig| {
        // The file has queries, keys and values of the tower in one.
        let fused = |(name, mut shape): (String, Vec<usize>)| {
            let is_part = |part: &str| name.contains(&format!(".attn.{part}."));
            if is_part("k") || is_part("v") {
                return None;
            }
            if is_part("q") {
                shape[0] *= 3;
            }
            Some((
                format!("visual.{}", name.replace(".attn.q.", ".attn.qkv.")),
                shape,
            ))
        };
        let tower = config.vision.tensor_shapes().into_iter().filter_map(fused);
        config
            .tensor_shapes(&|_| false)
            .into_iter()
            .chain(tower)
            .collect()
    };
    write(&folder.join("text_encoder"), json!({}), TRANSFORMERS, shapes);
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

/// A model of Wan: its tiny counterpart, and the sizes of its transformer.
fn write_wan(folder: &Path, tiny: &str, transformer: &Value) {
    for from in ["wan-tiny", tiny] {
        copy_rest(&fixture(from), folder);
    }
    let names: &[&str] = match folder.join("transformer_2").is_dir() {
        true => &["transformer", "transformer_2"],
        false => &["transformer"],
    };
    for name in names {
        let shapes = |config: WanTransformer| config.tensor_shapes().collect();
        write(&folder.join(name), transformer.clone(), DIFFUSERS, shapes);
    }
    let vae = match tiny {
        "wan-ti2v-tiny" => json!({"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": true,
            "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16,
            "latents_mean": WanVaeConfig::wan_2_2().latents_mean, "latents_std": WanVaeConfig::wan_2_2().latents_std}),
        _ => json!({}),
    };
    write(&folder.join("vae"), vae, DIFFUSERS, |config: WanVaeConfig| {
        config.tensor_shapes()
    });
    let config = json!({"vocab_size": 256_384, "d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
        "feed_forward_proj": "gated-gelu", "model_type": "umt5"});
    let shapes = |config: T5Config| config.tensor_shapes(&|_| false);
    write(&folder.join("text_encoder"), config, TRANSFORMERS, shapes);
}

/// Ovi's fusion model in one file, with its base and the decoders of its sound beside it. The file has a name that declares its
/// variant.
fn write_ovi(folder: &Path, stem: &str) -> PathBuf {
    let base = folder.join("wan");
    fs::create_dir_all(&base).unwrap();
    write_model("wan2.2-ti2v-5b", &base);
    write(folder, json!({}), stem, |config: FusionConfig| {
        config.authors_tensor_shapes()
    });
    write(folder, json!({}), "v1-16", |config: MmAudioConfig| {
        config.tensor_shapes()
    });
    write(folder, json!({}), "best_netG", |config: VocoderConfig| {
        config.tensor_shapes()
    });
    folder.join(format!("{stem}.safetensors"))
}

/// Writes a checkpoint of the published shapes of a model, and returns what is opened.
pub(super) fn write_model(name: &str, folder: &Path) -> PathBuf {
    match name {
        "ovi-1.0" => return write_ovi(folder, "Ovi-11B-bf16"),
        "ovi-1.1-960-5s" => return write_ovi(folder, "model_960x960"),
        "ovi-1.1-960-10s" => return write_ovi(folder, "model_960x960_10s"),
        "flux-schnell" => write_flux(folder, false),
        "flux-dev" => write_flux(folder, true),
        "z-image-turbo" => write_z_image(folder, 3.0),
        "z-image-base" => write_z_image(folder, 6.0),
        "sdxl-base" => write_sdxl(folder),
        "flux2-klein-4b" => write_flux2(folder, true, [5, 20, 24], [2560, 9728]),
        "flux2-base-4b" => write_flux2(folder, false, [5, 20, 24], [2560, 9728]),
        "flux2-klein-9b" => write_flux2(folder, true, [8, 24, 32], [4096, 12_288]),
        "qwen-image" => write_qwen_image(folder, "QwenImagePipeline"),
        "qwen-image-edit" => write_qwen_image(folder, "QwenImageEditPlusPipeline"),
        "hunyuan-video" => write_hunyuan(folder),
        "framepack" => write_framepack(folder),
        "wan2.1-t2v-1.3b" => {
            let sizes = json!({"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30});
            write_wan(folder, "wan-tiny", &sizes);
        }
        "wan2.2-ti2v-5b" => {
            let sizes = json!({"num_attention_heads": 24, "ffn_dim": 14_336, "num_layers": 30, "in_channels": 48,
                "out_channels": 48});
            write_wan(folder, "wan-ti2v-tiny", &sizes);
        }
        "wan2.2-t2v-a14b" => write_wan(folder, "wan-a14b-tiny", &json!({})),
        "wan2.2-i2v-a14b" => write_wan(folder, "wan-i2v-tiny", &json!({"in_channels": 36})),
        "ace-step" => write_ace_step(folder),
        other => panic!("write the published shapes of {other} here"),
    }
    folder.to_owned()
}

/// Bytes of a parameter in the published files: f32, or bf16.
const WIDE: u64 = 4;
const HALVED: u64 = 2;

/// The hub's files are the parameters of their components, so their sizes are known by the types that these are stored in: the
/// transformers and the autoencoders in f32, UMT5 in f32 for 1.3B and else in bf16, and Ovi's model in bf16. Tokenizers and
/// configurations are some megabytes more.
#[test]
fn downloads_of_films_are_those_of_their_parameters() {
    /// Of MMAudio's autoencoder with its encoder, and of its vocoder, which are not all read.
    const OF_SOUND: u64 = 171_700_000 + 112_200_000;
    let count = |shapes: Vec<(String, Vec<usize>)>| -> u64 {
        let sizes = shapes.iter().map(|(_, shape)| shape.iter().product::<usize>());
        sizes.sum::<usize>() as u64
    };
    let transformer = |config: serde_json::Value| {
        let config: WanTransformer = serde_json::from_value(config).unwrap();
        count(config.tensor_shapes().collect())
    };
    let small = transformer(json!({"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}));
    let ti2v = transformer(
        json!({"num_attention_heads": 24, "ffn_dim": 14_336, "num_layers": 30, "in_channels": 48,
        "out_channels": 48}),
    );
    let [from_text, from_picture] = [16, 36].map(|channels| transformer(json!({"in_channels": channels})));
    let text: T5Config =
        serde_json::from_value(json!({"vocab_size": 256_384, "d_model": 4096, "d_ff": 10240,
        "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu", "model_type": "umt5"}))
        .unwrap();
    let text = count(text.tensor_shapes(&|_| false));
    let vae = count(WanVaeConfig::default().tensor_shapes());
    let vae_2_2 = count(WanVaeConfig::wan_2_2().tensor_shapes());
    let fusion = count(FusionConfig::default().tensor_shapes());
    let ovi = HALVED * (fusion + text) + WIDE * (vae_2_2 + OF_SOUND);
    for (name, bytes) in [
        ("wan2.1-t2v-1.3b", WIDE * (small + text + vae)),
        ("wan2.2-ti2v-5b", WIDE * (ti2v + vae_2_2) + HALVED * text),
        ("wan2.2-t2v-a14b", WIDE * (2 * from_text + vae) + HALVED * text),
        ("wan2.2-i2v-a14b", WIDE * (2 * from_picture + vae) + HALVED * text),
        ("ovi-1.0", ovi),
        ("ovi-1.1-960-5s", ovi),
        ("ovi-1.1-960-10s", ovi),
    ] {
        let (says, found) = (super::find(name).unwrap().download_gb, bytes as f64 / 1e9);
        assert!((says - found).abs() < 0.1, "{name}: {says} GB, and {found}");
    }
}
