//! Parity of tokens, of both text encoders, and of noise schedules.

use candle_core::{DType, Tensor};
use pipelines::samplers::NoiseConfig;
use pipelines::text::tokenizers::ClipTokenizer;
use pipelines::{Request, Sampler, Unobserved};
use serde::Deserialize;

use crate::device::tolerances;
use crate::given::{folder, open, request};
use crate::numbers::{distance, fixtures, json, numbers, tensors};
use crate::open_model::{F32, on_cpu};

/// An entry of `expected/prompts.json`.
#[derive(Deserialize)]
struct Prompt {
    prompt: String,
    /// Chunks of tokens of either tokenizer.
    ids: [Vec<Vec<u32>>; 2],
}

fn prompts() -> Vec<Prompt> {
    json("sdxl-tiny/expected/prompts.json")
}

#[test]
fn tokens_equal_the_references() {
    for (number, name) in ["tokenizer", "tokenizer_2"].iter().enumerate() {
        let tokenizer = ClipTokenizer::open(&fixtures().join("sdxl-tiny").join(name)).expect("a tokenizer");
        for Prompt { prompt, ids } in prompts() {
            assert_eq!(
                tokenizer.chunks(&prompt, 512, 1).expect("tokens"),
                ids[number],
                "{prompt:?}"
            );
            let first = tokenizer.encode(&prompt).expect("tokens");
            assert_eq!(first, ids[number][0], "{prompt:?}");
        }
    }
}

#[test]
fn texts_beyond_the_most_tokens_are_left_out_and_reported() {
    let opened = open(folder().path(), &F32);
    let long = prompts()
        .into_iter()
        .find(|prompt| prompt.ids[0].len() > 1)
        .expect("a long text");
    let all = long.ids[0].iter().flatten().count();
    let request = |most| Request {
        prompt: long.prompt.clone(),
        max_sequence_length: most,
        ..request()
    };
    let tokens = |request: &Request| opened.stage(request, "denoise").takes[0].shape[1];
    assert_eq!((tokens(&request(75)), tokens(&request(76))), (77, 154));
    let [left_out] = &opened.model.left_out(&request(75))[..] else {
        panic!("one text is too long")
    };
    assert!(format!("{left_out:?}").contains("prompt") && all > 77);
    assert_eq!(opened.model.left_out(&request(512)).len(), 0);
}

#[test]
fn states_equal_the_references() {
    let opened = open(folder().path(), &F32);
    let expected = tensors("sdxl-tiny/expected/text.safetensors");
    for (number, Prompt { prompt, .. }) in prompts().into_iter().enumerate() {
        let request = Request {
            prompt: prompt.clone(),
            negative_prompt: None,
            ..request()
        };
        let plan = opened.stage(&request, "encode_text");
        let values = opened.run(&plan, 0, &request, &Default::default(), &mut Unobserved);
        let values = values.expect("encodings");
        for name in ["states", "pooled"] {
            let apart = distance(&on_cpu(&values[name]), &expected[&format!("{number}.{name}")]);
            println!("{prompt:?}: {name} {apart:.2e}");
            assert!(apart < tolerances().component, "{prompt:?}: {name} {apart:e}");
        }
    }
}

#[test]
fn an_empty_negative_prompt_is_zeros_unless_the_pipeline_says_otherwise() {
    let zeros = open(folder().path(), &F32);
    let folder = folder();
    crate::given::edit(folder.path(), "model_index.json", |index| {
        index["force_zeros_for_empty_prompt"] = false.into();
    });
    let encoded = open(folder.path(), &F32);
    let gives = |opened: &crate::open_model::OpenModel| opened.stage(&request(), "encode_text").gives;
    assert_eq!(gives(&zeros), ["states", "pooled"]);
    assert_eq!(
        gives(&encoded),
        ["states", "pooled", "negative_states", "negative_pooled"]
    );
    let latent = |opened: &crate::open_model::OpenModel| {
        on_cpu(&opened.latent(&request(), &mut Unobserved).expect("a latent"))
    };
    assert!(distance(&latent(&zeros), &latent(&encoded)) > 1e-2);
}

#[test]
fn noise_levels_and_times_equal_the_references() {
    let expected = tensors("sdxl-tiny/expected/schedules.safetensors");
    let mut compared = 0;
    for prediction in ["epsilon", "v_prediction", "zero_snr"] {
        let folder = folder();
        crate::given::predict(folder.path(), prediction);
        let text = std::fs::read_to_string(folder.path().join("scheduler/scheduler_config.json"));
        let config: NoiseConfig = serde_json::from_str(&text.expect("a file")).expect("a configuration");
        config.check().expect("a supported configuration");
        for sampler in Sampler::ALL {
            for steps in [1, 4, 30, 50] {
                let of = |what: &str| &expected[&format!("{sampler}.{prediction}.{steps}.{what}")];
                let found = config.schedule(steps, Some(sampler));
                let sigmas =
                    Tensor::new(found.sigmas.as_slice(), &candle_core::Device::Cpu).expect("numbers");
                let apart = distance(&sigmas.to_dtype(DType::F32).expect("numbers"), of("sigmas"));
                assert!(apart < 1e-5, "{sampler} {prediction} {steps}: {apart:e}");
                assert_eq!(
                    found.times,
                    numbers(of("times")),
                    "{sampler} {prediction} {steps}"
                );
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 36);
}
