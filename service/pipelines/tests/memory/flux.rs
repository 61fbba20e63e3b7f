//! A denoising step of FLUX: memory, and processor time.

use candle_core::{DType, Device};
use pipelines::flux::{Prompted, Transformer, TransformerConfig, denoise_scratch, negative_scratch};
use pipelines::noise::Generator;

use crate::{alone, made_up, peak_of, processor_time, random};

/// The size of the demo model.
fn demo() -> TransformerConfig {
    TransformerConfig {
        num_layers: 2,
        num_single_layers: 4,
        attention_head_dim: 32,
        num_attention_heads: 6,
        joint_attention_dim: 128,
        pooled_projection_dim: 96,
        guidance_embeds: true,
        axes_dims_rope: [8, 12, 12],
        ..TransformerConfig::default()
    }
}

/// CPU seconds of `steps` steps over a square picture under a number of conditions, and their peak memory.
fn denoise(
    config: &TransformerConfig,
    (side, text): (usize, usize),
    steps: usize,
    conditions: usize,
) -> (f64, u64) {
    let tensors = made_up(config.tensor_shapes());
    let transformer = Transformer::new(config, &tensors).expect("all tensors");
    let mut generator = Generator::new(2);
    let sequence = random(&[1, text, config.joint_attention_dim], &mut generator);
    let pooled = random(&[1, config.pooled_projection_dim], &mut generator);
    let latent = random(&[1, side * side, config.in_channels], &mut generator);
    let times: Vec<f32> = (0..steps).map(|step| 1.0 - step as f32 / steps as f32).collect();

    let start = processor_time::of_process();
    let taken = peak_of(|| {
        let conditions = (0..conditions).map(|number| {
            // The first is there before.
            let sequence = match number {
                0 => sequence.clone(),
                _ => sequence.copy().expect("a text"),
            };
            let prompted = Prompted {
                reference: None,
                sequence: &sequence,
                pooled: &pooled,
                guidance: 3.5,
                rows: side,
                columns: side,
            };
            let conditioning = transformer.condition(&prompted, &times);
            let kept = (number > 0).then(|| latent.copy().expect("a velocity that is kept"));
            (conditioning.expect("conditioning"), kept)
        });
        let conditions: Vec<_> = conditions.collect();
        let latent = latent.copy().expect("a latent");
        let seen = latent.copy().expect("a latent");
        let finite = ops::Finite::new(&Device::Cpu).expect("a flag");
        let step_buffers = transformer
            .step_buffers(1, text, side * side, (DType::F32, &Device::Cpu))
            .expect("buffers");
        for step in 0..steps {
            for (conditioning, _) in &conditions {
                let velocity = transformer
                    .velocity(&seen, conditioning, step, &step_buffers, &mut || Ok(()))
                    .expect("a velocity");
                ops::euler(&latent, velocity, -1.0 / steps as f64, &seen, &finite).expect("a step");
            }
        }
    });
    (processor_time::of_process() - start, taken)
}

#[test]
fn a_step_allocates_the_predicted_bytes_and_is_fast() {
    let _alone = alone();
    let (seconds, _) = denoise(&demo(), (8, 48), 8, 1);
    println!("8 steps of the demo model: {seconds:.2} s");
    // Half a second on two idle cores; more on busy ones, where threads wait for each other.
    assert!(seconds < 5.0, "{seconds}");

    let wide = TransformerConfig {
        num_attention_heads: 12,
        num_layers: 1,
        num_single_layers: 1,
        ..demo()
    };
    for (config, side, text) in [(demo(), 8, 48), (demo(), 24, 128), (wide.clone(), 32, 256)] {
        let (seconds, taken) = denoise(&config, (side, text), 2, 1);
        let predicted = denoise_scratch(&config, text, side * side, 2, DType::F32);
        println!("{side}x{side} and {text} tokens: {taken} bytes, {predicted} predicted, {seconds:.2} s");
        assert!(taken <= predicted, "{taken} taken, {predicted} predicted");
        assert!(
            predicted <= taken * 2 + (4 << 20),
            "{taken} taken, {predicted} predicted"
        );
    }
    // A second condition: its memory is predicted separately.
    let (side, text) = (32, 256);
    let [one, two] = [1, 2].map(|conditions| denoise(&wide, (side, text), 2, conditions).1);
    let added = two - one;
    let predicted = negative_scratch(&wide, text, side * side, 2, DType::F32);
    println!("a second condition adds {added} bytes, {predicted} predicted");
    // Threads of the products hold other packing buffers in each run.
    assert!(
        added.abs_diff(predicted) < predicted / 4,
        "{added} bytes, {predicted} predicted"
    );
}
