//! The tolerance detects typical porting errors: each of them, injected on purpose, exceeds the CPU's tolerance a
//! hundredfold.

use std::collections::HashMap;

use candle_core::{Device, Tensor};

use crate::components::{ANSWERS, WEIGHTS, outputs, weights};
use crate::device::ON_CPU;
use crate::numbers::{distance, resident, tensors};

type Tensors = HashMap<String, Tensor>;

/// Width of the hidden states, and inside the feed-forward layers.
const WIDTH: usize = 48;
const INNER: usize = 3 * WIDTH;

fn swap(tensors: &mut Tensors, one: &str, other: &str) {
    let (a, b) = (tensors[one].clone(), tensors[other].clone());
    tensors.insert(one.to_owned(), b);
    tensors.insert(other.to_owned(), a);
}

/// Swaps `count` rows of a tensor from row `one` on with those from row `other` on.
fn swap_rows(tensors: &mut Tensors, name: &str, count: usize, one: usize, other: usize) {
    let tensor = &tensors[name];
    let length = tensor.dims()[0];
    assert!(one + count <= other && other + count <= length, "{name}");
    let mut rows: Vec<u32> = (0..length as u32).collect();
    for row in 0..count {
        rows.swap(one + row, other + row);
    }
    let rows = Tensor::from_vec(rows, length, &Device::Cpu).expect("rows");
    let swapped = tensor.index_select(&rows, 0).expect("a tensor");
    tensors.insert(name.to_owned(), swapped);
}

/// Swaps parts `one` and `other` of a modulator, each as long as the hidden states.
fn swap_parts(tensors: &mut Tensors, modulator: &str, one: usize, other: usize) {
    let name = format!("{modulator}.linear.weight");
    swap_rows(tensors, &name, WIDTH, one * WIDTH, other * WIDTH);
}

/// An error, and the change of the tensors that simulates it.
type Mutation = (&'static str, fn(&mut Tensors));

const MUTATIONS: &[Mutation] = &[
    ("shift and scale of the picture's attention swapped", |t| {
        swap_parts(t, "double_stream_modulation_img", 0, 1);
    }),
    ("scale and gate of the picture's attention swapped", |t| {
        swap_parts(t, "double_stream_modulation_img", 1, 2);
    }),
    ("shift and scale of the picture's feed-forward swapped", |t| {
        swap_parts(t, "double_stream_modulation_img", 3, 4);
    }),
    ("scale and gate of the picture's feed-forward swapped", |t| {
        swap_parts(t, "double_stream_modulation_img", 4, 5);
    }),
    ("gates of attention and feed-forward swapped", |t| {
        swap_parts(t, "double_stream_modulation_img", 2, 5);
    }),
    ("shift and scale of the text's attention swapped", |t| {
        swap_parts(t, "double_stream_modulation_txt", 0, 1);
    }),
    ("scale and gate of the text's feed-forward swapped", |t| {
        swap_parts(t, "double_stream_modulation_txt", 4, 5);
    }),
    ("gates of the text's attention and feed-forward swapped", |t| {
        swap_parts(t, "double_stream_modulation_txt", 2, 5);
    }),
    ("shift and scale of single blocks swapped", |t| {
        swap_parts(t, "single_stream_modulation", 0, 1);
    }),
    ("scale and gate of single blocks swapped", |t| {
        swap_parts(t, "single_stream_modulation", 1, 2);
    }),
    ("modulators of picture and text swapped", |t| {
        swap(
            t,
            "double_stream_modulation_img.linear.weight",
            "double_stream_modulation_txt.linear.weight",
        );
    }),
    ("scale and shift of the last layer swapped", |t| {
        swap_parts(t, "norm_out", 0, 1);
    }),
    ("norms of the picture's queries and keys swapped", |t| {
        swap(
            t,
            "transformer_blocks.0.attn.norm_q.weight",
            "transformer_blocks.0.attn.norm_k.weight",
        );
    }),
    ("norms of the text's queries and keys swapped", |t| {
        swap(
            t,
            "transformer_blocks.0.attn.norm_added_q.weight",
            "transformer_blocks.0.attn.norm_added_k.weight",
        );
    }),
    ("norms of queries and keys of a single block swapped", |t| {
        swap(
            t,
            "single_transformer_blocks.0.attn.norm_q.weight",
            "single_transformer_blocks.0.attn.norm_k.weight",
        );
    }),
    ("norms of picture and text swapped", |t| {
        swap(
            t,
            "transformer_blocks.1.attn.norm_k.weight",
            "transformer_blocks.1.attn.norm_added_k.weight",
        );
    }),
    ("queries and keys of the picture swapped", |t| {
        swap(
            t,
            "transformer_blocks.1.attn.to_q.weight",
            "transformer_blocks.1.attn.to_k.weight",
        );
    }),
    ("outputs of picture and text swapped", |t| {
        swap(
            t,
            "transformer_blocks.0.attn.to_out.0.weight",
            "transformer_blocks.0.attn.to_add_out.weight",
        );
    }),
    ("feed-forwards of picture and text swapped", |t| {
        swap(
            t,
            "transformer_blocks.1.ff.linear_out.weight",
            "transformer_blocks.1.ff_context.linear_out.weight",
        );
    }),
    ("gate and raised of the picture swapped", |t| {
        let name = "transformer_blocks.1.ff.linear_in.weight";
        swap_rows(t, name, INNER, 0, INNER);
    }),
    ("gate and raised of the text swapped", |t| {
        let name = "transformer_blocks.0.ff_context.linear_in.weight";
        swap_rows(t, name, INNER, 0, INNER);
    }),
    ("queries and keys of a single block swapped", |t| {
        let name = "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight";
        swap_rows(t, name, WIDTH, 0, WIDTH);
    }),
    ("keys and values of a single block swapped", |t| {
        let name = "single_transformer_blocks.1.attn.to_qkv_mlp_proj.weight";
        swap_rows(t, name, WIDTH, WIDTH, 2 * WIDTH);
    }),
    ("gate and raised of a single block swapped", |t| {
        let name = "single_transformer_blocks.2.attn.to_qkv_mlp_proj.weight";
        swap_rows(t, name, INNER, 3 * WIDTH, 3 * WIDTH + INNER);
    }),
    ("double blocks swapped", |t| {
        swap(
            t,
            "transformer_blocks.0.attn.to_v.weight",
            "transformer_blocks.1.attn.to_v.weight",
        );
    }),
    ("single blocks swapped", |t| {
        swap(
            t,
            "single_transformer_blocks.0.attn.to_out.weight",
            "single_transformer_blocks.1.attn.to_out.weight",
        );
    }),
];

#[test]
fn a_wrong_weight_exceeds_the_tolerance() {
    let (right, inputs) = (weights(WEIGHTS), tensors(ANSWERS));
    for (name, mutate) in MUTATIONS {
        let mut weights = right.clone();
        mutate(&mut weights);
        let found = outputs(&resident(&weights), &inputs, "references");
        let factor = distance(&found, &inputs["references.output"]) / ON_CPU.component;
        println!("{name}: {factor:.0} times the tolerance");
        assert!(factor > 100.0, "{name}: {factor:.1}");
    }
}
