//! Times FLUX.1's linear layers at 1024x1024 on a CUDA device, without and with a low-rank term:
//! `low_rank --rank 16 --format full|int8|fp8|nf4 --rounds 20`. It prints microseconds of one layer, or of layers over the same
//! rows, and milliseconds of all layers of a step. `COUNT_KERNELS` of `tests/gpu/count_calls.c` tells its kernels.
#![allow(clippy::print_stdout, clippy::expect_used)] // A benchmark, which prints its figures.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use gpu::{QuantizedWeight, Weight, WeightFormat};
use ops::{Epilogue, LayerTo, LinearLayer, LowRank, Scratch};

/// Layers over the same rows.
struct Layers {
    name: &'static str,
    /// How many of them a step has.
    of_step: usize,
    tokens: usize,
    inputs: usize,
    outputs: usize,
    side_by_side: usize,
    then: Epilogue,
    /// Numbers from one row of the result to the next.
    stride: usize,
}

const WIDTH: usize = 3072;
const INNER: usize = 4 * WIDTH;

fn layers() -> Vec<Layers> {
    let mut all = Vec::new();
    for (of_step, tokens, is_single) in [(19, 4096, false), (19, 512, false), (38, 4608, true)] {
        let mut add = |name, (inputs, outputs), side_by_side, then, stride| {
            all.push(Layers {
                name,
                of_step,
                tokens,
                inputs,
                outputs,
                side_by_side,
                then,
                stride,
            });
        };
        add("projections", (WIDTH, WIDTH), 3, Epilogue::None, WIDTH);
        if is_single {
            add("up", (WIDTH, INNER), 1, Epilogue::GeluTanh, WIDTH + INNER);
            add("output", (WIDTH + INNER, WIDTH), 1, Epilogue::None, WIDTH);
        } else {
            add("output", (WIDTH, WIDTH), 1, Epilogue::None, WIDTH);
            add("up", (WIDTH, INNER), 1, Epilogue::GeluTanh, INNER);
            add("down", (INNER, WIDTH), 1, Epilogue::None, WIDTH);
        }
    }
    all
}

/// The value behind a flag.
fn option(name: &str, otherwise: &str) -> String {
    let arguments: Vec<String> = std::env::args().collect();
    let place = arguments.iter().position(|argument| argument == name);
    place
        .and_then(|place| arguments.get(place + 1))
        .map_or(otherwise.to_owned(), Clone::clone)
}

/// Numbers of about the size that weights have.
fn numbers(shape: &[usize], device: &Device) -> Tensor {
    Tensor::randn(0f32, 0.02, shape, device)
        .and_then(|numbers| numbers.to_dtype(DType::BF16))
        .expect("numbers")
}

/// Weights behind one another, as the projections of an attention are.
fn weights(format: Option<WeightFormat>, count: usize, shape: [usize; 2], device: &Device) -> Vec<Weight> {
    let [outputs, inputs] = shape;
    let Some(format) = format else {
        let all = numbers(&[count, outputs, inputs], device);
        return (0..count)
            .map(|which| Weight::Full(all.get(which).expect("a weight")))
            .collect();
    };
    (0..count).map(|_| quantized(format, shape, device)).collect()
}

fn quantized(format: WeightFormat, shape: [usize; 2], device: &Device) -> Weight {
    let length = format.bytes(shape[0], shape[1]).0 as usize;
    // No NaN in e4m3, and scales that are finite.
    let bytes: Vec<u8> = (0..length)
        .map(|n| ((n * 2_654_435_761) >> 13) as u8 & 0x3F)
        .collect();
    Weight::Quantized(QuantizedWeight {
        bytes: Tensor::from_vec(bytes, length, device).expect("a weight"),
        format,
        shape: shape.to_vec(),
    })
}

fn main() {
    let device = Device::new_cuda_with_stream(0).expect("a CUDA device");
    let format = match option("--format", "full").as_str() {
        "full" => None,
        "fp8" => Some(WeightFormat::Fp8(gpu::Fp8Scales::Rows)),
        "int8" => Some(WeightFormat::Int8),
        "nf4" => Some(WeightFormat::Nf4),
        other => panic!("there is no format {other}"),
    };
    let number =
        |name: &str, otherwise: &str| -> usize { option(name, otherwise).parse().expect("a number") };
    let (rank, rounds) = (number("--rank", "16"), number("--rounds", "20"));
    let mut sums = [0.0; 2];
    for each in layers() {
        let Layers {
            name,
            tokens,
            inputs,
            outputs,
            side_by_side: side,
            ..
        } = each;
        let x = numbers(&[tokens, inputs], &device);
        // So many that none is in the card's cache when it is used again.
        let sets = (400 << 20) / (2 * side * outputs * inputs) + 1;
        let weights: Vec<Vec<Weight>> = (0..sets)
            .map(|_| weights(format, side, [outputs, inputs], &device))
            .collect();
        let biases = numbers(&[side, outputs], &device);
        let biases: Vec<Tensor> = (0..side)
            .map(|which| biases.get(which).expect("a bias"))
            .collect();
        let downs = numbers(&[side, rank, inputs], &device);
        let ups = numbers(&[side, outputs, rank], &device);
        let results = numbers(&[side, tokens, each.stride], &device);
        let outs: Vec<Tensor> = (0..side)
            .map(|which| {
                results
                    .get(which)
                    .and_then(|out| out.narrow(1, 0, outputs))
                    .expect("a result")
            })
            .collect();
        let scratch = Scratch::new(1 << 30, &device).expect("a scratch");
        let mut times = [0.0; 2];
        for (has_term, time) in times.iter_mut().enumerate() {
            let run = |round: usize| {
                let to: Vec<LayerTo<'_>> = (0..side)
                    .map(|which| LayerTo {
                        layer: LinearLayer {
                            low_rank: (0..has_term)
                                .map(|_| LowRank {
                                    down: downs.get(which).expect("a factor"),
                                    up: ups.get(which).expect("a factor"),
                                    factor: 0.7,
                                })
                                .collect(),
                            ..LinearLayer::new(&weights[round % sets][which], Some(&biases[which]))
                        },
                        out: &outs[which],
                    })
                    .collect();
                ops::linears_into(&x, &to, each.then, &scratch).expect("products");
            };
            (0..3).for_each(run);
            device.synchronize().expect("a device that answers");
            let began = Instant::now();
            (0..rounds).for_each(run);
            device.synchronize().expect("a device that answers");
            *time = began.elapsed().as_secs_f64() * 1e6 / rounds as f64;
        }
        println!(
            "{tokens:5} {name:12} {:8.1} us, with a term {:8.1} us, {:+.1} us, {:.3}",
            times[0],
            times[1],
            times[1] - times[0],
            times[1] / times[0]
        );
        for (sum, time) in sums.iter_mut().zip(times) {
            *sum += time * each.of_step as f64 / 1e3;
        }
    }
    println!(
        "layers of a step: {:.2} ms, with terms {:.2} ms, {:+.2} ms",
        sums[0],
        sums[1],
        sums[1] - sums[0]
    );
}
