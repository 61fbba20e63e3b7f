//! The tolerance detects typical porting errors: each of them, injected on purpose, exceeds the CPU's tolerance a
//! hundredfold.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use pipelines::qwen_image::Place;

use crate::components::{ANSWERS, Given, WEIGHTS, outputs, outputs_in, weights};
use crate::device::ON_CPU;
use crate::numbers::{distance, resident, tensors};

type Tensors = HashMap<String, Tensor>;

/// Width of the hidden states.
const WIDTH: usize = 48;

fn swap(tensors: &mut Tensors, one: &str, other: &str) {
    let (a, b) = (tensors[one].clone(), tensors[other].clone());
    tensors.insert(one.to_owned(), b);
    tensors.insert(other.to_owned(), a);
}

/// Swaps parts `one` and `other` of a modulator, each as long as the hidden states.
fn swap_parts(tensors: &mut Tensors, modulator: &str, one: usize, other: usize) {
    for kind in ["weight", "bias"] {
        let name = format!("{modulator}.{kind}");
        let tensor = &tensors[&name];
        let mut rows: Vec<u32> = (0..tensor.dims()[0] as u32).collect();
        for row in 0..WIDTH {
            rows.swap(one * WIDTH + row, other * WIDTH + row);
        }
        let rows = Tensor::from_vec(rows, tensor.dims()[0], &Device::Cpu).expect("rows");
        let swapped = tensor.index_select(&rows, 0).expect("a tensor");
        tensors.insert(name, swapped);
    }
}

/// Swaps the weights and biases of two layers.
fn swap_layers(tensors: &mut Tensors, one: &str, other: &str) {
    for kind in ["weight", "bias"] {
        swap(tensors, &format!("{one}.{kind}"), &format!("{other}.{kind}"));
    }
}

/// Sets a tensor to a number.
fn fill(tensors: &mut Tensors, name: &str, number: f64) {
    let filled = tensors[name].affine(0.0, number).expect("a tensor");
    tensors.insert(name.to_owned(), filled);
}

const B0: &str = "transformer_blocks.0";

/// An error, and the change of the tensors that simulates it.
type Mutation = (&'static str, fn(&mut Tensors));

const MUTATIONS: &[Mutation] = &[
    ("shift and scale of the picture's attention swapped", |t| {
        swap_parts(t, &format!("{B0}.img_mod.1"), 0, 1);
    }),
    ("scale and gate of the picture's feed-forward swapped", |t| {
        swap_parts(t, &format!("{B0}.img_mod.1"), 4, 5);
    }),
    ("gates of attention and feed-forward swapped", |t| {
        swap_parts(t, &format!("{B0}.img_mod.1"), 2, 5);
    }),
    ("shift and scale of the text's attention swapped", |t| {
        swap_parts(t, &format!("{B0}.txt_mod.1"), 0, 1);
    }),
    ("gates of the text's attention and feed-forward swapped", |t| {
        swap_parts(t, &format!("{B0}.txt_mod.1"), 2, 5);
    }),
    ("modulators of picture and text swapped", |t| {
        swap_layers(t, &format!("{B0}.img_mod.1"), &format!("{B0}.txt_mod.1"));
    }),
    ("modulators of two blocks swapped", |t| {
        swap_layers(
            t,
            "transformer_blocks.0.img_mod.1",
            "transformer_blocks.1.img_mod.1",
        );
    }),
    ("scale and shift of the last layer swapped", |t| {
        swap_parts(t, "norm_out.linear", 0, 1);
    }),
    ("a text without its norm", |t| fill(t, "txt_norm.weight", 1.0)),
    ("no bias of the text's projection", |t| {
        fill(t, "txt_in.bias", 0.0)
    }),
    ("no bias of the last layer", |t| fill(t, "proj_out.bias", 0.0)),
    ("no bias of the picture's queries", |t| {
        fill(t, &format!("{B0}.attn.to_q.bias"), 0.0);
    }),
    ("no bias of the text's keys", |t| {
        fill(t, &format!("{B0}.attn.add_k_proj.bias"), 0.0);
    }),
    ("norms of the picture's queries and keys swapped", |t| {
        swap(
            t,
            &format!("{B0}.attn.norm_q.weight"),
            &format!("{B0}.attn.norm_k.weight"),
        );
    }),
    ("norms of the text's queries and keys swapped", |t| {
        swap(
            t,
            &format!("{B0}.attn.norm_added_q.weight"),
            &format!("{B0}.attn.norm_added_k.weight"),
        );
    }),
    ("queries and keys of the picture swapped", |t| {
        swap_layers(t, &format!("{B0}.attn.to_q"), &format!("{B0}.attn.to_k"));
    }),
    ("outputs of picture and text swapped", |t| {
        swap_layers(
            t,
            &format!("{B0}.attn.to_out.0"),
            &format!("{B0}.attn.to_add_out"),
        );
    }),
    ("feed-forwards of picture and text swapped", |t| {
        swap_layers(t, &format!("{B0}.img_mlp.net.2"), &format!("{B0}.txt_mlp.net.2"));
    }),
];

#[test]
fn a_wrong_weight_exceeds_the_tolerance() {
    let (right, inputs) = (weights(WEIGHTS), tensors(ANSWERS));
    for (name, mutate) in MUTATIONS {
        let mut weights = right.clone();
        mutate(&mut weights);
        let found = outputs(&resident(&weights), &inputs, "zero");
        let factor = distance(&found, &inputs["zero.output"]) / ON_CPU.component;
        println!("{name}: {factor:.0} times the tolerance");
        assert!(factor > 100.0, "{name}: {factor:.1}");
    }
}

/// An error in what the transformer is given.
type Misgiven = (&'static str, fn(&mut Given));

const MISGIVEN: &[Misgiven] = &[
    ("references at the time of the step", |given| {
        given.config.zero_cond_t = false
    }),
    ("times of a thousandth", |given| {
        given.times.iter_mut().for_each(|time| *time /= 1000.0);
    }),
    ("rows and columns swapped", |given| {
        let Place { rows, columns } = given.places[0];
        given.places[0] = Place {
            rows: columns,
            columns: rows,
        };
    }),
    ("references swapped", |given| {
        // The largest side, from which the text counts, stays.
        given.places.swap(1, 2);
    }),
    ("a text that does not count from the largest picture", |given| {
        // As many tokens, in a picture that is less wide.
        given.places[2] = Place { rows: 3, columns: 3 };
    }),
    ("axes of other widths", |given| {
        given.config.axes_dims_rope = [8, 4, 4]
    }),
];

#[test]
fn a_wrong_input_exceeds_the_tolerance() {
    let (weights, inputs) = (resident(&weights(WEIGHTS)), tensors(ANSWERS));
    for (name, change) in MISGIVEN {
        let found = outputs_in(&weights, &inputs, "zero", DType::F32, change);
        let factor = distance(&found, &inputs["zero.output"]) / ON_CPU.component;
        println!("{name}: {factor:.0} times the tolerance");
        assert!(factor > 100.0, "{name}: {factor:.1}");
    }
}
