//! The tolerance detects typical porting errors: each of them, injected on purpose, exceeds the CPU's tolerance a hundredfold.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use pipelines::sdxl::{PerLevel, UnetConfig};

use crate::components::{ANSWERS, WEIGHTS, config, outputs, weights};
use crate::device::ON_CPU;
use crate::numbers::{distance, resident, tensors};

type Tensors = HashMap<String, Tensor>;

fn swap(tensors: &mut Tensors, one: &str, other: &str) {
    let (a, b) = (tensors[one].clone(), tensors[other].clone());
    tensors.insert(one.to_owned(), b);
    tensors.insert(other.to_owned(), a);
}

/// Changes a tensor.
fn change(tensors: &mut Tensors, name: &str, by: impl Fn(&Tensor) -> candle_core::Result<Tensor>) {
    let changed = by(&tensors[name]).expect("a tensor");
    tensors.insert(name.to_owned(), changed);
}

/// The second half of a tensor's rows in front of the first.
fn halves_swapped(tensor: &Tensor) -> candle_core::Result<Tensor> {
    let half = tensor.dim(0)? / 2;
    Tensor::cat(&[tensor.narrow(0, half, half)?, tensor.narrow(0, 0, half)?], 0)
}

/// An error, and the change of the configuration and of the tensors that simulates it.
type Mutation = (&'static str, fn(&mut UnetConfig, &mut Tensors));

const LAYER: &str = "down_blocks.2.attentions.1.transformer_blocks.1";

const MUTATIONS: &[Mutation] = &[
    ("heads of one width in place of as many heads", |c, _| {
        c.attention_head_dim = PerLevel::Each(vec![1, 1, 1]);
    }),
    ("another epsilon of group norms", |c, _| c.norm_eps = 1e-1),
    ("gate and value of GEGLU swapped", |_, t| {
        let name = format!("{LAYER}.ff.net.0.proj");
        change(t, &format!("{name}.weight"), halves_swapped);
        change(t, &format!("{name}.bias"), halves_swapped);
    }),
    ("keys and values of the text swapped", |_, t| {
        swap(
            t,
            &format!("{LAYER}.attn2.to_k.weight"),
            &format!("{LAYER}.attn2.to_v.weight"),
        );
    }),
    ("queries and keys of the map swapped", |_, t| {
        swap(
            t,
            &format!("{LAYER}.attn1.to_q.weight"),
            &format!("{LAYER}.attn1.to_v.weight"),
        );
    }),
    ("layers of an attention in another order", |_, t| {
        for part in ["attn1.to_out.0.weight", "ff.net.2.weight", "norm2.bias"] {
            let name = "down_blocks.2.attentions.1.transformer_blocks";
            swap(t, &format!("{name}.0.{part}"), &format!("{name}.1.{part}"));
        }
    }),
    ("no time in a residual block", |_, t| {
        change(
            t,
            "up_blocks.1.resnets.0.time_emb_proj.weight",
            Tensor::zeros_like,
        );
    }),
    ("sines before cosines", |_, t| {
        change(t, "time_embedding.linear_1.weight", |x| {
            let half = x.dim(1)? / 2;
            Tensor::cat(&[x.narrow(1, half, half)?, x.narrow(1, 0, half)?], 1)
        });
    }),
    ("the pooled state behind the sizes", |_, t| {
        change(t, "add_embedding.linear_1.weight", |x| {
            let (all, sizes) = (x.dim(1)?, 48);
            Tensor::cat(
                &[x.narrow(1, all - sizes, sizes)?, x.narrow(1, 0, all - sizes)?],
                1,
            )
        });
    }),
    ("kernels transposed", |_, t| {
        change(t, "mid_block.resnets.0.conv1.weight", |x| {
            x.transpose(2, 3)?.contiguous()
        });
    }),
    ("what was kept before the map", |_, t| {
        change(t, "up_blocks.2.resnets.1.conv1.weight", |x| {
            let half = x.dim(1)? / 2;
            Tensor::cat(&[x.narrow(1, half, half)?, x.narrow(1, 0, half)?], 1)
        });
    }),
    ("no norm before attention", |_, t| {
        let name = "mid_block.attentions.0.norm";
        change(t, &format!("{name}.weight"), |x| x.affine(1.1, 0.0));
    }),
    ("the last norm left out", |_, t| {
        change(t, "conv_norm_out.bias", Tensor::zeros_like);
    }),
];

#[test]
fn every_mutation_exceeds_the_tolerance_a_hundredfold() {
    let inputs = tensors(ANSWERS);
    for (told, mutate) in MUTATIONS {
        let (mut config, mut changed) = (config(), weights(WEIGHTS));
        mutate(&mut config, &mut changed);
        let found = outputs(&config, &resident(&changed), &inputs, "plain", DType::F32);
        let apart = distance(&found, &inputs["plain.output"]);
        println!("{told}: {apart:.2e}");
        assert!(apart > 100.0 * ON_CPU.component, "{told}: {apart:e}");
    }
}
