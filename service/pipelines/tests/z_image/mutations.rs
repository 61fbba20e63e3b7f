//! The tolerance detects typical porting errors: each of them, injected on purpose, exceeds the CPU's tolerance a
//! hundredfold.

use std::collections::HashMap;

use candle_core::Tensor;

use crate::components::{ANSWERS, WEIGHTS, outputs, weights};
use crate::device::ON_CPU;
use crate::numbers::{distance, resident, tensors};

type Tensors = HashMap<String, Tensor>;

fn swap(tensors: &mut Tensors, one: &str, other: &str) {
    let (a, b) = (tensors[one].clone(), tensors[other].clone());
    tensors.insert(one.to_owned(), b);
    tensors.insert(other.to_owned(), a);
}

/// Swaps parts `one` and `other` of the four of a block's modulation.
fn swap_parts(tensors: &mut Tensors, block: &str, one: usize, other: usize) {
    for kind in ["weight", "bias"] {
        let name = format!("{block}.adaLN_modulation.0.{kind}");
        let mut chunks = tensors[&name].chunk(4, 0).expect("parts");
        chunks.swap(one, other);
        tensors.insert(name, Tensor::cat(&chunks, 0).expect("a tensor"));
    }
}

fn neutral(tensors: &mut Tensors, name: &str) {
    let ones = tensors[name].ones_like().expect("ones");
    tensors.insert(name.to_owned(), ones);
}

fn nothing(tensors: &mut Tensors, name: &str) {
    let zeros = tensors[name].zeros_like().expect("zeros");
    tensors.insert(name.to_owned(), zeros);
}

/// An error, and the change of the tensors that simulates it.
type Mutation = (&'static str, fn(&mut Tensors));

const MUTATIONS: &[Mutation] = &[
    ("scale and gate of attention swapped", |t| {
        swap_parts(t, "layers.1", 0, 1)
    }),
    ("scale and gate of the feed-forward swapped", |t| {
        swap_parts(t, "noise_refiner.0", 2, 3)
    }),
    ("gates of attention and feed-forward swapped", |t| {
        swap_parts(t, "layers.0", 1, 3)
    }),
    ("norms in front of and behind attention swapped", |t| {
        swap(
            t,
            "layers.0.attention_norm1.weight",
            "layers.0.attention_norm2.weight",
        );
    }),
    ("norms of attention and feed-forward swapped", |t| {
        swap(
            t,
            "context_refiner.1.attention_norm1.weight",
            "context_refiner.1.ffn_norm1.weight",
        );
    }),
    ("the norm behind a refiner's feed-forward neutral", |t| {
        neutral(t, "context_refiner.0.ffn_norm2.weight")
    }),
    ("the norm of the encoded text neutral", |t| {
        neutral(t, "cap_embedder.0.weight")
    }),
    ("norms of queries and keys swapped", |t| {
        swap(
            t,
            "layers.0.attention.norm_q.weight",
            "layers.0.attention.norm_k.weight",
        );
    }),
    ("gate and raised swapped", |t| {
        swap(
            t,
            "layers.1.feed_forward.w1.weight",
            "layers.1.feed_forward.w3.weight",
        );
    }),
    ("blocks swapped", |t| {
        swap(
            t,
            "noise_refiner.0.attention.to_v.weight",
            "noise_refiner.1.attention.to_v.weight",
        );
    }),
    ("refiners of picture and text swapped", |t| {
        swap(
            t,
            "noise_refiner.1.attention.to_out.0.weight",
            "context_refiner.1.attention.to_out.0.weight",
        );
    }),
    ("the picture's pads are zeros", |t| nothing(t, "x_pad_token")),
    ("the text's pads are zeros", |t| nothing(t, "cap_pad_token")),
    ("the pads are each other's", |t| {
        swap(t, "x_pad_token", "cap_pad_token")
    }),
    ("bias of the patches dropped", |t| {
        nothing(t, "all_x_embedder.2-1.bias")
    }),
    ("bias of the last modulation dropped", |t| {
        nothing(t, "all_final_layer.2-1.adaLN_modulation.1.bias")
    }),
    ("bias of the timestep dropped", |t| {
        nothing(t, "t_embedder.mlp.2.bias")
    }),
];

#[test]
fn a_wrong_weight_exceeds_the_tolerance() {
    let (right, inputs) = (weights(WEIGHTS), tensors(ANSWERS));
    for (name, mutate) in MUTATIONS {
        let mut weights = right.clone();
        mutate(&mut weights);
        let found = outputs(&resident(&weights), &inputs, "wide");
        let factor = distance(&found, &inputs["wide.output"]) / ON_CPU.component;
        println!("{name}: {factor:.0} times the tolerance");
        assert!(factor > 100.0, "{name}: {factor:.1}");
    }
}
