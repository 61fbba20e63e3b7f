//! The autoencoder: the layers of Wan's films, over one frame.

use pipelines::autoencoders::wan::{
    Chunking, FrameDecoding, WanVaeConfig, WanVaeDecoder, WanVaeEncoder, decode_scratch,
};

use candle_core::{DType, Tensor};

use crate::components::weights;
use crate::device::{here, tolerances};
use crate::numbers::{distance, init_image, json, resident, tensors};

pub(crate) const WEIGHTS: &str = "qwen-image-tiny/vae/diffusion_pytorch_model.safetensors";

pub(crate) fn config() -> WanVaeConfig {
    WanVaeConfig {
        is_of_pictures: true,
        ..json("qwen-image-tiny/vae/config.json")
    }
}

/// The picture of a latent `[1, channels, h, w]` in the autoencoder's scale, `[1, 3, height, width]` of -1 to 1.
pub(crate) fn decoded(decoder: &WanVaeDecoder, latent: &Tensor, chunking: Chunking) -> Tensor {
    let how = FrameDecoding {
        chunking,
        cancelled: &|| false,
    };
    let latent = here(&latent.unsqueeze(2).expect("a latent"));
    let mut picture = None;
    let taken = decoder.decode_frames(&latent, &how, &mut |_, frames| {
        picture = Some(frames);
        Ok(())
    });
    taken.expect("a picture");
    let frames = picture.expect("a frame");
    let planes = frames.permute((0, 3, 1, 2)).and_then(|x| x.contiguous());
    planes.expect("a picture")
}

const CHUNKINGS: [Chunking; 2] = [Chunking::Whole, Chunking::Strips { bytes: 1 }];

#[test]
fn pictures_are_encoded_and_decoded_as_by_the_reference() {
    let (config, expected) = (config(), tensors("qwen-image-tiny/expected/vae.safetensors"));
    // The tensors of convolutions in time are not there.
    let mut all = weights(WEIGHTS);
    let before = all.len();
    all.retain(|name, _| config.tensor_shapes().iter().any(|(known, _)| known == name));
    assert_eq!(
        before - all.len(),
        2 * 4,
        "weights and biases of the convolutions in time"
    );
    let weights = resident(&all);
    let encoder = WanVaeEncoder::new(&config, &weights).expect("an encoder");
    let decoder = WanVaeDecoder::new(&config, &weights).expect("a decoder");
    for chunking in CHUNKINGS {
        for case in ["encode.square", "encode.wide"] {
            let of = |what: &str| &expected[&format!("{case}.{what}")];
            let picture = init_image(of("picture"));
            let size = (picture.width as usize, picture.height as usize);
            let moments = encoder.encode_rgb8(&picture.rgb, 1, size, chunking, &|| false);
            let moments = moments.expect("moments");
            for (found, name) in [(moments.mean, "mean"), (moments.log_variance, "logvar")] {
                let apart = distance(&found.squeeze(2).expect("a frame"), of(name));
                println!("{case} {name}, {}: {apart:.2e}", chunking.label());
                assert!(apart < tolerances().component, "{case} {name}: {apart:e}");
            }
        }
        for case in ["decode.square", "decode.tall"] {
            let of = |what: &str| &expected[&format!("{case}.{what}")];
            let picture = decoded(&decoder, of("latent"), chunking);
            let apart = distance(&picture, of("picture"));
            println!("{case}, {}: {apart:.2e}", chunking.label());
            assert!(apart < tolerances().component, "{case}: {apart:e}");
        }
    }
}

#[test]
fn one_frame_needs_a_third_of_the_numbers_and_no_memory_of_frames_before() {
    let film = WanVaeConfig::default();
    let pictures = WanVaeConfig {
        is_of_pictures: true,
        ..film.clone()
    };
    // 1024x1024 on a card.
    let of = |config: &WanVaeConfig, chunking| {
        decode_scratch(config, (128, 128), 1, chunking, DType::BF16).0 as f64 / f64::from(1 << 30)
    };
    let strips = Chunking::Strips { bytes: 4 << 20 };
    for (what, chunking) in [("whole", Chunking::Whole), ("strips", strips)] {
        println!(
            "{what}: {:.2} GiB, with time {:.2} GiB",
            of(&pictures, chunking),
            of(&film, chunking)
        );
    }
    assert!(of(&pictures, Chunking::Whole) < 0.6 * of(&film, Chunking::Whole));
    assert!(of(&pictures, strips) < 0.2);
}
