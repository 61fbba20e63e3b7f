//! The autoencoder of sound on a card: memory against the prediction, and times.

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use ops::{NormedWeight, RowLength, SequenceFilter, SequenceShape, Snake, Through};
use pipelines::autoencoders::oobleck::{
    OobleckConfig, OobleckDecoder, OobleckEncoder, Windows, decode_ladder, encode_ladder, pcm16_from_samples,
};

use crate::card;
use crate::device::pool::peak_of;

/// Latent frames of four minutes.
const FRAMES: usize = 6000;

/// ACE-Step's.
fn config() -> OobleckConfig {
    OobleckConfig {
        downsampling_ratios: vec![2, 4, 4, 6, 10],
        sampling_rate: 48000,
        ..OobleckConfig::default()
    }
}

/// An autoencoder of full size with random weights of about unit gain, in bf16.
fn component(device: &Device) -> ComponentTensors {
    let random = |(name, shape): (String, Vec<usize>)| {
        let (gain, centre) = match name.rsplit('.').next() {
            Some("weight_g") => (0.1, 0.7),
            Some("weight_v") => (1.0, 0.0),
            _ => (0.1, 0.0),
        };
        let tensor = Tensor::randn(centre, gain, shape, device).expect("numbers");
        (name, tensor.to_dtype(DType::BF16).expect("numbers in bf16"))
    };
    let tensors = config().tensor_shapes().into_iter().map(random);
    ComponentTensors::new(tensors.collect::<HashMap<_, _>>())
}

/// Prints both, and asserts that the prediction is close to the measurement.
fn assert_predicted(what: &str, predicted: u64, taken: u64) {
    let ratio = predicted as f64 / taken as f64;
    let (predicted_mib, taken_mib) = (predicted >> 20, taken >> 20);
    println!("{what}: {predicted_mib} MiB predicted, {taken_mib} MiB taken ({ratio:.2})");
    assert!((0.98..1.2).contains(&ratio), "{what}: {ratio:.2}");
}

#[test]
fn every_rung_allocates_the_predicted_bytes() {
    let Some(device) = card() else { return };
    let tensors = component(device);
    for frames in [40, 700] {
        let latents = Tensor::randn(0f32, 1.0, (1, frames, 64), device).expect("latents");
        let decode = |windows| {
            let decoder = OobleckDecoder::new(&config(), &tensors)?;
            decoder.decode(&latents, windows, &|| false, &mut |_, _| Ok(()))
        };
        decode(Windows::Whole).expect("samples"); // modules and workspaces
        for (windows, rung) in decode_ladder(&config(), frames, DType::BF16) {
            let (taken, done) = peak_of(device, || decode(windows));
            done.expect("samples");
            // The latents are there already.
            assert_predicted(&format!("decode {frames}, {}", rung.label), rung.scratch.0, taken);
        }
        let count = frames * config().hop();
        let samples = Tensor::zeros((count, 2), DType::F32, &Device::Cpu).expect("samples");
        for (windows, rung) in encode_ladder(&config(), count, DType::BF16) {
            let (taken, moments) = peak_of(device, || {
                OobleckEncoder::new(&config(), &tensors)?.encode(&samples, windows, &|| false)
            });
            moments.expect("moments");
            assert_predicted(&format!("encode {frames}, {}", rung.label), rung.scratch.0, taken);
        }
    }
}

/// The best of some runs in milliseconds, and the peak in MiB.
fn measured(device: &Device, run: &dyn Fn()) -> (f64, u64) {
    run(); // plans, modules and workspaces
    let (peak, ()) = peak_of(device, run);
    let times = (0..5).map(|_| {
        device.synchronize().expect("a device that answers");
        let start = Instant::now();
        run();
        device.synchronize().expect("a device that answers");
        start.elapsed().as_secs_f64() * 1e3
    });
    (times.fold(f64::INFINITY, f64::min), peak >> 20)
}

/// Four minutes of stereo, decoded and encoded; on the card alone, and with 16-bit samples in host memory. For comparison:
/// tests/gpu/sound_decode.py.
///
/// `MOORED_TEST_DEVICE=cuda card oobleck --ignored --nocapture --test-threads=1`
#[test]
#[ignore = "prints times"]
fn duration_of_four_minutes() {
    let Some(device) = card() else { return };
    let config = config();
    let tensors = component(device);
    let latents = Tensor::randn(0f32, 1.0, (1, FRAMES, 64), device).expect("latents");
    let (folding, _) = measured(device, &|| {
        drop(OobleckDecoder::new(&config, &tensors).expect("a decoder"))
    });
    println!("folding the decoder's weights: {folding:.1} ms");
    let decoder = OobleckDecoder::new(&config, &tensors).expect("a decoder");
    let best = decode_ladder(&config, FRAMES, DType::BF16)[0].0;
    let of = |frames| Windows::Of { frames };
    for windows in [best, of(1024), of(512), of(256), of(128), of(64)] {
        let decode = |to_host: bool| {
            decoder
                .decode(&latents, windows, &|| false, &mut |_, samples| {
                    if to_host {
                        pcm16_from_samples(&samples)?;
                    }
                    Ok(())
                })
                .expect("samples");
        };
        let ((ms, peak), (ms_to_host, _)) = (
            measured(device, &|| decode(false)),
            measured(device, &|| decode(true)),
        );
        let label = windows.label();
        println!("decode, {label}: {ms:.1} ms, {ms_to_host:.1} ms to 16-bit samples, peak {peak} MiB");
    }
    drop(decoder);
    let encoder = OobleckEncoder::new(&config, &tensors).expect("an encoder");
    let count = FRAMES * config.hop();
    let there = Tensor::randn(0f32, 0.3, (count, 2), device).expect("samples");
    let host = there.to_device(&Device::Cpu).expect("samples");
    let best = encode_ladder(&config, count, DType::BF16)[0].0;
    for windows in [best, of(1024), of(512), of(256), of(128), of(64)] {
        let encode = |samples: &Tensor| drop(encoder.encode(samples, windows, &|| false).expect("moments"));
        let ((ms, peak), (ms_from_host, _)) = (
            measured(device, &|| encode(&there)),
            measured(device, &|| encode(&host)),
        );
        let label = windows.label();
        println!("encode, {label}: {ms:.1} ms, {ms_from_host:.1} ms from host memory, peak {peak} MiB");
    }
}

/// Best of some runs in milliseconds, of ten each.
fn of_ten(device: &Device, run: &dyn Fn()) -> f64 {
    measured(device, &|| (0..10).for_each(|_| run())).0 / 10.0
}

/// One layer after the other, of a window of 512 latent frames: where the time of `duration_of_four_minutes` goes.
#[test]
#[ignore = "prints times"]
fn duration_of_layers() {
    let Some(device) = card() else { return };
    let shape = |through, taps, inputs, outputs| SequenceShape {
        through,
        taps,
        inputs,
        outputs,
    };
    // Rows of each level of the decoder, the stride to it, and channels before and of it.
    for (rows, stride, before, channels) in [
        (512, 1, 64, 2048),
        (5_120, 10, 2048, 1024),
        (30_720, 6, 1024, 512),
        (122_880, 4, 512, 256),
        (491_520, 4, 256, 128),
        (983_040, 2, 128, 128),
    ] {
        let mut layers = vec![(
            rows / stride,
            shape(Through::Transposed { stride }, 2 * stride, before, channels),
        )];
        if stride == 1 {
            layers = vec![(rows, shape(Through::Dilated { dilation: 1 }, 7, before, channels))];
        } else {
            layers.push((
                rows,
                shape(Through::Strided { stride }, 2 * stride, channels, before),
            ));
            for dilation in [1, 3, 9] {
                layers.push((rows, shape(Through::Dilated { dilation }, 7, channels, channels)));
            }
        }
        if rows == 983_040 {
            layers.push((rows, shape(Through::Dilated { dilation: 1 }, 7, channels, 8)));
            layers.push((rows, shape(Through::Dilated { dilation: 1 }, 7, 8, channels)));
        }
        for (rows, shape) in layers {
            let reach = shape.reach(rows).expect("a sequence");
            let numbers = |dims: &[usize]| {
                let numbers = Tensor::randn(0f32, 1.0, dims, device).expect("numbers");
                numbers.to_dtype(DType::BF16).expect("numbers")
            };
            let of_weight = match shape.through {
                Through::Transposed { .. } => [shape.inputs, shape.outputs, shape.taps],
                Through::Dilated { .. } | Through::Strided { .. } => {
                    [shape.outputs, shape.inputs, shape.taps]
                }
            };
            let (direction, length) = (numbers(&of_weight), numbers(&of_weight[..1]));
            let (weight, bias) = (
                NormedWeight {
                    direction: &direction,
                    length: RowLength::Stored(&length),
                },
                numbers(&[shape.outputs]),
            );
            let filter = SequenceFilter::new(weight, Some(&bias), shape, DType::BF16).expect("a filter");
            let (read, written) = (
                numbers(&[reach.read, shape.inputs]),
                numbers(&[reach.written, shape.outputs]),
            );
            let ms = of_ten(device, &|| {
                filter.convolve(&read, rows, &written).expect("a sequence")
            });
            let products = match shape.through {
                Through::Transposed { .. } => reach.written * 2,
                Through::Dilated { .. } | Through::Strided { .. } => reach.written * shape.taps,
            };
            let operations = 2.0 * (products * shape.inputs * shape.outputs) as f64;
            println!(
                "{rows} rows, {shape:?}: {ms:.3} ms, {:.0} TFLOP/s",
                operations / ms * 1e-9
            );
        }
        let numbers = |dims: &[usize]| {
            let numbers = Tensor::randn(0f32, 1.0, dims, device).expect("numbers");
            numbers.to_dtype(DType::BF16).expect("numbers")
        };
        let (x, inner) = (numbers(&[rows, channels]), numbers(&[rows, channels]));
        let padded = numbers(&[rows + 54, channels]);
        let snake = Snake {
            alpha: numbers(&[channels]),
            beta: numbers(&[channels]),
        };
        let (direction, length) = (numbers(&[channels, channels, 1]), numbers(&[channels]));
        let weight = NormedWeight {
            direction: &direction,
            length: RowLength::Stored(&length),
        };
        let one = shape(Through::Dilated { dilation: 1 }, 1, channels, channels);
        let filter = SequenceFilter::new(weight, Some(&snake.beta), one, DType::BF16).expect("a filter");
        let bytes = (rows * channels * 2) as f64;
        let pad = of_ten(device, &|| {
            ops::pad_sequence(&x, Some(&snake), 27, &padded).expect("a sequence")
        });
        let within = of_ten(device, &|| {
            ops::snake_in_place(&inner, &snake).expect("a sequence")
        });
        let adds = of_ten(device, &|| filter.add_rows_to(&inner, &x).expect("a sequence"));
        for (what, ms, passes) in [
            ("pad and Snake", pad, 2.0),
            ("Snake in place", within, 2.0),
            ("rows added", adds, 3.0),
        ] {
            println!(
                "{rows} rows of {channels}, {what}: {ms:.3} ms, {:.2} TB/s",
                passes * bytes / ms * 1e-9
            );
        }
    }
}
