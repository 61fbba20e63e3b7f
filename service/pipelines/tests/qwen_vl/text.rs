//! Templates, positions, and the language model's states, of text alone and with pictures.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, GgufType, QuantizedWeight, Weight, WeightFormat};
use pipelines::text::qwen2_vl::{Prompt, Qwen2VlConfig, Qwen2VlEncoder, Template};
use pipelines::text::tokenizers::QwenTokenizer;
use pipelines::vision::qwen2_vl::Grid;
use serde::Deserialize;

use crate::device::{BF16_COMPONENT, ON_CPU, here, tolerances};
use crate::numbers::{component, distance, fixtures, json, resident, tensors};
use crate::pictures::{scaled, tokens_of, tower_tensors};
use crate::shapes_asked::{asked, words};

pub(crate) const WEIGHTS: &str = "qwen-vl-tiny/text_encoder/model.safetensors";
const ANSWERS: &str = "qwen-vl-tiny/expected/prompts.safetensors";

/// An entry of `expected/prompts.json`.
#[derive(Deserialize)]
pub(crate) struct Case {
    pub(crate) name: String,
    template: String,
    prompt: String,
    /// Width and height of each picture.
    sizes: Vec<(u32, u32)>,
    /// Whether pictures are first scaled to the area of a pipeline's condition.
    scaled: bool,
    /// Most tokens after the head; 0 where there is no bound.
    length: usize,
    head: usize,
    /// Rows and columns of patches of each picture.
    grids: Vec<(usize, usize)>,
    ids: Vec<u32>,
    positions: Option<Vec<[u32; 3]>>,
}

impl Case {
    fn template(&self) -> Template {
        match self.template.as_str() {
            "generate" => Template::Generate,
            "edit" => Template::Edit,
            _ => Template::EditPlus,
        }
    }

    fn most(&self) -> usize {
        match self.length {
            0 => usize::MAX,
            most => most,
        }
    }

    fn grids(&self) -> Vec<Grid> {
        let grids = self.grids.iter();
        grids.map(|&(rows, columns)| Grid { rows, columns }).collect()
    }

    pub(crate) fn prompt(&self) -> Prompt {
        let prompt = self
            .template()
            .encode(&tokenizer(), &self.prompt, &self.grids(), self.most());
        prompt.expect("tokens")
    }

    /// The tower's tokens of each picture.
    pub(crate) fn pictures(&self, tower: &ComponentTensors) -> Vec<Tensor> {
        let sizes = self.sizes.iter();
        let pictures = sizes.map(|size| match self.scaled {
            true => tokens_of(tower, &scaled(*size, 384 * 384)),
            false => tokens_of(tower, &scaled(*size, 0)),
        });
        pictures.collect()
    }
}

pub(crate) fn cases() -> Vec<Case> {
    json("qwen-vl-tiny/expected/prompts.json")
}

pub(crate) fn case(name: &str) -> Case {
    cases()
        .into_iter()
        .find(|case| case.name == name)
        .expect("a case")
}

pub(crate) fn config() -> Qwen2VlConfig {
    json("qwen-vl-tiny/text_encoder/config.json")
}

fn tokenizer() -> QwenTokenizer {
    QwenTokenizer::open(&fixtures().join("qwen-vl-tiny/tokenizer")).expect("a tokenizer")
}

/// The weights of both parts in f32, in which the reference was computed.
pub(crate) fn weights() -> HashMap<String, Tensor> {
    let wide = |tensor: Tensor| tensor.to_dtype(DType::F32).expect("numbers");
    let all = tensors(WEIGHTS).into_iter();
    all.map(|(name, tensor)| (name, wide(tensor))).collect()
}

/// The states of a prompt.
pub(crate) fn states(weights: &ComponentTensors, prompt: &Prompt, pictures: &[Tensor]) -> Tensor {
    let encoder = Qwen2VlEncoder::new(&config(), "text_encoder", weights).expect("an encoder");
    encoder.forward(prompt, pictures, &|| false).expect("states")
}

/// The reference's states of a case, where the fixture has them.
pub(crate) fn answer(name: &str) -> Option<Tensor> {
    tensors(ANSWERS).remove(&format!("{name}.hidden"))
}

#[test]
fn prompts_are_tokenized_in_their_templates() {
    for case in cases() {
        let prompt = case.prompt();
        // The reference computes the tokens that it cuts off.
        let kept = case.ids.len().min(case.head.saturating_add(case.most()));
        assert_eq!(prompt.ids, case.ids[..kept], "{}", case.name);
        assert_eq!(prompt.head, case.head, "{}", case.name);
        let positions = prompt.positions();
        match &case.positions {
            Some(expected) => assert_eq!(&positions, expected, "{}", case.name),
            None => assert!(positions.iter().enumerate().all(|(i, at)| *at == [i as u32; 3])),
        }
    }
}

#[test]
fn tokens_that_are_left_out_are_counted_without_the_closing_ones() {
    let (tokenizer, text) = (tokenizer(), case("cut").prompt);
    let left_out = |most| {
        Template::Generate
            .left_out(&tokenizer, &text, most)
            .expect("a count")
    };
    let all = case("text_6").prompt().used();
    let closing = case("text_2").prompt().used();
    assert_eq!(left_out(512), 0);
    assert_eq!(left_out(all - closing), 0);
    assert_eq!(left_out(all - closing - 1), 1);
    assert_eq!(left_out(24), all - closing - 24);
}

#[test]
fn a_vocabulary_without_the_token_of_pictures_encodes_text_alone() {
    let folder = fixtures().join("z-image-tiny/tokenizer");
    let tokenizer = QwenTokenizer::open(&folder).expect("a tokenizer");
    assert!(Template::Generate.encode(&tokenizer, "a cat", &[], 512).is_ok());
    let grid = Grid { rows: 2, columns: 2 };
    let refused = Template::Edit.encode(&tokenizer, "a cat", &[grid], 512);
    let told = refused.expect_err("no token").to_string();
    assert!(told.contains("<|image_pad|>"), "{told}");
}

#[test]
fn states_equal_transformers_with_and_without_pictures() {
    let (weights, tower) = (resident(&weights()), tower_tensors());
    let mut with_pictures = 0;
    for case in cases() {
        let Some(expected) = answer(&case.name) else {
            continue;
        };
        let pictures = case.pictures(&tower);
        let apart = distance(&states(&weights, &case.prompt(), &pictures), &expected);
        println!("{}: {apart:.2e}", case.name);
        assert!(apart < tolerances().component, "{}: {apart:e}", case.name);
        with_pictures += usize::from(!pictures.is_empty());
    }
    assert!(with_pictures > 3, "{with_pictures} with pictures");
}

#[test]
fn bf16_states_equal_f32_within_their_rounding() {
    let (weights, tower) = (component(WEIGHTS), tower_tensors());
    for name in ["text_1", "plus_two"] {
        let case = case(name);
        let narrow = |tokens: Tensor| tokens.to_dtype(DType::BF16).expect("numbers");
        let pictures: Vec<Tensor> = case.pictures(&tower).into_iter().map(narrow).collect();
        let found = states(&weights, &case.prompt(), &pictures);
        assert_eq!(found.dtype(), DType::BF16);
        let apart = distance(&found, &answer(name).expect("states"));
        println!("{name} in bf16: {apart:.2e}");
        assert!(apart < BF16_COMPONENT, "{name}: {apart:e}");
    }
}

#[test]
fn names_of_older_files_and_of_comfyui_are_read() {
    let older = weights().into_iter().map(|(name, tensor)| {
        let name = name.replace("model.language_model.", "model.");
        (name.replace("model.visual.", "visual."), tensor)
    });
    let case = case("text_0");
    let found = states(&resident(&older.collect()), &case.prompt(), &[]);
    let apart = distance(&found, &answer("text_0").expect("states"));
    assert!(apart < tolerances().component, "{apart:e}");
}

/// GGUF files have the token embedding in blocks.
#[test]
fn rows_of_a_token_embedding_in_blocks_are_dequantized() {
    const TABLE: &str = "model.language_model.embed_tokens.weight";
    let mut weights = weights();
    let (rows, columns) = weights[TABLE].dims2().expect("a table");
    // Blocks of Q8_0: a scale in f16 and 32 codes.
    let code = |i: usize| (i * 31 % 255) as i8;
    let blocks = (0..rows * columns / 32).flat_map(|block| {
        let codes = (0..32).map(move |i| code(32 * block + i) as u8);
        half::f16::from_f32(1.0 / 64.0)
            .to_le_bytes()
            .into_iter()
            .chain(codes)
    });
    let (blocks, cpu) = (blocks.collect::<Vec<u8>>(), &Device::Cpu);
    let decoded: Vec<f32> = (0..rows * columns).map(|i| f32::from(code(i)) / 64.0).collect();
    let decoded = Tensor::from_vec(decoded, (rows, columns), cpu).expect("a table");
    let coded = QuantizedWeight {
        bytes: here(&Tensor::from_vec(blocks.clone(), blocks.len(), cpu).expect("bytes")),
        format: WeightFormat::Gguf(GgufType::Q8_0),
        shape: vec![rows, columns],
    };
    weights.insert(TABLE.to_owned(), decoded);
    let prompt = case("text_1").prompt();
    let expected = states(&resident(&weights), &prompt, &[]);
    let full = |(name, tensor): (String, Tensor)| (name, Weight::Full(here(&tensor)));
    let mut mixed: HashMap<String, Weight> = weights.into_iter().map(full).collect();
    mixed.insert(TABLE.to_owned(), Weight::Quantized(coded));
    let found = states(&ComponentTensors::of_weights(mixed), &prompt, &[]);
    assert_eq!(distance(&found, &expected), 0.0);
}

#[test]
fn wrong_inputs_are_refused() {
    let weights = resident(&weights());
    let encoder = Qwen2VlEncoder::new(&config(), "text_encoder", &weights).expect("an encoder");
    let tower = tower_tensors();
    let two = case("plus_two");
    let (prompt, mut pictures) = (two.prompt(), two.pictures(&tower));
    assert!(encoder.forward(&prompt, &pictures, &|| true).is_err());
    assert!(encoder.forward(&prompt, &pictures[..1], &|| false).is_err());
    pictures.swap(0, 1);
    let told = encoder
        .forward(&prompt, &pictures, &|| false)
        .expect_err("other sizes");
    assert!(told.to_string().contains("tokens of pictures"), "{told}");
}

#[test]
fn a_missing_tensor_is_named() {
    for name in ["layers.2.self_attn.k_proj.bias", "norm.weight"] {
        let mut some = weights();
        some.remove(&format!("model.language_model.{name}"))
            .expect("a tensor");
        let some = resident(&some);
        let found = Qwen2VlEncoder::new(&config(), "text_encoder", &some)
            .and_then(|encoder| encoder.forward(&case("text_0").prompt(), &[], &|| false));
        let told = found.expect_err("a gap").to_string();
        assert!(told.contains(name), "{told}");
    }
}

#[test]
fn the_shapes_of_attention_are_planned() {
    let weights = component(WEIGHTS);
    let prompt = case("text_1").prompt();
    let (asked, _) = asked(|| states(&weights, &prompt, &[]));
    let planned = config().planned(prompt.ids.len(), DType::BF16);
    assert_eq!(asked, words(&[planned]));
}

#[test]
fn tokens_of_pictures_in_other_places_exceed_the_tolerance() {
    let (weights, tower) = (resident(&weights()), tower_tensors());
    let two = case("plus_scaled");
    let (prompt, pictures) = (two.prompt(), two.pictures(&tower));
    let expected = answer("plus_scaled").expect("states");
    let factor = |found: &Tensor| distance(found, &expected) / ON_CPU.component;
    // Another picture of as many tokens.
    let shifted: Vec<Tensor> = pictures
        .iter()
        .map(|rows| {
            let count = rows.dim(0).expect("rows");
            let (last, others) = (rows.narrow(0, count - 1, 1), rows.narrow(0, 0, count - 1));
            Tensor::cat(&[last.expect("a row"), others.expect("rows")], 0).expect("rows")
        })
        .collect();
    let moved = factor(&states(&weights, &prompt, &shifted));
    println!("tokens of pictures moved by one: {moved:.0} times the tolerance");
    assert!(moved > 100.0, "{moved:.1}");
}
