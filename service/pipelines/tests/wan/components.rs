//! The transformer against the reference's, and mutations that the fixture must notice.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use pipelines::wan::{Seen, TokenCounts, Transformer, TransformerConfig};
use pipelines::z_image::{latent_of, patches_of};

use crate::device::{here, test_device};
use crate::numbers::{distance, json, numbers, resident, tensors};

/// Tensors of a transformer.
type Weights = HashMap<String, Tensor>;

/// The transformers of the fixture: name of the answers, and folder.
const MODELS: [(&str, &str); 4] = [
    ("t2v", "wan-tiny"),
    ("ti2v", "wan-ti2v-tiny"),
    ("a14b", "wan-a14b-tiny"),
    ("i2v", "wan-i2v-tiny"),
];

fn weights(folder: &str) -> Weights {
    let path = format!("{folder}/transformer/diffusion_pytorch_model.safetensors");
    let read = tensors(&path).into_iter();
    read.map(|(name, tensor)| (name, tensor.to_dtype(DType::F32).expect("numbers")))
        .collect()
}

/// A latent `[1, channels, frames, h, w]` as tokens.
fn tokens(latent: &Tensor) -> Tensor {
    let frames = latent
        .squeeze(0)
        .and_then(|latent| latent.transpose(0, 1)?.contiguous());
    let patches = patches_of(&frames.expect("frames")).and_then(|patches| patches.contiguous());
    let width = patches.as_ref().map_or(0, |patches| patches.dims()[2]);
    patches
        .and_then(|patches| patches.reshape((1, patches.elem_count() / width, width)))
        .expect("tokens")
}

/// Tokens of `frames` frames as a latent.
fn untokens(tokens: &Tensor, frames: usize) -> Tensor {
    let (_, count, width) = tokens.dims3().expect("tokens");
    let latent = tokens
        .to_device(&Device::Cpu)
        .and_then(|tokens| tokens.reshape((frames, count / frames, width)))
        .and_then(|tokens| latent_of(&tokens, 2, 3))
        .and_then(|frames| frames.transpose(0, 1)?.contiguous()?.unsqueeze(0));
    latent.expect("a latent")
}

/// The relative error of a transformer with these weights; `batch` texts at once.
fn error_of(name: &str, folder: &str, weights: &Weights, batch: usize) -> f64 {
    let config: TransformerConfig = json(&format!("{folder}/transformer/config.json"));
    let answers = tensors("wan-tiny/expected/transformer.safetensors");
    let (text, latent) = (
        &answers[&format!("{name}.text")],
        &answers[&format!("{name}.latent")],
    );
    let expected = &answers[&format!("{name}.velocity")];
    let device = test_device();
    let on = (DType::F32, device);
    let of_channels = |first: usize, count: usize| {
        let channels = latent
            .narrow(1, first, count)
            .and_then(|channels| channels.contiguous());
        here(&tokens(&channels.expect("channels")))
    };
    let own = of_channels(0, config.out_channels);
    let rows = own.dim(1).expect("rows");
    let transformer = Transformer::new(&config, &resident(weights)).expect("a transformer");
    let mut go_on = || Ok(());
    let mut run = || -> Result<Tensor, pipelines::StageError> {
        let texts = Tensor::cat(&vec![text; batch], 0)?;
        // Another text beside it must not change it.
        let texts = match batch {
            1 => texts,
            _ => Tensor::cat(&[&text.affine(-0.5, 0.1)?, text], 0)?,
        };
        let texts = transformer.texts(&here(&texts), &mut go_on)?;
        let times = transformer.times(&[900.0, 637.0], on)?;
        let rotations = transformer.rotations(3, (2, 3), device)?;
        let first = if name == "ti2v" { rows / 3 } else { 0 };
        let counts = TokenCounts {
            first,
            sampled: rows - first,
        };
        let sampled = own.narrow(1, first, rows - first)?.contiguous()?;
        let picture = own.narrow(1, 0, first.max(1))?.contiguous()?;
        let condition = config
            .is_conditioned()
            .then(|| of_channels(config.out_channels, config.conditions()));
        let seen = match (&condition, first) {
            (Some(condition), _) => Seen::Conditioned(condition),
            (None, 0) => Seen::Alone,
            _ => Seen::After(&picture),
        };
        let buffers = transformer.step_buffers((batch, counts), seen, on)?;
        let mut found = None;
        // Buffers are reused: the second pass must not see what the first left.
        for step in [0, 1] {
            let velocity = transformer.velocity(
                &sampled,
                (&times, step),
                (&texts, &rotations),
                &buffers,
                &mut || Ok(()),
            )?;
            found = Some(velocity.narrow(0, batch - 1, 1)?.contiguous()?);
        }
        Ok(found.expect("a velocity"))
    };
    let found = run().expect("a pass");
    match name {
        "ti2v" => {
            let later = expected.narrow(2, 1, 2).and_then(|later| later.contiguous());
            distance(&untokens(&found, 2), &later.expect("frames"))
        }
        _ => distance(&untokens(&found, 3), expected),
    }
}

#[test]
fn transformers_equal_the_reference() {
    for (name, folder) in MODELS {
        for batch in [1, 2] {
            let apart = error_of(name, folder, &weights(folder), batch);
            println!("{name}, batch of {batch}: {apart:e}");
            assert!(apart <= 1e-5, "{name}: {apart:e}");
        }
    }
}

/// Each mistake changes the result a hundred times more than the tolerance.
#[test]
fn mistakes_are_noticed() {
    let reversed = |weights: &mut Weights, name: &str| {
        let tensor = weights.get_mut(name).expect("a tensor");
        let mut values = numbers(tensor);
        values.reverse();
        *tensor = Tensor::from_vec(values, tensor.shape(), &Device::Cpu).expect("numbers");
    };
    let swapped = |weights: &mut Weights, one: &str, other: &str| {
        let (first, second) = (weights[one].clone(), weights[other].clone());
        weights.insert(one.to_owned(), second);
        weights.insert(other.to_owned(), first);
    };
    let names: Vec<String> = weights("wan-tiny").into_keys().collect();
    for name in names {
        let mut changed = weights("wan-tiny");
        reversed(&mut changed, &name);
        let apart = error_of("t2v", "wan-tiny", &changed, 1);
        // What is added to all keys alike hardly changes attention, and the order of a small bias changes little.
        let least = if name.ends_with(".bias") { 1e-4 } else { 1e-3 };
        assert!(apart > least, "{name}: {apart:e}");
    }
    for (one, other) in [
        ("blocks.0.attn1.norm_q.weight", "blocks.0.attn1.norm_k.weight"),
        ("blocks.0.attn1.to_q.weight", "blocks.0.attn2.to_q.weight"),
        ("blocks.1.attn2.to_k.weight", "blocks.1.attn2.to_v.weight"),
        ("blocks.0.scale_shift_table", "blocks.1.scale_shift_table"),
    ] {
        let mut changed = weights("wan-ti2v-tiny");
        swapped(&mut changed, one, other);
        let apart = error_of("ti2v", "wan-ti2v-tiny", &changed, 1);
        assert!(apart > 1e-3, "{one}: {apart:e}");
    }
}
