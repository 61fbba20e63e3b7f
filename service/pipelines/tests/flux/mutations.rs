//! The tolerance detects typical porting errors: each of them, injected on purpose, exceeds the CPU's tolerance a
//! hundredfold, on every device.

use std::collections::HashMap;

use candle_core::Tensor;

use crate::components::velocity;
use crate::device::ON_CPU;
use crate::numbers::{distance, resident, tensors};

type Tensors = HashMap<String, Tensor>;

/// Swaps two tensors.
fn swap(tensors: &mut Tensors, one: &str, other: &str) {
    let (a, b) = (tensors[one].clone(), tensors[other].clone());
    tensors.insert(one.to_owned(), b);
    tensors.insert(other.to_owned(), a);
}

/// Swaps parts `one` and `other` of the `parts` of a modulation's weight and bias.
fn swap_parts(tensors: &mut Tensors, name: &str, parts: usize, one: usize, other: usize) {
    for kind in ["weight", "bias"] {
        let name = format!("{name}.{kind}");
        let mut chunks = tensors[&name].chunk(parts, 0).expect("parts");
        chunks.swap(one, other);
        tensors.insert(name, Tensor::cat(&chunks, 0).expect("a tensor"));
    }
}

fn replace(tensors: &mut Tensors, name: &str, by: impl Fn(&Tensor) -> candle_core::Result<Tensor>) {
    let tensor = by(&tensors[name]).expect("a tensor");
    tensors.insert(name.to_owned(), tensor);
}

fn drop_bias(tensors: &mut Tensors, name: &str) {
    replace(tensors, &format!("{name}.bias"), Tensor::zeros_like);
}

fn neutral_norm(tensors: &mut Tensors, name: &str) {
    replace(tensors, &format!("{name}.weight"), Tensor::ones_like);
}

/// An error, and the change of the tensors that simulates it.
type Mutation = (&'static str, fn(&mut Tensors));

const MUTATIONS: &[Mutation] = &[
    ("shift and scale swapped in a double block", |t| {
        swap_parts(t, "transformer_blocks.1.norm1.linear", 6, 0, 1);
    }),
    (
        "shift and scale of the feed-forward swapped in the text stream",
        |t| {
            swap_parts(t, "transformer_blocks.0.norm1_context.linear", 6, 3, 4);
        },
    ),
    ("gates of attention and feed-forward swapped", |t| {
        swap_parts(t, "transformer_blocks.0.norm1.linear", 6, 2, 5);
    }),
    ("shift and scale swapped in a single block", |t| {
        swap_parts(t, "single_transformer_blocks.1.norm.linear", 3, 0, 1);
    }),
    ("scale and shift swapped in the last layer", |t| {
        swap_parts(t, "norm_out.linear", 2, 0, 1)
    }),
    ("norms of queries and keys swapped in a double block", |t| {
        swap(
            t,
            "transformer_blocks.0.attn.norm_q.weight",
            "transformer_blocks.0.attn.norm_k.weight",
        );
    }),
    ("norms of picture and text swapped", |t| {
        swap(
            t,
            "transformer_blocks.0.attn.norm_q.weight",
            "transformer_blocks.0.attn.norm_added_q.weight",
        );
    }),
    ("norm of a single block's keys neutral", |t| {
        neutral_norm(t, "single_transformer_blocks.0.attn.norm_k");
    }),
    ("bias of a query dropped", |t| {
        drop_bias(t, "transformer_blocks.0.attn.to_q")
    }),
    ("bias of the text's value dropped", |t| {
        drop_bias(t, "transformer_blocks.0.attn.add_v_proj")
    }),
    ("bias of an output dropped", |t| {
        drop_bias(t, "transformer_blocks.1.attn.to_out.0")
    }),
    ("bias of the text's output dropped", |t| {
        drop_bias(t, "transformer_blocks.0.attn.to_add_out")
    }),
    ("bias of a feed-forward dropped", |t| {
        drop_bias(t, "transformer_blocks.1.ff.net.2")
    }),
    ("bias of the text's feed-forward dropped", |t| {
        drop_bias(t, "transformer_blocks.0.ff_context.net.2")
    }),
    ("bias of a single block's feed-forward dropped", |t| {
        drop_bias(t, "single_transformer_blocks.0.proj_mlp");
    }),
    ("bias of the timestep dropped", |t| {
        drop_bias(t, "time_text_embed.timestep_embedder.linear_1")
    }),
    ("bias of the last layer dropped", |t| drop_bias(t, "proj_out")),
    ("guidance and timestep swapped", |t| {
        for layer in ["linear_1", "linear_2"] {
            for kind in ["weight", "bias"] {
                swap(
                    t,
                    &format!("time_text_embed.timestep_embedder.{layer}.{kind}"),
                    &format!("time_text_embed.guidance_embedder.{layer}.{kind}"),
                );
            }
        }
    }),
    ("query and key of the text swapped", |t| {
        for kind in ["weight", "bias"] {
            swap(
                t,
                &format!("transformer_blocks.0.attn.add_q_proj.{kind}"),
                &format!("transformer_blocks.0.attn.add_k_proj.{kind}"),
            );
        }
    }),
];

#[test]
fn wrong_weights_exceed_the_tolerance() {
    let weights = tensors("flux-tiny/transformer/diffusion_pytorch_model.safetensors");
    let inputs = tensors("flux-tiny/expected/transformer.safetensors");
    for (name, mutate) in MUTATIONS {
        let mut weights = weights.clone();
        mutate(&mut weights);
        let found = velocity("flux-tiny", &resident(&weights), &inputs);
        let factor = distance(&found, &inputs["output"]) / ON_CPU.component;
        println!("{name}: {factor:.0} times the tolerance");
        assert!(factor > 100.0, "{name}: {factor:.1}");
    }
}
