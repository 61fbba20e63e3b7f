//! Films with their sound, from prompt to frames and samples.

use candle_core::{Device, Tensor};
use pipelines::{Medium, Piece, Role, SOUND_OF_FILM, Values};

use crate::given::{Tensors, file, folder, request};
use crate::numbers::{distance, numbers, tensors};
use crate::open_model::{Delivered, F32, OpenModel, on_cpu};

/// Most that films and sounds differ from the reference (relative, L2).
const FILM: f64 = 1e-4;

fn expected() -> Tensors {
    tensors("ovi-tiny/pipelines.safetensors")
}

fn open() -> OpenModel {
    OpenModel::open("ovi", &file(&folder()), &F32)
}

/// The bytes of the pieces of a track, which come in order.
fn bytes_of(pieces: &[Piece], track: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in pieces.iter().filter(|piece| piece.track == track) {
        assert_eq!(
            piece.first * piece.format.unit_bytes(),
            bytes.len() as u64,
            "in order"
        );
        bytes.extend_from_slice(&piece.data);
    }
    bytes
}

#[test]
fn films_and_their_sound_are_those_of_the_reference() {
    let (expected, open) = (expected(), open());
    for (name, from_picture) in [("text", false), ("picture", true)] {
        let request = request(from_picture);
        let mut delivered = Delivered::default();
        let mut values = Values::new();
        for stage in open.stages(&request) {
            let given = open
                .run(&stage, 0, &request, &values, &mut delivered)
                .expect("a stage");
            values.extend(given);
        }
        for (value, what) in [("latent", "latent"), ("sound_latent", "sound_latent")] {
            let found = on_cpu(&values[value]).squeeze(0).unwrap();
            let error = distance(&found, &expected[&format!("{name}.{what}")]);
            println!("{name} {what}: {error:.2e}");
            assert!(error < FILM, "{name} {what}: {error:e}");
        }
        let tracks = delivered
            .0
            .iter()
            .map(|piece| (piece.track.as_str(), piece.format));
        let mut formats: Vec<_> = tracks.collect();
        formats.dedup();
        assert!(
            request.medium.is_made_of(formats.into_iter()),
            "the film with its sound"
        );
        let samples = bytes_of(&delivered.0, SOUND_OF_FILM);
        let samples = samples
            .as_chunks::<2>()
            .0
            .iter()
            .map(|level| f32::from(i16::from_le_bytes(*level)));
        let samples: Vec<f32> = samples.map(|level| level / 32767.0).collect();
        let wanted = &expected[&format!("{name}.samples")];
        let found = Tensor::from_vec(samples, wanted.dims(), &Device::Cpu).unwrap();
        let error = distance(&found, wanted);
        println!("{name} sound: {error:.2e}");
        // Samples of 16 bits.
        assert!(error < 3e-4, "{name}: {error:e}");
        let frames = bytes_of(&delivered.0, "");
        let wanted = numbers(&expected[&format!("{name}.frames")]);
        assert_eq!(frames.len(), wanted.len());
        let others = frames
            .iter()
            .zip(&wanted)
            .filter(|(found, wanted)| f32::from(**found) != **wanted);
        let others = others.count();
        println!("{name} frames: {others} of {} levels differ", wanted.len());
        // A level is rounded to the other side where the reference's is nearly between two.
        assert!(others * 1000 < wanted.len(), "{others} of {}", wanted.len());
    }
}

#[test]
fn what_is_left_out_of_the_texts_is_told() {
    let model = open().model;
    let long = "a red cat ".repeat(300);
    assert!(model.left_out(&request(false)).is_empty());
    for (prompt, negative, fields) in [
        (format!("{long} Audio: waves"), "blur".to_owned(), vec!["prompt"]),
        ("a cat".to_owned(), long.clone(), vec!["negative_prompt"]),
        (
            long.clone(),
            format!("blur Audio: {long}"),
            vec!["prompt", "negative_prompt"],
        ),
    ] {
        let asked = pipelines::Request {
            prompt,
            negative_prompt: Some(negative),
            ..request(false)
        };
        let told = model.left_out(&asked);
        let found: Vec<&str> = told.iter().map(|each| &*each.field).collect();
        assert_eq!(found, fields);
        assert!(
            told.iter().all(|each| each.limit == 512 && each.tokens > 300),
            "{told:?}"
        );
    }
}

#[test]
fn each_stage_has_only_what_it_needs() {
    let model = open().model;
    let plan = model.plan(&request(true)).expect("a valid request");
    let components: Vec<(&str, Vec<&str>)> = plan
        .iter()
        .map(|stage| {
            let names = stage.components.iter().map(String::as_str);
            (stage.name.as_str(), names.collect())
        })
        .collect();
    assert_eq!(
        components,
        [
            ("encode_text", vec!["text_encoder"]),
            ("encode_image", vec!["vae"]),
            ("denoise", vec!["transformer"]),
            ("decode_sound", vec!["audio_vae", "vocoder"]),
            ("decode", vec!["vae"]),
        ]
    );
    let from_text = model.plan(&request(false)).expect("a valid request");
    assert_eq!(from_text.len(), 4);
    // What decodes take is a request's latent, from which the same film is planned.
    let latents: Vec<_> = plan
        .iter()
        .filter(|stage| stage.role == Role::Decode)
        .flat_map(|stage| stage.takes.clone())
        .collect();
    let found = model.request_of(&latents).expect("a request");
    let (Medium::Video(found), Medium::Video(asked)) = (found.medium, request(true).medium) else {
        panic!("films");
    };
    assert_eq!(
        (found.width, found.height, found.frames),
        (asked.width, asked.height, asked.frames)
    );
    assert!(
        model.request_of(&latents[..1]).is_none(),
        "a film without its sound"
    );
}

#[test]
fn without_guidance_steps_predict_once() {
    let open = open();
    let plain = pipelines::Request {
        true_guidance: 1.0,
        ..request(false)
    };
    let stage = open.stage(&plain, "denoise");
    assert_eq!((stage.passes.in_step, stage.takes.len()), (1, 1));
    let guided = open.stage(&request(false), "denoise");
    assert_eq!((guided.passes.in_step, guided.takes.len()), (2, 3));
    let latent = open.latent(&plain, &mut Delivered::default()).expect("a latent");
    let error = distance(&on_cpu(&latent).squeeze(0).unwrap(), &expected()["text.latent"]);
    assert!(error > 0.01, "{error:e}");
}

#[test]
fn the_smallest_film_runs() {
    let open = open();
    let request = open.model.smallest();
    let mut delivered = Delivered::default();
    let mut values = Values::new();
    for stage in open.stages(&request) {
        let given = open
            .run(&stage, 0, &request, &values, &mut delivered)
            .expect("a stage");
        values.extend(given);
    }
    let samples = bytes_of(&delivered.0, SOUND_OF_FILM).len() / 2;
    assert_eq!(samples, 6 * 512);
    assert_eq!(bytes_of(&delivered.0, "").len(), 5 * 64 * 64 * 3);
}
