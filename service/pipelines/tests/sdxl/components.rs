//! Parity of the UNet.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::sdxl::{Prompted, Unet, UnetConfig};

use crate::device::{BF16_COMPONENT, here, test_device, tolerances};
use crate::numbers::{distance, json, numbers, resident, tensors};

pub(crate) const WEIGHTS: &str = "sdxl-tiny/unet/diffusion_pytorch_model.safetensors";
pub(crate) const ANSWERS: &str = "sdxl-tiny/expected/unet.safetensors";

pub(crate) fn config() -> UnetConfig {
    json("sdxl-tiny/unet/config.json")
}

/// The weights of a fixture in f32, in which the reference was computed.
pub(crate) fn weights(path: &str) -> HashMap<String, Tensor> {
    let wide = |tensor: Tensor| tensor.to_dtype(DType::F32).expect("numbers");
    let all = tensors(path).into_iter();
    all.map(|(name, tensor)| (name, wide(tensor))).collect()
}

/// The UNet's output at every time of a case, `[times, items, channels, height, width]`.
pub(crate) fn outputs(
    config: &UnetConfig,
    tensors: &ComponentTensors,
    inputs: &HashMap<String, Tensor>,
    case: &str,
    dtype: DType,
) -> Tensor {
    let input = |name: &str| &inputs[&format!("{case}.{name}")];
    let unet = Unet::new(config, tensors).expect("all tensors");
    let narrow = |x: &Tensor| here(&x.to_dtype(dtype).expect("numbers"));
    let latent = input("latent");
    let (items, _, rows, columns) = latent.dims4().expect("a latent");
    let prompts: Vec<Prompted> = (0..items)
        .map(|item| Prompted {
            states: narrow(&input("states").narrow(0, item, 1).expect("states")),
            pooled: narrow(&input("pooled").narrow(0, item, 1).expect("states")),
            ids: numbers(&input("ids").narrow(0, item, 1).expect("numbers"))
                .try_into()
                .expect("six numbers"),
        })
        .collect();
    let prompts: Vec<&Prompted> = prompts.iter().collect();
    let on = (dtype, test_device());
    let conditioning = unet.condition(&prompts, on).expect("conditioning");
    let scratch = unet.scratch((items, rows * columns), on).expect("scratch");
    let map = latent.permute((0, 2, 3, 1)).and_then(|map| map.contiguous());
    let map = narrow(&map.expect("a map"));
    let outputs = numbers(input("times")).into_iter().map(|time| {
        let output = unet.forward(&map, time, &conditioning, &scratch, &mut || Ok(()));
        let output = output.expect("an output").to_device(&Device::Cpu);
        let output = output.and_then(|x| x.to_dtype(DType::F32)?.permute((0, 3, 1, 2))?.contiguous());
        output.expect("numbers")
    });
    Tensor::stack(&outputs.collect::<Vec<_>>(), 0).expect("outputs")
}

#[test]
fn the_unet_equals_the_reference() {
    let (inputs, tensors) = (tensors(ANSWERS), resident(&weights(WEIGHTS)));
    for case in ["plain", "odd", "two"] {
        let expected = &inputs[&format!("{case}.output")];
        let apart = distance(&outputs(&config(), &tensors, &inputs, case, DType::F32), expected);
        println!("{case}: {apart:.2e}");
        assert!(apart < tolerances().component, "{case}: {apart:e}");
    }
}

#[test]
fn the_unet_in_bf16_is_the_same_within_its_rounding() {
    let (inputs, tensors) = (tensors(ANSWERS), resident(&tensors(WEIGHTS)));
    for case in ["plain", "odd", "two"] {
        let expected = &inputs[&format!("{case}.output")];
        let apart = distance(
            &outputs(&config(), &tensors, &inputs, case, DType::BF16),
            expected,
        );
        println!("{case} in bf16: {apart:.2e}");
        assert!(apart < BF16_COMPONENT, "{case}: {apart:e}");
    }
}

#[test]
fn every_tensor_of_the_fixture_is_read() {
    let mut expected: Vec<_> = config().tensor_shapes().collect();
    let mut found: Vec<_> = tensors(WEIGHTS)
        .into_iter()
        .map(|(name, tensor)| (name, tensor.dims().to_vec()))
        .collect();
    expected.sort();
    found.sort();
    assert_eq!(expected, found);
}
