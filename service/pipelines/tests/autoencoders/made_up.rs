//! Synthetic latents and autoencoders of any size.

use std::cell::Cell;
use std::collections::HashMap;

use candle_core::{Device, Tensor};
use pipelines::autoencoders::kl::VaeConfig;

/// A deterministic latent of any size.
pub(crate) fn latent(h: usize, w: usize) -> Tensor {
    noise(&[1, 16, h, w], 1.0)
}

/// Deterministic numbers of about unit variance times `gain`.
pub(crate) fn noise(shape: &[usize], gain: f32) -> Tensor {
    thread_local!(static STATE: Cell<u64> = const { Cell::new(0) });
    STATE.set(shape.iter().fold(88_172_645_463_325_252, |s, n| {
        s ^ (*n as u64).wrapping_mul(0x9e37_79b9)
    }));
    let next = || {
        let mut s = STATE.get();
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        STATE.set(s);
        ((s >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 1.7 * gain
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// An autoencoder of this configuration with weights of about unit gain.
pub(crate) fn made_up(config: &VaeConfig) -> HashMap<String, Tensor> {
    let mut tensors = HashMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let into: usize = shape[1..].iter().product();
        let gain = if shape.len() > 1 {
            (into as f32).powf(-0.5)
        } else {
            0.1
        };
        let tensor = noise(shape, gain);
        let tensor = if name.contains("norm") && name.ends_with("weight") {
            (tensor + 1.0).unwrap()
        } else {
            tensor
        };
        tensors.insert(name, tensor);
    };
    let mut layer = |name: String, shape: &[usize]| {
        add(format!("{name}.bias"), &shape[..1]);
        add(format!("{name}.weight"), shape);
    };
    let resnet = |layer: &mut dyn FnMut(String, &[usize]), name: String, from: usize, to: usize| {
        layer(format!("{name}.norm1"), &[from]);
        layer(format!("{name}.conv1"), &[to, from, 3, 3]);
        layer(format!("{name}.norm2"), &[to]);
        layer(format!("{name}.conv2"), &[to, to, 3, 3]);
        if from != to {
            layer(format!("{name}.conv_shortcut"), &[to, from, 1, 1]);
        }
    };
    let channels = &config.block_out_channels;
    let coarsest = channels[channels.len() - 1];
    layer(
        "decoder.conv_in".to_owned(),
        &[coarsest, config.latent_channels, 3, 3],
    );
    layer("decoder.conv_norm_out".to_owned(), &[channels[0]]);
    layer("decoder.conv_out".to_owned(), &[3, channels[0], 3, 3]);
    for i in 0..2 {
        resnet(
            &mut layer,
            format!("decoder.mid_block.resnets.{i}"),
            coarsest,
            coarsest,
        );
    }
    for part in ["to_q", "to_k", "to_v", "to_out.0"] {
        layer(
            format!("decoder.mid_block.attentions.0.{part}"),
            &[coarsest, coarsest],
        );
    }
    layer(
        "decoder.mid_block.attentions.0.group_norm".to_owned(),
        &[coarsest],
    );
    let mut before = coarsest;
    for (level, &width) in channels.iter().rev().enumerate() {
        for i in 0..=config.layers_per_block {
            resnet(
                &mut layer,
                format!("decoder.up_blocks.{level}.resnets.{i}"),
                before,
                width,
            );
            before = width;
        }
        if level + 1 < channels.len() {
            layer(
                format!("decoder.up_blocks.{level}.upsamplers.0.conv"),
                &[width, width, 3, 3],
            );
        }
    }
    tensors
}
