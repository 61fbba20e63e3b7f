//! FLUX.2's stages.

use candle_core::{DType, Device, Tensor};
use pipelines::flux2::{Place, Prompted, Transformer, TransformerConfig, denoise_scratch};
use pipelines::noise::Generator;
use pipelines::text::qwen3::{Qwen3Config, Qwen3Encoder};

use crate::{alone, assert_close, made_up, peak_of, random};

/// Tokens of text, and the places of the generated picture and of those that it refers to.
struct Tokens {
    text: usize,
    picture: Place,
    references: Vec<Place>,
}

impl Tokens {
    fn of(text: usize, (rows, columns): (usize, usize), references: &[(usize, usize)]) -> Tokens {
        let place = |(rows, columns)| Place { rows, columns };
        Tokens {
            text,
            picture: place((rows, columns)),
            references: references.iter().copied().map(place).collect(),
        }
    }

    fn of_references(&self) -> usize {
        self.references.iter().map(|place| place.tokens()).sum()
    }

    fn predicted(&self, config: &TransformerConfig, steps: usize, conditions: usize) -> u64 {
        let pictures = (self.picture.tokens(), self.of_references());
        let passes = (steps as u32, conditions as u32);
        denoise_scratch(config, self.text, pictures, passes, DType::F32)
    }
}

/// Peak bytes of `steps` steps under a number of conditions.
fn denoise(config: &TransformerConfig, tokens: &Tokens, steps: usize, conditions: usize) -> u64 {
    let tensors = made_up(config.tensor_shapes());
    let transformer = Transformer::new(config, &tensors).expect("all tensors");
    let mut generator = Generator::new(2);
    let captions = (0..conditions).map(|_| {
        let shape = [1, tokens.text, config.joint_attention_dim];
        random(&shape, &mut generator)
    });
    let captions: Vec<Tensor> = captions.collect();
    let (generated, beside) = (tokens.picture.tokens(), tokens.of_references());
    let latent = random(&[1, generated, config.in_channels], &mut generator);
    let references = (beside > 0).then(|| random(&[1, beside, config.in_channels], &mut generator));
    let times: Vec<f32> = (0..steps).map(|step| 1.0 - step as f32 / steps as f32).collect();

    peak_of(|| {
        // Inputs of the stage: text and references on the card, the latent twice.
        let references = references.as_ref();
        let references = references.map(|tokens| tokens.copy().expect("references"));
        let conditions = captions.iter().map(|caption| {
            let caption = caption.copy().expect("a text");
            let prompted = Prompted {
                sequence: &caption,
                picture: tokens.picture,
                places: &tokens.references,
                references: references.as_ref(),
            };
            let conditioning = transformer.condition(&prompted, &times);
            conditioning.expect("conditioning")
        });
        let conditions: Vec<_> = conditions.collect();
        let kept = (conditions.len() > 1).then(|| latent.copy().expect("a velocity that is kept"));
        let latent = latent.copy().expect("a latent");
        let seen = latent.copy().expect("a latent");
        let finite = ops::Finite::new(&Device::Cpu).expect("a flag");
        let buffers = transformer
            .step_buffers(tokens.text, (generated, beside), (DType::F32, &Device::Cpu))
            .expect("buffers");
        for step in 0..steps {
            for conditioning in &conditions {
                let velocity = transformer
                    .velocity(&seen, conditioning, step, &buffers, &mut || Ok(()))
                    .expect("a velocity");
                ops::euler(&latent, velocity, -1.0 / steps as f64, &seen, &finite).expect("a step");
            }
        }
        drop(kept);
    })
}

#[test]
fn stages_allocate_the_predicted_bytes() {
    let _alone = alone();
    let small = TransformerConfig {
        num_layers: 1,
        num_single_layers: 2,
        attention_head_dim: 32,
        num_attention_heads: 6,
        joint_attention_dim: 384,
        axes_dims_rope: [8; 4],
        ..TransformerConfig::klein_4b()
    };
    for tokens in [
        Tokens::of(33, (8, 9), &[]),
        Tokens::of(130, (24, 20), &[(8, 8), (6, 10)]),
        Tokens::of(512, (40, 32), &[(16, 16)]),
    ] {
        let taken = denoise(&small, &tokens, 2, 1);
        let what = format!(
            "{} tokens of text, {} generated, {} of references",
            tokens.text,
            tokens.picture.tokens(),
            tokens.of_references()
        );
        assert_close(&what, taken, tokens.predicted(&small, 2, 1));
    }

    let tokens = Tokens::of(512, (40, 32), &[]);
    let [one, two] = [1, 2].map(|conditions| denoise(&small, &tokens, 2, conditions));
    let [predicted_one, predicted_two] = [1, 2].map(|conditions| tokens.predicted(&small, 2, conditions));
    let (added, predicted) = (two - one, predicted_two - predicted_one);
    println!("a second condition adds {added} bytes, {predicted} predicted");
    // Threads of the products hold other packing buffers in each run.
    assert!(
        added.abs_diff(predicted) < predicted / 4,
        "{added} bytes, {predicted} predicted"
    );

    let json = r#"{"vocab_size": 400, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 1000000.0}"#;
    let config: Qwen3Config = serde_json::from_str(json).expect("a configuration");
    let after = [1, 2, 3];
    let tensors = made_up(config.tensor_shapes(after[2], &|_| false));
    let encoder = Qwen3Encoder::new(&config, after[2], "text_encoder", &tensors).expect("an encoder");
    for (length, attended) in [(32, 32), (160, 20), (512, 300)] {
        let ids: Vec<u32> = (0..length as u32).map(|i| i * 7 % 400).collect();
        let taken = peak_of(|| encoder.states(&ids, attended, &after, &|| false).expect("states"));
        let predicted = config.scratch_of_states(length, after.len(), DType::F32).0;
        let what = format!("states of {length} tokens, {attended} of them attended to");
        assert_close(&what, taken, predicted);
    }
}
