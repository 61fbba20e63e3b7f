//! SDXL's stages.

use std::collections::HashMap;

use candle_core::{DType, Device};
use pipelines::noise::Generator;
use pipelines::sdxl::{PerLevel, Prompted, Sizes, Unet, UnetConfig};
use pipelines::text::clip::{ClipConfig, ClipEncoder};
use pipelines::{
    AdapterFile, AdapterKind, AdapterUse, Image, Medium, Request, StrengthCurve, Unobserved, Values, families,
};

use crate::device::crate_folder;
use crate::open_model::{F32, OpenModel};
use crate::{alone, assert_close, made_up, peak_of, random};

/// Peak bytes of two steps.
fn denoise(config: &UnetConfig, sizes: Sizes) -> u64 {
    let tensors = made_up(config.tensor_shapes());
    let unet = Unet::new(config, &tensors).expect("all tensors");
    let mut generator = Generator::new(2);
    let pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim;
    let prompts = (0..sizes.items).map(|_| Prompted {
        states: random(&[1, sizes.text, config.cross_attention_dim], &mut generator),
        pooled: random(&[1, pooled], &mut generator),
        ids: [64.0, 64.0, 0.0, 0.0, 64.0, 64.0],
    });
    let prompts: Vec<Prompted> = prompts.collect();
    let prompts: Vec<&Prompted> = prompts.iter().collect();
    let [rows, columns] = sizes.sides;
    let latent = random(&[sizes.items, rows, columns, config.in_channels], &mut generator);
    let on = (DType::F32, &Device::Cpu);
    peak_of(|| {
        let conditioning = unet.condition(&prompts, on).expect("conditioning");
        let scratch = unet.scratch((sizes.items, rows * columns), on).expect("scratch");
        for time in [999.0, 1.0] {
            let latent = latent.copy().expect("a latent");
            unet.forward(&latent, time, &conditioning, &scratch, &mut || Ok(()))
                .expect("a prediction");
        }
    })
}

#[test]
fn stages_allocate_the_predicted_bytes() {
    let _alone = alone();
    let small = UnetConfig {
        block_out_channels: vec![32, 64, 96],
        transformer_layers_per_block: PerLevel::Each(vec![1, 1, 2]),
        attention_head_dim: PerLevel::Each(vec![1, 2, 3]),
        cross_attention_dim: 128,
        addition_time_embed_dim: 16,
        projection_class_embeddings_input_dim: 6 * 16 + 40,
        ..UnetConfig::default()
    };
    for (items, sides, text) in [(1, [16, 24], 77), (2, [40, 36], 154), (2, [96, 64], 77)] {
        let sizes = Sizes { items, sides, text };
        let (taken, predicted) = (denoise(&small, sizes), small.scratch(sizes, DType::F32));
        assert_close(&format!("{sizes:?}"), taken, predicted);
    }

    // Attention at the finest resolution takes other memory than convolutions do.
    let attends = UnetConfig {
        down_block_types: vec!["CrossAttnDownBlock2D".to_owned(); 3],
        up_block_types: vec!["CrossAttnUpBlock2D".to_owned(); 3],
        ..small
    };
    let sizes = Sizes {
        items: 2,
        sides: [64, 64],
        text: 77,
    };
    let (taken, predicted) = (denoise(&attends, sizes), attends.scratch(sizes, DType::F32));
    assert_close("attention at all resolutions", taken, predicted);

    let config = ClipConfig {
        vocab_size: 400,
        hidden_size: 320,
        intermediate_size: 1280,
        num_hidden_layers: 3,
        num_attention_heads: 5,
        ..ClipConfig::default()
    };
    let tensors = made_up(config.tensor_shapes(&|_| true));
    let encoder = ClipEncoder::new(&config, "text_encoder_2", &tensors).expect("an encoder");
    let ids: Vec<u32> = (0..77).map(|i| i * 7 % 400).collect();
    let taken = peak_of(|| {
        let states = ops::blank(&[77, 320], DType::F32, &Device::Cpu).expect("memory");
        encoder
            .forward_with_states(&ids, &states, &|| false)
            .expect("states")
    });
    let states = (77 * 320 * DType::F32.size_in_bytes()) as u64;
    assert_close(
        "states of 77 tokens",
        taken,
        config.scratch(77, DType::F32).0 + states,
    );
}

/// The peak of denoising with a term of a convolution whose map is the largest that the UNet has, and what is predicted of it.
#[test]
fn terms_of_convolutions_allocate_the_predicted_bytes() {
    let _alone = alone();
    let root = tempfile::tempdir().expect("a folder");
    let path = root.path().join("adapter.safetensors");
    let mut generator = Generator::new(3);
    let layer = "lora_unet_up_blocks_2_resnets_0_conv1";
    // Of 12 channels and 8 that were kept, to 8.
    let weights = HashMap::from([
        (
            format!("{layer}.lora_down.weight"),
            random(&[400, 20, 3, 3], &mut generator),
        ),
        (
            format!("{layer}.lora_up.weight"),
            random(&[8, 400, 1, 1], &mut generator),
        ),
    ]);
    candle_core::safetensors::save(&weights, &path).expect("a file");
    let file = AdapterFile {
        name: "a".to_owned(),
        path,
        kind: AdapterKind::Lora,
        ignores_unknown: false,
    };
    let model = families().open(&crate_folder().join("fixtures/sdxl-tiny"), &F32);
    let opened = OpenModel::of(
        model
            .expect("a model")
            .with_adapters(&[file])
            .expect("an adapter"),
    );
    let of = |strength: f32| {
        let request = Request {
            prompt: "a red circle".to_owned(),
            adapters: vec![AdapterUse {
                name: "a".to_owned(),
                strength: StrengthCurve::constant(strength).expect("a strength"),
                text_strength: 0.0,
            }],
            ..Request::of(Medium::Image(Image::of(2048, 1024)), 1, 0.0, 75)
        };
        let plans = opened.stages(&request);
        let [text, denoise, ..] = plans.as_slice() else {
            panic!("{} stages", plans.len())
        };
        let encoded = opened.run(text, 0, &request, &Values::new(), &mut Unobserved);
        let encoded = encoded.expect("states");
        let taken = peak_of(|| opened.run(denoise, 0, &request, &encoded, &mut Unobserved));
        (taken, denoise.rungs[0].scratch.0)
    };
    let (taken, predicted) = of(1.0);
    assert_close("a term of rank 400", taken, predicted);
    // It would not fit into what is predicted without it.
    let (without, predicted_without) = of(0.0);
    assert!(
        without < taken && taken > predicted_without,
        "{taken} {predicted_without}"
    );
}
