//! The steps of Ovi's fusion model.

use candle_core::{DType, Device, Tensor};
use pipelines::ovi::{BranchConfig, FilmTokens, FusionConfig, FusionTransformer, denoise_scratch};

use crate::{alone, assert_close, made_up, peak_of, random};
use pipelines::noise::Generator;

#[test]
fn steps_allocate_the_predicted_bytes() {
    let _alone = alone();
    let branch = |channels: usize| BranchConfig {
        dim: 128,
        ffn_dim: 384,
        text_dim: 64,
        num_heads: 2,
        num_layers: 2,
        in_dim: channels,
        out_dim: channels,
        text_len: 128,
        ..BranchConfig::default()
    };
    let config = FusionConfig {
        video: branch(48),
        audio: branch(20),
    };
    let on = (DType::F32, &Device::Cpu);
    let transformer = FusionTransformer::new(&config, &made_up(config.tensor_shapes())).expect("a model");
    let mut generator = Generator::new(3);
    let text = random(&[1, 60, 64], &mut generator);
    for (film, sound, begins_with_picture) in [
        ([5, 16, 24], 300, false),
        ([3, 24, 30], 40, true),
        ([1, 6, 8], 900, false),
    ] {
        let tokens = FilmTokens {
            film,
            begins_with_picture,
            sound,
        };
        let [all, _] = tokens.all();
        let first = if begins_with_picture { film[1] * film[2] } else { 0 };
        let picture = random(&[1, first.max(1), config.token_width()], &mut generator);
        let latent = random(&[1, all - first, config.token_width()], &mut generator);
        let sound_latent = random(&[1, sound, 20], &mut generator);
        let step = || -> Result<Tensor, pipelines::StageError> {
            let mut go_on = || Ok(());
            let times = transformer.times(&[900.0, 400.0], on)?;
            let texts = [
                transformer.texts([&text, &text], &mut go_on)?,
                transformer.texts([&text, &text], &mut go_on)?,
            ];
            let buffers = transformer.step_buffers(&tokens, begins_with_picture.then_some(&picture), on)?;
            let mut last = latent.clone();
            for texts in &texts {
                let [film, _] = transformer.velocity(
                    [&latent, &sound_latent],
                    (&times, 1),
                    texts,
                    None,
                    &buffers,
                    &mut go_on,
                )?;
                last = film.clone();
            }
            Ok(last)
        };
        step().expect("a step");
        let taken = peak_of(|| step().expect("a step"));
        let predicted = denoise_scratch(&config, &tokens, 2, 2, DType::F32);
        assert_close(&format!("{film:?} and {sound}"), taken, predicted);
    }
}
