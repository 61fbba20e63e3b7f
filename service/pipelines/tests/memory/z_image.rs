//! Z-Image's stages.

use candle_core::{DType, Device, Tensor};
use pipelines::noise::Generator;
use pipelines::text::qwen3::{Qwen3Config, Qwen3Encoder};
use pipelines::z_image::{
    Lengths, Transformer, TransformerConfig, denoise_scratch, negative_scratch, refining_scratch,
};

use crate::{alone, assert_close, made_up, peak_of, random};

/// Peak bytes of `steps` steps, with a negative prompt of a number of tokens, or with strengths that change.
fn denoise(
    config: &TransformerConfig,
    lengths: &Lengths,
    steps: usize,
    negative: Option<usize>,
    refines: bool,
) -> u64 {
    let tensors = made_up(config.tensor_shapes());
    let transformer = Transformer::new(config, &tensors).expect("all tensors");
    let mut generator = Generator::new(2);
    let texts = std::iter::once(lengths.text).chain(negative);
    let captions: Vec<Tensor> = texts
        .map(|text| random(&[text, config.cap_feat_dim], &mut generator))
        .collect();
    let longest = Lengths {
        text: lengths.text.max(negative.unwrap_or_default()),
        ..*lengths
    };
    let latent = random(&[1, lengths.picture(), config.patch_width()], &mut generator);
    let times: Vec<f32> = (0..steps).map(|step| step as f32 / steps as f32).collect();

    peak_of(|| {
        // Inputs of the stage: the text on the card, the latent twice.
        let latent = latent.copy().expect("a latent");
        let seen = latent.copy().expect("a latent");
        let on = (DType::F32, &Device::Cpu);
        let modulated = transformer.modulated(&times, on).expect("modulation");
        let size = (lengths.rows, lengths.columns);
        let conditions = captions.iter().map(|caption| {
            let caption = caption.copy().expect("a text");
            let conditioning = transformer.condition_of(&caption, size, &modulated, &mut || Ok(()));
            (conditioning.expect("conditioning"), caption)
        });
        let mut conditions: Vec<_> = conditions.collect();
        let kept = negative.map(|_| latent.copy().expect("a prediction that is kept"));
        let finite = ops::Finite::new(&Device::Cpu).expect("a flag");
        let buffers = transformer.step_buffers(&longest, on).expect("buffers");
        for step in 0..steps {
            for (conditioning, caption) in &mut conditions {
                if refines {
                    let again = transformer.condition_of(caption, size, &modulated, &mut || Ok(()));
                    *conditioning = again.expect("conditioning");
                }
                let direction = transformer
                    .direction(&seen, conditioning, step, &buffers, &mut || Ok(()))
                    .expect("an output");
                ops::euler(&latent, direction, 1.0 / steps as f64, &seen, &finite).expect("a step");
            }
        }
        drop(kept);
    })
}

#[test]
fn stages_allocate_the_predicted_bytes() {
    let _alone = alone();
    let small = TransformerConfig {
        dim: 192,
        n_layers: 2,
        n_refiner_layers: 1,
        n_heads: 6,
        n_kv_heads: 6,
        cap_feat_dim: 128,
        axes_dims: [8, 12, 12],
        timestep_inner: 64,
        ..TransformerConfig::default()
    };
    for (rows, columns, text) in [(8, 9, 33), (24, 20, 130), (40, 32, 500)] {
        let lengths = Lengths { rows, columns, text };
        let taken = denoise(&small, &lengths, 2, None, false);
        let predicted = denoise_scratch(&small, &lengths, 2, DType::F32);
        assert_close(&format!("{rows}x{columns} and {text} tokens"), taken, predicted);
    }

    // A second condition, of a text of equal length: its memory is predicted separately.
    let lengths = Lengths {
        rows: 40,
        columns: 32,
        text: 500,
    };
    let one = denoise(&small, &lengths, 2, None, false);
    let two = denoise(&small, &lengths, 2, Some(lengths.text), false);
    let refined = denoise(&small, &lengths, 2, None, true);
    for (what, taken, predicted) in [
        (
            "a second condition",
            two,
            negative_scratch(&small, &lengths, DType::F32),
        ),
        (
            "refining in each step",
            refined,
            refining_scratch(&small, &lengths, DType::F32),
        ),
    ] {
        let added = taken - one;
        println!("{what} adds {added} bytes, {predicted} predicted");
        // Threads of the products hold other packing buffers in each run.
        assert!(
            added.abs_diff(predicted) < predicted / 4,
            "{what}: {added} bytes, {predicted} predicted"
        );
    }

    let json = r#"{"vocab_size": 400, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 1000000.0}"#;
    let config: Qwen3Config = serde_json::from_str(json).expect("a configuration");
    let depth = config.num_hidden_layers - 1;
    let tensors = made_up(config.tensor_shapes(depth, &|_| false));
    let encoder = Qwen3Encoder::new(&config, depth, "text_encoder", &tensors).expect("an encoder");
    for tokens in [32, 160, 512] {
        let ids: Vec<u32> = (0..tokens as u32).map(|i| i * 7 % 400).collect();
        let by_candle = peak_of(|| encoder.forward(&ids, &|| false).expect("an encoding"));
        let predicted = config.scratch(tokens, false, DType::F32).0;
        assert_close(
            &format!("{tokens} tokens by candle-transformers"),
            by_candle,
            predicted,
        );
        let by_ours = peak_of(|| encoder.by_our_layers(&ids, &|| false).expect("an encoding"));
        let predicted = config.scratch(tokens, true, DType::F32).0;
        assert_close(&format!("{tokens} tokens by our layers"), by_ours, predicted);
    }
}
