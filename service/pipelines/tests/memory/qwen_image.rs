//! Qwen-Image's steps.

use candle_core::{DType, Device, Tensor};
use pipelines::noise::Generator;
use pipelines::qwen_image::{Place, Prompted, TokenCounts, Transformer, TransformerConfig, denoise_scratch};

use crate::{alone, assert_close, made_up, peak_of, random};

/// Tokens of text, and the places of the generated picture and of those that are edited.
struct Tokens {
    text: usize,
    places: Vec<Place>,
}

impl Tokens {
    fn of(text: usize, places: &[(usize, usize)]) -> Tokens {
        let place = |(rows, columns)| Place { rows, columns };
        Tokens {
            text,
            places: places.iter().copied().map(place).collect(),
        }
    }

    fn counts(&self) -> TokenCounts {
        TokenCounts {
            text: self.text,
            generated: self.places[0].tokens(),
            references: self.places[1..].iter().map(|place| place.tokens()).sum(),
        }
    }

    fn predicted(&self, config: &TransformerConfig, steps: usize, conditions: usize) -> u64 {
        let passes = (steps as u32, conditions as u32);
        denoise_scratch(config, self.counts(), passes, DType::F32)
    }
}

/// Peak bytes of `steps` steps under a number of conditions.
fn denoise(config: &TransformerConfig, tokens: &Tokens, steps: usize, conditions: usize) -> u64 {
    let tensors = made_up(config.tensor_shapes());
    let transformer = Transformer::new(config, &tensors).expect("all tensors");
    let mut generator = Generator::new(2);
    let shape = [1, tokens.text, config.joint_attention_dim];
    let captions = (0..conditions).map(|_| random(&shape, &mut generator));
    let captions: Vec<Tensor> = captions.collect();
    let counts = tokens.counts();
    let latent = random(&[1, counts.generated, config.in_channels], &mut generator);
    let references =
        (counts.references > 0).then(|| random(&[1, counts.references, config.in_channels], &mut generator));
    let times: Vec<f32> = (0..steps).map(|step| 1.0 - step as f32 / steps as f32).collect();
    let on = (DType::F32, &Device::Cpu);

    peak_of(|| {
        // Inputs of the stage: text and references on the card, the latent twice.
        let references = references.as_ref();
        let references = references.map(|tokens| tokens.copy().expect("references"));
        let modulated = transformer.modulated(&times, on).expect("modulations");
        let conditions = captions.iter().map(|caption| {
            let prompted = Prompted {
                sequence: &caption.copy().expect("a text"),
                places: &tokens.places,
                references: references.as_ref(),
            };
            transformer.condition(&prompted).expect("conditioning")
        });
        let conditions: Vec<_> = conditions.collect();
        let kept = (conditions.len() > 1).then(|| latent.copy().expect("a velocity that is kept"));
        let combined = kept.as_ref().map(|kept| kept.copy().expect("the combination"));
        let latent = latent.copy().expect("a latent");
        let seen = latent.copy().expect("a latent");
        let finite = ops::Finite::new(&Device::Cpu).expect("a flag");
        let buffers = transformer.step_buffers(counts, on).expect("buffers");
        for step in 0..steps {
            for conditioning in &conditions {
                let times = (&modulated, step);
                let velocity = transformer
                    .velocity(&seen, times, conditioning, &buffers, &mut || Ok(()))
                    .expect("a velocity");
                ops::euler(&latent, velocity, -1.0 / steps as f64, &seen, &finite).expect("a step");
            }
        }
        drop((kept, combined));
    })
}

#[test]
fn stages_allocate_the_predicted_bytes() {
    let _alone = alone();
    let small = TransformerConfig {
        num_layers: 2,
        attention_head_dim: 32,
        num_attention_heads: 6,
        joint_attention_dim: 256,
        axes_dims_rope: [8, 12, 12],
        zero_cond_t: true,
        ..TransformerConfig::default()
    };
    for tokens in [
        Tokens::of(33, &[(8, 9)]),
        Tokens::of(130, &[(24, 20), (8, 8), (6, 10)]),
        Tokens::of(512, &[(40, 32), (16, 16)]),
    ] {
        let taken = denoise(&small, &tokens, 2, 1);
        let counts = tokens.counts();
        assert_close(&format!("{counts:?}"), taken, tokens.predicted(&small, 2, 1));
    }

    let tokens = Tokens::of(512, &[(40, 32)]);
    let [one, two] = [1, 2].map(|conditions| denoise(&small, &tokens, 2, conditions));
    let [predicted_one, predicted_two] = [1, 2].map(|conditions| tokens.predicted(&small, 2, conditions));
    let (added, predicted) = (two - one, predicted_two - predicted_one);
    println!("a second condition adds {added} bytes, {predicted} predicted");
    // Threads of the products hold other packing buffers in each run.
    assert!(
        added.abs_diff(predicted) < predicted / 4,
        "{added} bytes, {predicted} predicted"
    );
}
