//! Tests on a card, against reference implementations in f64. They need `libcudnn.so.9`.

use candle_core::{DType, Device, Result, Storage, Tensor};
use cudarc::driver::DevicePtr as _;
use half::{bf16, f16};

use super::*;
use crate::testing::{random, test_device};

/// Tolerance of cuDNN, relative L2. A rounding to bf16 is 2e-3.
const TOLERANCE: f64 = 1e-2;

/// Runs with cuDNN on the device of the tests; does nothing on the CPU.
fn with_cudnn(work: impl FnOnce(&mut Cudnn) -> Result<()>) -> Result<()> {
    let Device::Cuda(device) = test_device() else {
        return Ok(());
    };
    let done = OfCard::default().with(device, work)?;
    assert_eq!(done, Some(()), "cuDNN: {:?}", Library::get().err());
    Ok(())
}

/// Address of a tensor on the card.
fn address(tensor: &Tensor) -> Result<u64> {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        candle_core::bail!("not on a card")
    };
    let stream = storage.device.cuda_stream();
    Ok(match tensor.dtype() {
        DType::F32 => storage.as_cuda_slice::<f32>()?.device_ptr(&stream).0,
        DType::F16 => storage.as_cuda_slice::<f16>()?.device_ptr(&stream).0,
        DType::BF16 => storage.as_cuda_slice::<bf16>()?.device_ptr(&stream).0,
        DType::I32 => storage.as_cuda_slice::<i32>()?.device_ptr(&stream).0,
        other => candle_core::bail!("no test has {other:?}"),
    })
}

/// Random numbers on the card, and their values after rounding.
fn numbers(count: usize, dtype: DType, seed: u64) -> Result<(Tensor, Vec<f64>)> {
    let narrow = (random(&[count], seed)? * 2.0)?.to_dtype(dtype)?;
    let exact = narrow.to_dtype(DType::F64)?.to_vec1()?;
    Ok((narrow.to_device(test_device())?, exact))
}

/// A buffer full of NaN.
fn poisoned(count: usize, dtype: DType) -> Result<Tensor> {
    Tensor::full(f32::NAN, count, &Device::Cpu)?
        .to_dtype(dtype)?
        .to_device(test_device())
}

fn read(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1()
}

fn assert_near(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let length: f64 = expected.iter().map(|e| e * e).sum();
    let distance: f64 = found.iter().zip(expected).map(|(f, e)| (f - e) * (f - e)).sum();
    let relative = (distance / length).sqrt();
    eprintln!("{what}: {relative:.1e}");
    assert!(relative < tolerance, "{what}: relative distance {relative:e}");
}

/// The operands of an attention, each with its offset.
struct AttentionOperands<'a> {
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    bias: &'a [f64],
    /// Numbers of queries and of keys, of each item.
    lengths: &'a [[usize; 2]],
    scale: f64,
}

impl AttentionOperands<'_> {
    /// The weights of a query's keys, by the definition; `None` beyond the item's queries.
    fn seen(&self, shape: &AttentionShape, [item, head, query]: [usize; 3]) -> Option<Vec<f64>> {
        let [queries, keys] = *self.lengths.get(item).unwrap_or(&[shape.queries, shape.keys]);
        if query >= queries {
            return None;
        }
        let shared = head / (shape.heads / shape.heads_kv);
        let row = |numbers: &'_ [f64], [batch, token, wide]: [usize; 3], at: usize, head: usize| {
            let start = item * batch + at * token + head * wide;
            numbers[start..start + shape.width].to_vec()
        };
        let q = row(self.q, shape.q, query, head);
        let sees = |key: usize| match shape.mask {
            MaskShape::Causal => key <= query,
            MaskShape::Window { before, after } => key + before >= query && key <= query + after,
            _ => true,
        };
        let keys: Vec<usize> = (0..keys).filter(|key| sees(*key)).collect();
        let scores = keys.iter().map(|&key| {
            let k = row(self.k, shape.k, key, shared);
            let bias = match &shape.mask {
                MaskShape::Bias { dims, strides } => {
                    let at = [item, head, query, key];
                    let at = (0..4)
                        .filter(|axis| dims[*axis] > 1)
                        .map(|axis| at[axis] * strides[axis]);
                    self.bias[at.sum::<usize>()]
                }
                _ => 0.0,
            };
            q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>() * self.scale + bias
        });
        let weights: Vec<f64> = scores.map(f64::exp).collect();
        let total: f64 = weights.iter().sum();
        let mut seen = vec![0.0; shape.width];
        for (key, weight) in keys.iter().zip(&weights) {
            for (seen, v) in seen.iter_mut().zip(row(self.v, shape.v, *key, shared)) {
                *seen += weight / total * v;
            }
        }
        Some(seen)
    }
}

/// Attention over separate buffers, or with `joint` over one buffer of q, k and v, into columns of a wider one.
fn shape_of(
    batch: usize,
    [heads, heads_kv]: [usize; 2],
    [queries, keys]: [usize; 2],
    width: usize,
    mask: MaskShape,
) -> AttentionShape {
    let strides = |tokens, heads| [tokens * heads * width, heads * width, width];
    AttentionShape {
        batch,
        heads,
        heads_kv,
        queries,
        keys,
        width,
        dtype: DType::BF16,
        q: strides(queries, heads),
        k: strides(keys, heads_kv),
        v: strides(keys, heads_kv),
        out: strides(queries, heads),
        mask,
        log_sums: false,
        in_fp8: false,
    }
}

/// Runs an attention with the given offsets into the buffers of out, and of q, k and v (one buffer if `joint`), and
/// checks it against the reference.
fn check(
    cudnn: &mut Cudnn,
    what: &str,
    shape: &AttentionShape,
    joint: Option<[usize; 3]>,
    out_at: usize,
) -> Result<()> {
    let dtype = shape.dtype;
    let scale = 1.0 / (shape.width as f64).sqrt();
    let (mut tensors, starts) = (Vec::new(), joint.unwrap_or([0; 3]));
    let of = [shape.q, shape.k, shape.v];
    for (seed, strides) in of.iter().enumerate() {
        if joint.is_none() || seed == 0 {
            tensors.push(numbers(shape.batch * strides[0], dtype, 11 + seed as u64)?);
        }
    }
    let tensor = |index: usize| &tensors[if joint.is_some() { 0 } else { index }];
    let (bias, bias_numbers) = match &shape.mask {
        MaskShape::Bias { dims, strides } => numbers(dims[0].max(1) * strides[0], dtype, 23)?,
        _ => numbers(8, dtype, 23)?,
    };
    let lengths: Vec<[usize; 2]> = match shape.mask {
        MaskShape::Lengths => (0..shape.batch)
            .map(|item| [shape.queries - 3 * item, shape.keys / 2 - item])
            .collect(),
        _ => Vec::new(),
    };
    let counts = |side: usize| {
        let counts: Vec<i32> = (0..shape.batch)
            .map(|item| lengths.get(item).map_or(1, |length| length[side] as i32))
            .collect();
        Tensor::from_vec(counts, shape.batch, test_device())
    };
    let counts = [counts(0)?, counts(1)?];
    let operands = AttentionOperands {
        q: &tensor(0).1[starts[0]..],
        k: &tensor(1).1[starts[1]..],
        v: &tensor(2).1[starts[2]..],
        bias: &bias_numbers,
        lengths: &lengths,
        scale,
    };
    let out = poisoned(shape.batch * shape.out[0], dtype)?;
    let at = |index: usize| Ok::<_, Error>(address(&tensor(index).0)? + 2 * starts[index] as u64);
    let at = AttentionAt {
        q: at(0)?,
        k: at(1)?,
        v: at(2)?,
        out: address(&out)? + 2 * out_at as u64,
        bias: Some(address(&bias)?),
        lengths: Some((address(&counts[0])?, address(&counts[1])?)),
        log_sums: None,
        fp8_scales: None,
        scale: scale as f32,
    };
    assert!(attention(cudnn, shape, &at)?, "{what}: cuDNN refuses it");
    let out = read(&out)?;
    let (mut found, mut expected, mut written) = (Vec::new(), Vec::new(), vec![false; out.len()]);
    for item in 0..shape.batch {
        for query in 0..shape.queries {
            for head in 0..shape.heads {
                let start = out_at + item * shape.out[0] + query * shape.out[1] + head * shape.out[2];
                written[start..start + shape.width].fill(true);
                if let Some(seen) = operands.seen(shape, [item, head, query]) {
                    found.extend(&out[start..start + shape.width]);
                    expected.extend(seen);
                }
            }
        }
    }
    let beside = out.iter().zip(&written).filter(|(_, written)| !**written);
    assert!(
        beside.into_iter().all(|(number, _)| number.is_nan()),
        "{what}: written beside the result"
    );
    assert_near(&found, &expected, TOLERANCE, what);
    Ok(())
}

#[test]
fn attention_equals_the_reference() -> Result<()> {
    with_cudnn(|cudnn| {
        let mut check = |what: &str, shape: AttentionShape| check(cudnn, what, &shape, None, 0);
        let plain = |tokens, width| shape_of(1, [2, 2], tokens, width, MaskShape::None);
        check("plain", plain([256, 256], 128))?;
        check(
            "f16",
            AttentionShape {
                dtype: DType::F16,
                ..plain([256, 256], 128)
            },
        )?;
        check("odd tokens", plain([173, 173], 128))?;
        check("cross", plain([200, 77], 128))?;
        check("batch of 3", shape_of(3, [2, 2], [130, 130], 64, MaskShape::None))?;
        check(
            "heads that share keys",
            shape_of(1, [8, 2], [160, 160], 128, MaskShape::None),
        )?;
        for width in [40, 64, 72, 96, 256, 512] {
            check(&format!("width {width}"), plain([192, 192], width))?;
        }
        check(
            "bias",
            shape_of(1, [4, 4], [150, 150], 64, MaskShape::bias([1, 4, 150, 150])),
        )?;
        check(
            "bias of a batch",
            shape_of(2, [4, 4], [96, 96], 64, MaskShape::bias([1, 4, 96, 96])),
        )?;
        check(
            "bias over heads",
            shape_of(1, [4, 4], [128, 128], 128, MaskShape::bias([1, 1, 128, 128])),
        )?;
        check(
            "bias of keys",
            shape_of(1, [4, 4], [128, 144], 128, MaskShape::bias([1, 1, 1, 144])),
        )?;
        check("causal", shape_of(1, [3, 3], [77, 77], 64, MaskShape::Causal))
    })
}

#[test]
fn window_and_length_masks_equal_the_reference() -> Result<()> {
    with_cudnn(|cudnn| {
        let mut check =
            |what: &str, mask| check(cudnn, what, &shape_of(1, [4, 2], [300, 300], 128, mask), None, 0);
        for (before, after) in [(40, 40), (0, 7), (7, 0), (400, 5), (5, 400), (400, 400)] {
            check(
                &format!("window {before} {after}"),
                MaskShape::Window { before, after },
            )?;
        }
        check("lengths", MaskShape::Lengths)
    })?;
    with_cudnn(|cudnn| {
        let shape = shape_of(2, [2, 2], [140, 170], 64, MaskShape::Lengths);
        check(cudnn, "lengths of a batch", &shape, None, 0)
    })
}

#[test]
fn attention_reads_and_writes_columns_of_wider_buffers() -> Result<()> {
    let (heads, width, tokens) = (3, 128, 190);
    let row = heads * width;
    let joint = [tokens * 3 * row, 3 * row, width];
    let shape = AttentionShape {
        q: joint,
        k: joint,
        v: joint,
        out: [tokens * 5 * row, 5 * row, width],
        ..shape_of(1, [heads, heads], [tokens, tokens], width, MaskShape::None)
    };
    with_cudnn(|cudnn| check(cudnn, "joint buffer", &shape, Some([0, row, 2 * row]), row))
}

#[test]
fn a_plan_loaded_from_disk_computes_the_same() -> Result<()> {
    let at = tempfile::tempdir()?;
    let shape = shape_of(1, [2, 2], [128, 128], 128, MaskShape::None);
    for is_new in [true, false] {
        with_cudnn(|cudnn| {
            cudnn.maker.folder = Some(Folder::at(at.path(), 4));
            check(cudnn, "a plan from its folder", &shape, None, 0)?;
            let plan = cudnn.attentions.0.get(&shape).and_then(Option::as_ref);
            assert_eq!(plan.map(|plan| plan.is_new()), Some(is_new));
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn a_misaligned_address_is_refused() -> Result<()> {
    with_cudnn(|cudnn| {
        let shape = shape_of(1, [1, 1], [8, 8], 64, MaskShape::None);
        let at = AttentionAt {
            q: 8,
            k: 0,
            v: 0,
            out: 0,
            bias: None,
            lengths: None,
            log_sums: None,
            fp8_scales: None,
            scale: 1.0,
        };
        assert!(!attention(cudnn, &shape, &at)?);
        Ok(())
    })
}

/// Reference convolution in f64: `[batch, spatial.., channels out]` of three axes.
fn convolved(shape: &ConvolutionShape, x: &[f64], filter: &[f64], bias: &[f64]) -> Vec<f64> {
    let three = |of: &[usize], first: usize| -> [usize; 3] {
        let mut sides = [first; 3];
        sides[3 - of.len()..].copy_from_slice(of);
        sides
    };
    let (read, sides) = (three(&shape.spatial, 1), three(&shape.filter, 1));
    let written = three(&shape.out().unwrap(), 1);
    let (before, strides) = (three(&shape.before, 0), three(&shape.strides, 1));
    let dilations = three(&shape.dilations, 1);
    let places = |sides: [usize; 3]| {
        (0..sides[0])
            .flat_map(move |a| (0..sides[1]).flat_map(move |b| (0..sides[2]).map(move |c| [a, b, c])))
    };
    let inputs = shape.channels_in;
    let mut out = Vec::new();
    for item in 0..shape.batch {
        for place in places(written) {
            for (channel, bias) in bias.iter().enumerate() {
                let mut sum = if shape.has_bias { *bias } else { 0.0 };
                for tap in places(sides) {
                    let at = [0, 1, 2]
                        .map(|i| (place[i] * strides[i] + tap[i] * dilations[i]).checked_sub(before[i]));
                    let [Some(a), Some(b), Some(c)] = at else { continue };
                    if a >= read[0] || b >= read[1] || c >= read[2] {
                        continue;
                    }
                    let from = (((item * read[0] + a) * read[1] + b) * read[2] + c) * inputs;
                    let [d, e, f] = tap;
                    let by = (((channel * sides[0] + d) * sides[1] + e) * sides[2] + f) * inputs;
                    let terms = x[from..from + inputs].iter().zip(&filter[by..by + inputs]);
                    sum += terms.map(|(x, w)| x * w).sum::<f64>();
                }
                out.push(sum);
            }
        }
    }
    out
}

fn check_convolution(cudnn: &mut Cudnn, what: &str, shape: &ConvolutionShape, tolerance: f64) -> Result<()> {
    let count = |sides: &[usize]| sides.iter().product::<usize>();
    let (x, x_numbers) = numbers(
        shape.batch * count(&shape.spatial) * shape.channels_in,
        shape.dtype,
        31,
    )?;
    let filters = shape.channels_out * count(&shape.filter) * shape.channels_in;
    let (filter, filter_numbers) = numbers(filters, shape.dtype, 32)?;
    let (bias, bias_numbers) = numbers(shape.channels_out, shape.dtype, 33)?;
    let expected = convolved(shape, &x_numbers, &filter_numbers, &bias_numbers);
    let out = poisoned(expected.len(), shape.dtype)?;
    let at = ConvolutionAt {
        x: address(&x)?,
        filter: address(&filter)?,
        bias: Some(address(&bias)?),
        out: address(&out)?,
    };
    assert!(convolve(cudnn, shape, &at)?, "{what}: cuDNN refuses it");
    assert_near(&read(&out)?, &expected, tolerance, what);
    Ok(())
}

#[test]
fn a_convolution_equals_the_reference() -> Result<()> {
    let of = |spatial: &[usize], side: usize| {
        let each = |value: usize| vec![value; spatial.len()];
        ConvolutionShape {
            batch: 1,
            spatial: spatial.to_vec(),
            channels_in: 32,
            channels_out: 48,
            filter: each(side),
            before: each(side / 2),
            after: each(side / 2),
            strides: each(1),
            dilations: each(1),
            dtype: DType::BF16,
            has_bias: true,
        }
    };
    let picture = || of(&[17, 24], 3);
    with_cudnn(|cudnn| {
        let mut check =
            |what: &str, shape: ConvolutionShape| check_convolution(cudnn, what, &shape, TOLERANCE);
        check("picture", picture())?;
        check(
            "f16",
            ConvolutionShape {
                dtype: DType::F16,
                ..picture()
            },
        )?;
        check(
            "no bias",
            ConvolutionShape {
                has_bias: false,
                ..picture()
            },
        )?;
        check(
            "batch of 2, no neighbours",
            ConvolutionShape {
                batch: 2,
                ..of(&[9, 8], 1)
            },
        )?;
        check(
            "to 3 channels",
            ConvolutionShape {
                channels_out: 3,
                ..picture()
            },
        )?;
        check(
            "strip",
            ConvolutionShape {
                before: vec![1, 1],
                after: vec![0, 1],
                ..picture()
            },
        )?;
        check(
            "half the size",
            ConvolutionShape {
                before: vec![0, 0],
                after: vec![1, 1],
                strides: vec![2, 2],
                ..picture()
            },
        )?;
        check(
            "film",
            ConvolutionShape {
                before: vec![2, 1, 1],
                after: vec![0, 1, 1],
                ..of(&[4, 9, 10], 3)
            },
        )?;
        check("sound", of(&[90], 7))
    })
}

#[test]
fn an_f32_convolution_has_full_precision() -> Result<()> {
    let shape = ConvolutionShape {
        batch: 1,
        spatial: vec![17, 24],
        channels_in: 64,
        channels_out: 32,
        filter: vec![3, 3],
        before: vec![1, 1],
        after: vec![1, 1],
        strides: vec![1, 1],
        dilations: vec![1, 1],
        dtype: DType::F32,
        has_bias: false,
    };
    // TF32 has an error of some 3e-4.
    with_cudnn(|cudnn| check_convolution(cudnn, "f32", &shape, 1e-5))
}
