//! The planned cuDNN shapes of an ACE-Step request equal those that its sampling uses; what a request takes in a shared pass
//! is what is predicted.

#![allow(unsafe_code)] // The counting allocator.
#![allow(clippy::expect_used)] // What tests share is outside of them.

#[path = "flux_vae/counting.rs"]
mod counting;
#[path = "../../ops/tests/device/mod.rs"]
mod device;
#[allow(dead_code)] // each binary takes what it needs
#[path = "flux_parity/numbers.rs"]
mod numbers;
#[path = "resident/mod.rs"]
mod resident;
mod shapes_asked;
#[allow(dead_code)] // each binary takes what it needs
#[path = "ace_parity/workshop.rs"]
mod workshop;

use std::collections::BTreeSet;
use std::sync::{Arc, RwLock};

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::ace_step::{LayerConfig, Transformer, TransformerConfig, request_scratch};
use pipelines::{AudioTask, Request, Role, StageRun, Unobserved, Values};

use counting::peak_of;
use device::test_device;

use shapes_asked::{asked, words};
use workshop::{F32, Workshop, folder, new_track, of_source};

/// Held while memory is measured, which is that of all threads.
static ALONE: RwLock<()> = RwLock::new(());

#[test]
fn sampling_uses_the_planned_shapes() {
    let _together = ALONE.read();
    let (turbo, base) = (folder(false), folder(true));
    let guided = Request {
        guidance: 7.0,
        ..new_track()
    };
    let mixed = Request {
        strength: 0.5,
        ..of_source(AudioTask::Cover)
    };
    for (folder, request) in [(&turbo, new_track()), (&turbo, mixed), (&base, guided)] {
        let workshop = Workshop::open(folder.path(), &F32);
        let mut values = Values::new();
        for plan in workshop.model.plan(&request).expect("a valid request") {
            let run = || workshop.run(&plan, 0, &request, &values, &mut Unobserved);
            let (asked, given) = asked(run);
            let planned = words(&workshop.model.planned(&plan.name, &request));
            // Encoders of a few layers are not planned: what they ask for is made when it is asked for.
            if ["denoise", "decode", "encode_source"].contains(&plan.name.as_str()) {
                let [asked, planned] =
                    [asked, planned].map(|shapes| shapes.into_iter().collect::<BTreeSet<_>>());
                assert_eq!(asked, planned, "{}", plan.name);
            }
            values.extend(given.expect("a stage"));
        }
    }
}

#[test]
fn shared_passes_use_the_planned_shapes() {
    let _together = ALONE.read();
    let folder = folder(false);
    let workshop = Workshop::open(folder.path(), &F32);
    let request = Request {
        slots: 3,
        steps: 3,
        ..new_track()
    };
    let mut values = Values::new();
    let plans = workshop.model.plan(&request).expect("a valid request");
    let mut plans = plans.iter();
    let sample = loop {
        let plan = plans.next().expect("a stage");
        if plan.role == Role::Sample {
            break plan;
        }
        let given = workshop.run(plan, 0, &request, &values, &mut Unobserved);
        values.extend(given.expect("values"));
    };
    let tensors = |name: &str| Ok(Arc::clone(workshop.component(name)));
    let run = StageRun {
        plan: sample,
        rung: 0,
        request: &request,
        values: &values,
        tensors: &tensors,
        device: test_device(),
    };
    let mut used = BTreeSet::new();
    for slots in 1..=3 {
        let (asked, given) = asked(|| workshop.model.run_shared(&vec![run; slots], &mut Unobserved));
        assert_eq!(given.expect("values").len(), slots);
        used.extend(asked);
    }
    let planned = words(&workshop.model.planned("denoise", &request));
    assert_eq!(used, planned.into_iter().collect::<BTreeSet<_>>());
}

#[test]
fn each_further_request_of_a_pass_takes_the_predicted_bytes() {
    let _alone = ALONE.write();
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
                let times = transformer
                    .times(&vec![0.5; steps * requests], on)
                    .expect("times");
                let contexts: Vec<&Tensor> = contexts.iter().collect();
                let buffers = transformer.shared_buffers(&contexts).expect("buffers");
                // The latent, what is seen of it, and velocities that are mixed.
                let latents: Vec<Tensor> = many().map(|_| zeros(&[3 * frames, 64])).collect();
                drop((conditions, times, buffers, latents));
            };
            // The threads of a product keep what they packed into for the next, so that a first run may take more.
            let runs = (0..5).map(|_| peak_of(hold).0);
            runs.min().expect("runs")
        };
        let measured = (taken(3) - taken(1)) / 2;
        let predicted = request_scratch(&config, frames, &[tokens], steps as u32, DType::F32);
        let ratio = predicted as f64 / measured as f64;
        println!("{frames} frames: predicted {predicted} measured {measured} ({ratio:.2})");
        assert!((0.98..1.2).contains(&ratio), "{frames} frames: {ratio:.2}");
    }
}
