//! Parity of the encodings of a prompt and of lyrics.

use pipelines::text::qwen3::{Qwen3Config, Qwen3Encoder};
use pipelines::text::tokenizers::QwenTokenizer;
use pipelines::{Audio, Unobserved};
use serde::Deserialize;

use crate::device::tolerances;
use crate::given::{folder, open, request};
use crate::numbers::{component, distance, fixtures, json, tensors};
use crate::open_model::{F32, on_cpu};

/// An entry of `expected/prompts.json`.
#[derive(Deserialize)]
struct Case {
    prompt: String,
    #[serde(rename = "words")]
    lyrics_text: Option<String>,
    duration: f32,
    text: Vec<u32>,
    lyrics: Vec<u32>,
}

#[test]
fn states_and_embedded_lyrics_equal_the_references() {
    let expected = tensors("ace-tiny/expected/prompts.safetensors");
    let folder = folder(false);
    let opened = open(folder.path(), &F32);
    for (number, case) in json::<Vec<Case>>("ace-tiny/expected/prompts.json")
        .iter()
        .enumerate()
    {
        let audio = Audio {
            seconds: case.duration,
            lyrics: case.lyrics_text.clone().unwrap_or_default(),
            ..Audio::default()
        };
        let mut request = request(audio);
        request.prompt.clone_from(&case.prompt);
        let plan = opened.stage(&request, "encode_text");
        let values = opened
            .run(&plan, 0, &request, &Default::default(), &mut Unobserved)
            .expect("states");
        for (name, ids) in [("text", &case.text), ("lyrics", &case.lyrics)] {
            assert_eq!(values[name].shape[0], ids.len(), "{number}, {name}");
            let Some(expected) = expected.get(&format!("{number}.{name}")) else {
                continue;
            };
            let apart = distance(&on_cpu(&values[name]), expected);
            println!("{number}, {name}: {apart:.2e}");
            assert!(apart < tolerances().component, "{number}, {name}: {apart:e}");
        }
    }
}

#[test]
fn the_end_token_is_appended_to_every_text() {
    let tokenizer = QwenTokenizer::open(&fixtures().join("ace-tiny/tokenizer")).expect("a tokenizer");
    let end = tokenizer.encode_text("", 8).expect("ids");
    let [end] = end[..] else { panic!("{end:?}") };
    let whole = tokenizer.encode_text("a red cat", 8).expect("ids");
    assert_eq!(whole.last(), Some(&end));
    assert!(whole.len() > 2);
    let cut = tokenizer.encode_text("a red cat", 2).expect("ids");
    assert_eq!(cut, [whole[0], end]);
}

#[test]
fn the_embedding_has_no_row_for_an_id_out_of_range() {
    let config: Qwen3Config = json("ace-tiny/text_encoder/config.json");
    let tensors = component("ace-tiny/text_encoder/model.safetensors");
    let encoder = Qwen3Encoder::new(&config, 2, "text_encoder", &tensors).expect("an encoder");
    assert!(encoder.embedded(&[0, 321]).is_ok());
    assert!(encoder.embedded(&[322]).is_err());
    assert!(encoder.embedded(&[]).is_err());
}
