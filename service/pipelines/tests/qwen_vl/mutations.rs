//! The tolerance detects typical porting errors: each of them, injected on purpose, exceeds the CPU's tolerance a
//! hundredfold.

use std::collections::HashMap;

use candle_core::Tensor;
use pipelines::text::qwen2_vl::{Qwen2VlConfig, Qwen2VlEncoder};
use pipelines::vision::qwen2_vl::{Grid, QwenVisionConfig, QwenVisionTower};

use crate::device::ON_CPU;
use crate::numbers::{distance, json, resident, tensors};
use crate::pictures::{CASES, patches_of, scaled, tokens_of, tower_of, tower_tensors};
use crate::text::{answer, case, config, states, weights};

type Tensors = HashMap<String, Tensor>;

fn swap(tensors: &mut Tensors, one: &str, other: &str) {
    let (a, b) = (tensors[one].clone(), tensors[other].clone());
    tensors.insert(one.to_owned(), b);
    tensors.insert(other.to_owned(), a);
}

fn nothing(tensors: &mut Tensors, name: &str) {
    let zeros = tensors[name].zeros_like().expect("zeros");
    tensors.insert(name.to_owned(), zeros);
}

fn neutral(tensors: &mut Tensors, name: &str) {
    let ones = tensors[name].ones_like().expect("ones");
    tensors.insert(name.to_owned(), ones);
}

/// An error, and the change of the tensors that simulates it.
type Mutation = (&'static str, fn(&mut Tensors));

const OF_TEXT: &[Mutation] = &[
    ("the bias of queries dropped", |t| {
        nothing(t, "model.language_model.layers.1.self_attn.q_proj.bias")
    }),
    ("the bias of keys dropped", |t| {
        nothing(t, "model.language_model.layers.1.self_attn.k_proj.bias")
    }),
    ("the bias of values dropped", |t| {
        nothing(t, "model.language_model.layers.0.self_attn.v_proj.bias")
    }),
    ("keys and values swapped", |t| {
        swap(
            t,
            "model.language_model.layers.2.self_attn.k_proj.weight",
            "model.language_model.layers.2.self_attn.v_proj.weight",
        );
    }),
    ("gate and raised swapped", |t| {
        swap(
            t,
            "model.language_model.layers.1.mlp.gate_proj.weight",
            "model.language_model.layers.1.mlp.up_proj.weight",
        );
    }),
    ("the norms of a layer swapped", |t| {
        swap(
            t,
            "model.language_model.layers.2.input_layernorm.weight",
            "model.language_model.layers.2.post_attention_layernorm.weight",
        );
    }),
    ("the last norm neutral", |t| {
        neutral(t, "model.language_model.norm.weight")
    }),
];

#[test]
fn a_wrong_weight_of_the_language_model_exceeds_the_tolerance() {
    let (prompt, expected) = (case("text_1").prompt(), answer("text_1").expect("states"));
    for (name, mutate) in OF_TEXT {
        let mut weights = weights();
        mutate(&mut weights);
        let factor = distance(&states(&resident(&weights), &prompt, &[]), &expected) / ON_CPU.component;
        println!("{name}: {factor:.0} times the tolerance");
        assert!(factor > 100.0, "{name}: {factor:.1}");
    }
}

/// The fixture's configuration with another value.
fn changed(path: &str, value: serde_json::Value) -> Qwen2VlConfig {
    let mut config: serde_json::Value = json("qwen-vl-tiny/text_encoder/config.json");
    *config.pointer_mut(path).expect("a value") = value;
    serde_json::from_value(config).expect("a configuration")
}

#[test]
fn wrong_rotations_of_the_language_model_exceed_the_tolerance() {
    let (weights, tower) = (resident(&weights()), tower_tensors());
    let two = case("plus_scaled");
    let (prompt, pictures) = (two.prompt(), two.pictures(&tower));
    let expected = answer("plus_scaled").expect("states");
    let factor_of = |config: &Qwen2VlConfig| {
        let encoder = Qwen2VlEncoder::new(config, "text_encoder", &weights).expect("an encoder");
        let found = encoder.forward(&prompt, &pictures, &|| false).expect("states");
        distance(&found, &expected) / ON_CPU.component
    };
    let sections = "/text_config/rope_parameters/mrope_section";
    for (name, path, value) in [
        // All pairs turn by time, where a picture's tokens have one position.
        ("pairs by time alone", sections, serde_json::json!([8, 0, 0])),
        ("pairs by rows first", sections, serde_json::json!([0, 5, 3])),
        ("pairs by columns first", sections, serde_json::json!([2, 0, 6])),
        (
            "the sections moved by one",
            sections,
            serde_json::json!([3, 2, 3]),
        ),
        (
            "another base",
            "/text_config/rope_parameters/rope_theta",
            serde_json::json!(60.0),
        ),
        (
            "another epsilon",
            "/text_config/rms_norm_eps",
            serde_json::json!(3e-3),
        ),
    ] {
        let factor = factor_of(&changed(path, value));
        println!("{name}: {factor:.0} times the tolerance");
        assert!(factor > 100.0, "{name}: {factor:.1}");
    }
    assert!(factor_of(&config()) < 1.0);
}

const OF_TOWER: &[Mutation] = &[
    ("the bias of queries dropped", |t| {
        nothing(t, "blocks.3.attn.q.bias")
    }),
    ("the bias of keys dropped", |t| nothing(t, "blocks.3.attn.k.bias")),
    ("the bias of values dropped", |t| {
        nothing(t, "blocks.7.attn.v.bias")
    }),
    ("the bias of the output dropped", |t| {
        nothing(t, "blocks.0.attn.proj.bias")
    }),
    ("the bias of the gate dropped", |t| {
        nothing(t, "blocks.8.mlp.gate_proj.bias")
    }),
    ("the bias of the last layer dropped", |t| {
        nothing(t, "blocks.8.mlp.down_proj.bias")
    }),
    ("queries and keys of different blocks", |t| {
        swap(t, "blocks.2.attn.q.weight", "blocks.5.attn.q.weight")
    }),
    ("gate and raised swapped", |t| {
        swap(t, "blocks.4.mlp.gate_proj.weight", "blocks.4.mlp.up_proj.weight")
    }),
    ("the norms of a block swapped", |t| {
        swap(t, "blocks.6.norm1.weight", "blocks.6.norm2.weight")
    }),
    ("the merger's norm neutral", |t| neutral(t, "merger.ln_q.weight")),
    ("the merger's first bias dropped", |t| {
        nothing(t, "merger.mlp.0.bias")
    }),
];

#[test]
fn a_wrong_weight_of_the_tower_exceeds_the_tolerance() {
    let answers = tensors("qwen-vl-tiny/expected/vision.safetensors");
    let (name, size) = CASES[2];
    let expected = &answers[&format!("{name}.tokens")];
    for (told, mutate) in OF_TOWER {
        let mut tower = tower_of(&weights());
        mutate(&mut tower);
        let factor = distance(&tokens_of(&resident(&tower), &scaled(size, 0)), expected) / ON_CPU.component;
        println!("{told}: {factor:.0} times the tolerance");
        assert!(factor > 100.0, "{told}: {factor:.1}");
    }
}

#[test]
fn wrong_windows_and_places_exceed_the_tolerance() {
    let answers = tensors("qwen-vl-tiny/expected/vision.safetensors");
    let (name, size) = CASES[2];
    let expected = &answers[&format!("{name}.tokens")];
    let tensors = tower_tensors();
    let right = config().vision;
    let other = |change: fn(&mut QwenVisionConfig)| {
        let mut config = right.clone();
        change(&mut config);
        config
    };
    let (patches, grid) = patches_of(&scaled(size, 0));
    for (told, config) in [
        (
            "whole pictures in no block",
            other(|c| c.fullatt_block_indexes.clear()),
        ),
        (
            "whole pictures in the last block",
            other(|c| c.fullatt_block_indexes = vec![8]),
        ),
        (
            "whole pictures in all blocks",
            other(|c| c.fullatt_block_indexes = (0..9).collect()),
        ),
        ("windows of three cells", other(|c| c.window_size = 84)),
    ] {
        let tower = QwenVisionTower::new(&config, "vision", &tensors).expect("a tower");
        let found = tower.forward(&patches, grid, &|| false).expect("tokens");
        let factor = distance(&found, expected) / ON_CPU.component;
        println!("{told}: {factor:.0} times the tolerance");
        assert!(factor > 100.0, "{told}: {factor:.1}");
    }
    // Rows and columns swapped, as a tower that mixes them up would see the picture.
    let tower = QwenVisionTower::new(&right, "vision", &tensors).expect("a tower");
    let turned = Grid {
        rows: grid.columns,
        columns: grid.rows,
    };
    let found = tower.forward(&patches, turned, &|| false).expect("tokens");
    let factor = distance(&found, expected) / ON_CPU.component;
    assert!(factor > 100.0, "rows and columns swapped: {factor:.1}");
}
