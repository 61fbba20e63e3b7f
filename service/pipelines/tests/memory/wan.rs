//! Wan's text encoder, and steps under one text and under two.

use candle_core::{DType, Device, Tensor};
use pipelines::text::t5::{T5Config, T5Encoder};
use pipelines::wan::{Seen, TokenCounts, Transformer, TransformerConfig, denoise_scratch};

use crate::{alone, assert_close, made_up, peak_of};

#[test]
fn umt5_allocates_the_predicted_bytes() {
    let _alone = alone();
    let json = r#"{"vocab_size": 400, "d_model": 512, "d_kv": 64, "d_ff": 1280, "num_layers": 3, "num_heads": 8,
        "feed_forward_proj": "gated-gelu", "model_type": "umt5"}"#;
    let config: T5Config = serde_json::from_str(json).expect("a configuration");
    let tensors = made_up(config.tensor_shapes(&|_| true));
    let encoder = T5Encoder::new(&config, "text_encoder", &tensors).expect("an encoder");
    for tokens in [32, 480] {
        let ids: Vec<u32> = (0..tokens as u32).map(|i| i * 7 % 400).collect();
        let taken = peak_of(|| encoder.forward(&ids, &|| false).expect("states"));
        assert_close(
            &format!("{tokens} tokens"),
            taken,
            config.scratch(tokens, DType::F32).0,
        );
    }
}

#[test]
fn steps_allocate_the_predicted_bytes() {
    let _alone = alone();
    let json = r#"{"num_attention_heads": 4, "attention_head_dim": 64, "in_channels": 16, "out_channels": 16,
        "text_dim": 512, "ffn_dim": 1024, "num_layers": 3}"#;
    let config: TransformerConfig = serde_json::from_str(json).expect("a configuration");
    let tensors = made_up(config.tensor_shapes());
    let (on, frames, sides) = ((DType::F32, &Device::Cpu), 5, (16, 24));
    let rows = frames * sides.0 * sides.1;
    for (batch, first) in [(1, 0), (2, 0), (2, sides.0 * sides.1)] {
        let counts = TokenCounts {
            first,
            sampled: rows - first,
        };
        let inputs = |rows: usize, width: usize| Tensor::zeros((1, rows, width), DType::F32, &Device::Cpu);
        let latent = inputs(counts.sampled, 64).expect("a latent");
        let picture = inputs(first.max(1), 64).expect("a picture");
        let states = Tensor::zeros((batch, 512, 512), DType::F32, &Device::Cpu).expect("states");
        let work = || -> Result<Tensor, pipelines::StageError> {
            let transformer = Transformer::new(&config, &tensors)?;
            let texts = transformer.texts(&states.copy()?, &mut || Ok(()))?;
            let times = transformer.times(&[900.0; 20], on)?;
            let rotations = transformer.rotations(frames, sides, &Device::Cpu)?;
            let seen = match first {
                0 => Seen::Alone,
                _ => Seen::After(&picture),
            };
            let buffers = transformer.step_buffers((batch, counts), seen, on)?;
            let velocity =
                transformer.velocity(&latent, (&times, 3), (&texts, &rotations), &buffers, &mut || {
                    Ok(())
                })?;
            Ok(velocity.clone())
        };
        let taken = peak_of(|| work().expect("a step"));
        let predicted = denoise_scratch(&config, (batch, counts), (batch, 512), 20, DType::F32);
        assert_close(
            &format!("a batch of {batch}, {first} of a picture"),
            taken,
            predicted,
        );
    }
}
