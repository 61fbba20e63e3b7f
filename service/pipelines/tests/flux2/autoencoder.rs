//! The autoencoder: FLUX.1's code, with quant convolutions.

use pipelines::autoencoders::kl::{Chunking, VaeConfig, VaeDecoder, VaeEncoder};

use crate::components::weights;
use crate::device::{here, tolerances};
use crate::given::of_autoencoder;
use crate::numbers::{distance, init_image, json, largest_difference, resident, tensors};

const WEIGHTS: &str = "flux2-tiny/vae/diffusion_pytorch_model.safetensors";

#[test]
fn pictures_are_encoded_and_decoded_as_by_the_reference() {
    let config: VaeConfig = json("flux2-tiny/vae/config.json");
    let (weights, expected) = (
        resident(&weights(WEIGHTS)),
        tensors("flux2-tiny/expected/vae.safetensors"),
    );
    let encoder = VaeEncoder::new(&config, &weights).expect("an encoder");
    for case in ["encode.square", "encode.wide"] {
        let of = |what: &str| &expected[&format!("{case}.{what}")];
        let picture = init_image(of("picture"));
        let size = (picture.width as usize, picture.height as usize);
        let moments = encoder.encode_rgb8(&picture.rgb, size, Chunking::Whole, &|| false);
        let apart = distance(&moments.expect("moments").mean, of("mean"));
        println!("{case}: {apart:.2e}");
        assert!(apart < tolerances().component, "{case}: {apart:e}");
        let apart = distance(&of_autoencoder(of("latent")), of("mean"));
        assert!(apart < 1e-6, "{case}, statistics: {apart:e}");
    }
    let decoder = VaeDecoder::new(&config, &weights).expect("a decoder");
    for case in ["decode.square", "decode.tall"] {
        let of = |what: &str| &expected[&format!("{case}.{what}")];
        let picture = decoder.decode(&here(of("mean")), Chunking::Whole, &|| false);
        let picture = picture.expect("a picture");
        let apart = distance(&of_autoencoder(of("latent")), of("mean"));
        assert!(apart < 1e-6, "{case}, statistics: {apart:e}");
        let (apart, largest) = (
            distance(&picture, of("picture")),
            largest_difference(&picture, of("picture")),
        );
        println!("{case}: {apart:.2e}, largest {largest:.2e}");
        assert!(apart < tolerances().component, "{case}: {apart:e}");
    }
}
