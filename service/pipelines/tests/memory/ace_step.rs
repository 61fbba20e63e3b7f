//! The memory of a request of ACE-Step in a shared pass.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::ace_step::{LayerConfig, Transformer, TransformerConfig, request_scratch};

use crate::{alone, peak_of};

#[test]
fn each_further_request_of_a_pass_takes_the_predicted_bytes() {
    let _alone = alone();
    let config = TransformerConfig {
        layer: LayerConfig {
            hidden_size: 256,
            intermediate_size: 512,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 64,
            ..LayerConfig::default()
        },
        num_hidden_layers: 4,
        ..TransformerConfig::default()
    };
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("zeros");
    let shapes = config.tensor_shapes().into_iter();
    let tensors = shapes.map(|(name, shape)| (name, zeros(&shape)));
    let tensors = ComponentTensors::new(tensors.collect());
    let transformer = Transformer::new(&config, &tensors).expect("all tensors");
    let on = (DType::F32, &Device::Cpu);
    for (frames, tokens, steps) in [(1500, 160, 2), (250, 700, 8)] {
        let taken = |requests: usize| {
            let hold = || {
                let many = || 0..requests;
                let contexts: Vec<Tensor> = many().map(|_| zeros(&[frames, 128])).collect();
                let condition = zeros(&[tokens, 256]);
                let condition = |_| {
                    transformer
                        .condition(&condition, &mut || Ok(()))
                        .expect("a condition")
                };
                let conditions: Vec<_> = many().map(condition).collect();
                // Those of all steps of a request, and of the one that a pass computes.
                let times = |_| transformer.times(&vec![0.5; steps + 1], on).expect("times");
                let times: Vec<_> = many().map(times).collect();
                let buffers = transformer
                    .shared_buffers((requests, frames), on)
                    .expect("buffers");
                // The latent, its copy in the dtype of the transformer, and velocities that are mixed.
                let latents: Vec<Tensor> = many().map(|_| zeros(&[3 * frames, 64])).collect();
                drop((contexts, conditions, times, buffers, latents));
            };
            // The threads of a product keep their packing buffers for the next product, so that a first run may take more.
            let runs = (0..5).map(|_| peak_of(hold));
            runs.min().expect("runs")
        };
        let measured = (taken(3) - taken(1)) / 2;
        let predicted = request_scratch(&config, frames, &[tokens], steps as u32 + 1, DType::F32);
        let ratio = predicted as f64 / measured as f64;
        println!("{frames} frames: predicted {predicted} measured {measured} ({ratio:.2})");
        assert!((0.98..1.2).contains(&ratio), "{frames} frames: {ratio:.2}");
    }
}
