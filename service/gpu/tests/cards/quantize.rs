//! Quantization on the CPU, checked against the arithmetic of each format.

use std::ops::ControlFlow;

use gpu::{
    ByteRange, CpuCard, CpuSettings, Fp8Scales, Gpu, INT8_STEP, LoadError, LoadPlan, LoadProgress, NF4_BLOCK,
    NF4_NESTED_BLOCK, QuantizeError, Rotation, SourcePiece, Stored, Target, TensorSource, Weight,
    WeightFormat, WeightPart, e4m3_to_f32, nested_table, nf4_table, quantize, rows_and_columns,
};
use half::bf16;
use proptest::prelude::*;
use residency::{Component, ComponentId};
use safetensors::SafeTensors;

const FP8: WeightFormat = WeightFormat::Fp8(Fp8Scales::Rows);

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

fn part(bytes: &[u8], format: WeightFormat, shape: (usize, usize), part: WeightPart) -> &[u8] {
    let layout = format.layout(shape.0, shape.1);
    let (_, range) = layout.into_iter().find(|(p, _)| *p == part).unwrap();
    &bytes[range]
}

fn nibble(codes: &[u8], i: usize) -> usize {
    usize::from(if i.is_multiple_of(2) {
        codes[i / 2] >> 4
    } else {
        codes[i / 2] & 15
    })
}

/// The absolute maximum of each block of nf4.
fn block_scales(bytes: &[u8], format: WeightFormat, shape: (usize, usize)) -> Vec<f32> {
    let scales = part(bytes, format, shape, WeightPart::Scales);
    if format == WeightFormat::Nf4 {
        return f32s(scales);
    }
    let table = f32s(part(bytes, format, shape, WeightPart::NestedTable));
    let nested = f32s(part(bytes, format, shape, WeightPart::NestedAbsmax));
    let offset = f32s(part(bytes, format, shape, WeightPart::Offset))[0];
    let value = |(i, code): (usize, &u8)| table[usize::from(*code)] * nested[i / NF4_NESTED_BLOCK] + offset;
    scales.iter().enumerate().map(value).collect()
}

/// The numbers that the bytes mean, one by one.
fn dequantize(bytes: &[u8], format: WeightFormat, (rows, columns): (usize, usize)) -> Vec<f32> {
    let shape = (rows, columns);
    let codes = part(bytes, format, shape, WeightPart::Codes);
    let row = |i: usize| i / columns;
    match format {
        WeightFormat::Int8 => {
            let scales = f32s(part(bytes, format, shape, WeightPart::Scales));
            let value = |(i, code): (usize, &u8)| f32::from(*code as i8) * scales[row(i)] * INT8_STEP;
            codes.iter().enumerate().map(value).collect()
        }
        WeightFormat::Int8Scaled(_, rotation) => {
            let scales = f32s(part(bytes, format, shape, WeightPart::Scales));
            let value = |(i, code): (usize, &u8)| f32::from(*code as i8) * scales[row(i)];
            let mut numbers: Vec<f32> = codes.iter().enumerate().map(value).collect();
            rotation.turn(&mut numbers);
            numbers
        }
        FP8 => {
            let scales = f32s(part(bytes, format, shape, WeightPart::Scales));
            let value = |(i, code): (usize, &u8)| e4m3_to_f32(*code) * scales[row(i)];
            codes.iter().enumerate().map(value).collect()
        }
        _ => {
            let table = f32s(part(bytes, format, shape, WeightPart::Table));
            let scales = block_scales(bytes, format, shape);
            let value = |i: usize| table[nibble(codes, i)] * scales[i / NF4_BLOCK];
            (0..rows * columns).map(value).collect()
        }
    }
}

struct Fixture(Vec<u8>);

impl Fixture {
    fn read() -> Fixture {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/quantize/bitsandbytes.safetensors"
        );
        Fixture(std::fs::read(path).unwrap())
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.tensor(name).unwrap().data().to_vec()
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        f32s(&self.bytes(name))
    }

    fn weight(&self, name: &str) -> ((usize, usize), Vec<f32>) {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let view = file.tensor(&format!("{name}.weight")).unwrap();
        let number = |b: &[u8]| bf16::from_le_bytes(b.try_into().unwrap()).to_f32();
        let numbers = view.data().chunks_exact(2).map(number).collect();
        ((view.shape()[0], view.shape()[1]), numbers)
    }
}

#[test]
fn tables_equal_those_of_bitsandbytes() {
    let fixture = Fixture::read();
    assert_eq!(fixture.f32s("nf4_table"), nf4_table());
    assert_eq!(fixture.f32s("nested_table"), nested_table());
    assert!(nested_table().is_sorted());
}

/// bitsandbytes multiplies by a reciprocal where we divide: codes may differ close to a midpoint.
#[test]
fn nf4_equals_bitsandbytes_except_on_midpoints() {
    let fixture = Fixture::read();
    let mut differ = 0;
    for name in ["even", "odd", "long"] {
        let (shape, numbers) = fixture.weight(name);
        let bytes = quantize(WeightFormat::Nf4, &numbers, shape.0, shape.1).unwrap();
        let absmax = f32s(part(&bytes, WeightFormat::Nf4, shape, WeightPart::Scales));
        assert_eq!(absmax, fixture.f32s(&format!("{name}.nf4.absmax")), "{name}");
        let codes = part(&bytes, WeightFormat::Nf4, shape, WeightPart::Codes);
        let theirs = fixture.bytes(&format!("{name}.nf4.codes"));
        for (i, x) in numbers.iter().enumerate() {
            let (ours, theirs) = (nibble(codes, i), nibble(&theirs, i));
            if ours != theirs {
                differ += 1;
                let table = nf4_table();
                let midpoint = (table[ours] + table[theirs]) * 0.5;
                let y = x / absmax[i / NF4_BLOCK];
                assert!(
                    ours.abs_diff(theirs) == 1 && (y - midpoint).abs() < 1e-6,
                    "{name} {i} {y}"
                );
            }
        }
    }
    println!("nf4: {differ} codes differ");
    assert!(differ < 4, "{differ}");
}

/// The mean is summed in another order, so that the offset may differ in its last places, and codes at midpoints.
#[test]
fn double_quantization_equals_bitsandbytes_up_to_rounding() {
    let fixture = Fixture::read();
    let format = WeightFormat::Nf4Double;
    for name in ["even", "odd", "long"] {
        let (shape, numbers) = fixture.weight(name);
        let bytes = quantize(format, &numbers, shape.0, shape.1).unwrap();
        let offset = f32s(part(&bytes, format, shape, WeightPart::Offset))[0];
        let theirs = fixture.f32s(&format!("{name}.nf4_double.offset"))[0];
        assert!((offset - theirs).abs() <= theirs * 3e-7, "{offset} {theirs}");
        let nested = f32s(part(&bytes, format, shape, WeightPart::NestedAbsmax));
        for (ours, theirs) in nested
            .iter()
            .zip(fixture.f32s(&format!("{name}.nf4_double.nested_absmax")))
        {
            assert!((ours - theirs).abs() <= theirs * 1e-6, "{ours} {theirs}");
        }
        let ours = part(&bytes, format, shape, WeightPart::Scales);
        let theirs = fixture.bytes(&format!("{name}.nf4_double.absmax"));
        let differ = ours.iter().zip(&theirs).filter(|(a, b)| a != b).count();
        println!("nf4-double {name}: {differ} of {} differ", ours.len());
        assert!(
            ours.iter().zip(&theirs).all(|(a, b)| a.abs_diff(*b) <= 1),
            "{name}"
        );
        assert!(differ * 100 <= ours.len(), "{name}: {differ} of {}", ours.len());
    }
}

#[test]
fn int8_equals_bitsandbytes_except_on_midpoints() {
    let fixture = Fixture::read();
    let mut differ = 0;
    for name in ["even", "odd"] {
        let (shape, numbers) = fixture.weight(name);
        let bytes = quantize(WeightFormat::Int8, &numbers, shape.0, shape.1).unwrap();
        let absmax = f32s(part(&bytes, WeightFormat::Int8, shape, WeightPart::Scales));
        assert_eq!(absmax, fixture.f32s(&format!("{name}.int8.absmax")), "{name}");
        let ours = part(&bytes, WeightFormat::Int8, shape, WeightPart::Codes);
        let theirs = fixture.bytes(&format!("{name}.int8.codes"));
        for (i, x) in numbers.iter().enumerate() {
            if ours[i] != theirs[i] {
                differ += 1;
                let y = f64::from(*x) / f64::from(absmax[i / shape.1]) * 127.0;
                assert!((y - y.floor() - 0.5).abs() < 127e-6, "{name} {i} {y}");
            }
        }
    }
    println!("int8: {differ} codes differ");
    assert!(differ < 20, "{differ}");
}

/// Numbers of all sizes, each kind by itself and mixed.
fn numbers(count: usize) -> impl Strategy<Value = Vec<f32>> {
    let extreme = prop_oneof![
        Just(0.0f32),
        Just(-0.0),
        Just(f32::MAX),
        Just(f32::MIN),
        Just(bf16::MAX.to_f32()),
        Just(f32::MIN_POSITIVE),
        Just(f32::from_bits(1)),
        Just(-f32::from_bits(600)),
    ];
    let denormal = (0u32..0x80_0000, any::<bool>()).prop_map(|(bits, negative)| {
        let size = f32::from_bits(bits);
        if negative { -size } else { size }
    });
    let usual = (-4.0f32..4.0).prop_map(|x| x * x * x * 0.01);
    let any_size = any::<f32>().prop_filter("finite", |x| x.is_finite());
    let of = move |one: BoxedStrategy<f32>| proptest::collection::vec(one, count);
    prop_oneof![
        4 => of(usual.clone().boxed()),
        1 => of(any_size.clone().boxed()),
        1 => of(denormal.clone().boxed()),
        1 => of(prop_oneof![extreme, denormal, usual, any_size].boxed()),
        1 => of(Just(0.0).boxed()),
    ]
}

/// The formats that weights of so many columns are made in, of numbers of these sizes: a rotation adds up to 256 of them.
fn formats(columns: usize, numbers: &[f32]) -> Vec<WeightFormat> {
    let is_huge = numbers.iter().any(|x| x.abs() > f32::MAX / 1024.0);
    WeightFormat::MADE_AT_LOAD
        .into_iter()
        .map(|format| format.for_columns(columns))
        .filter(|format| !is_huge || format.rotation() == Rotation::None)
        .collect()
}

fn weights() -> impl Strategy<Value = ((usize, usize), Vec<f32>)> {
    let shape = prop_oneof![
        Just((1, 1)),
        Just((0, 7)),
        Just((7, 0)),
        (1usize..6, 1usize..200),
        (1usize..3, 63usize..66),
        (60usize..70, 250usize..300),
        (
            1usize..4,
            prop_oneof![Just(16usize), Just(64), Just(192), Just(256), Just(768)]
        ),
    ];
    shape.prop_flat_map(|(rows, columns)| (Just((rows, columns)), numbers(rows * columns)))
}

/// The largest distance of a number from the value of its code, by the arithmetic of the format.
fn bound(format: WeightFormat, shape: (usize, usize), bytes: &[u8], numbers: &[f32], i: usize) -> f64 {
    let row = |i: usize| &numbers[i / shape.1 * shape.1..][..shape.1];
    let first = i / NF4_BLOCK * NF4_BLOCK;
    let most = |numbers: &[f32]| f64::from(numbers.iter().fold(0.0f32, |most, x| most.max(x.abs())));
    // A few roundings of f32, of normal numbers and of denormals.
    let rounding = |size: f64| size * 4.0 * f64::from(f32::EPSILON) + 200.0 * f64::from(f32::from_bits(1));
    match format {
        // Half a step; and in an absolute maximum that is denormal, the steps of its products.
        WeightFormat::Int8 => {
            let absmax = most(row(i));
            absmax / 254.0 + rounding(absmax)
        }
        // Half a step of a rotated row, whose numbers are at most the root of a group as large; turned back they add up.
        WeightFormat::Int8Scaled(_, rotation) => {
            let (absmax, group) = (most(row(i)), rotation.group() as f64);
            group * (absmax / 254.0 + 64.0 * rounding(absmax))
        }
        // Half of the last place: 2^-4 of the number, and 2^-10 scales below the smallest normal one. A scale that is
        // denormal is rounded by up to half a step, which each of 448 may be off by.
        FP8 => {
            let (absmax, size) = (most(row(i)), f64::from(numbers[i].abs()));
            size / 16.0 + absmax / 448.0 / 1024.0 + rounding(absmax) + 224.0 * f64::from(f32::from_bits(1))
        }
        // Half of the widest gap of the table, between -1 and -0.696.
        _ => {
            let block = &numbers[first..numbers.len().min(first + NF4_BLOCK)];
            let absmax = most(block);
            let scale = f64::from(block_scales(bytes, format, shape)[i / NF4_BLOCK]);
            let of_scale = (scale - absmax).abs();
            absmax * (1.0 - 0.696_192) / 2.0 + of_scale + rounding(absmax.max(scale.abs()))
        }
    }
}

/// The largest distance of nested absolute maxima from the values of their codes: half of the widest gap of their table,
/// between 0.9648 and 1, or -0.993, the value for all numbers down to -1.
fn nested_bound(nested: f32, offset: f32) -> f64 {
    let size = f64::from(nested.abs()) + f64::from(offset.abs());
    f64::from(nested) * 0.0072 + size * 4.0 * f64::from(f32::EPSILON) + f64::from(f32::from_bits(8))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn dequantized_values_are_within_the_error_bound((shape, numbers) in weights()) {
        for format in formats(shape.1, &numbers) {
            let bytes = quantize(format, &numbers, shape.0, shape.1).unwrap();
            prop_assert_eq!(bytes.len() as u64, format.bytes(shape.0, shape.1).0);
            if numbers.is_empty() {
                continue;
            }
            let found = dequantize(&bytes, format, shape);
            // `code * absmax` of int8 is beyond the largest float from 2.7e36 on, sums and products of the others only
            // where they are as good as there.
            let is_int8 = matches!(format, WeightFormat::Int8 | WeightFormat::Int8Scaled(..));
            let limit = if is_int8 { f32::MAX / 127.0 } else { f32::MAX / 2.0 };
            let huge = numbers.iter().any(|x| x.abs() > limit);
            // A smaller set of places in large weights: the bound looks at whole rows.
            let step = numbers.len().div_ceil(300);
            for i in (0..numbers.len()).step_by(step) {
                if huge && !found[i].is_finite() {
                    continue;
                }
                let apart = (f64::from(found[i]) - f64::from(numbers[i])).abs();
                let bound = bound(format, shape, &bytes, &numbers, i);
                prop_assert!(apart <= bound, "{} {:?} {}: {} became {}, {} apart where {} may be",
                    format, shape, i, numbers[i], found[i], apart, bound);
            }
        }
    }

    #[test]
    fn nested_scales_are_within_the_error_bound((shape, numbers) in weights()) {
        let double = quantize(WeightFormat::Nf4Double, &numbers, shape.0, shape.1).unwrap();
        let plain = quantize(WeightFormat::Nf4, &numbers, shape.0, shape.1).unwrap();
        let codes = |bytes, format| part(bytes, format, shape, WeightPart::Codes).to_vec();
        prop_assert_eq!(codes(&double, WeightFormat::Nf4Double), codes(&plain, WeightFormat::Nf4));
        let nested = f32s(part(&double, WeightFormat::Nf4Double, shape, WeightPart::NestedAbsmax));
        let offset = f32s(part(&double, WeightFormat::Nf4Double, shape, WeightPart::Offset))[0];
        let found = block_scales(&double, WeightFormat::Nf4Double, shape);
        let absmax = block_scales(&plain, WeightFormat::Nf4, shape);
        let mean = absmax.iter().map(|x| f64::from(*x)).sum::<f64>() / absmax.len().max(1) as f64;
        prop_assert!((f64::from(offset) - mean).abs() <= mean * 1e-7 + 1e-45);
        for (i, (found, absmax)) in found.iter().zip(&absmax).enumerate() {
            let nested = nested[i / NF4_NESTED_BLOCK];
            if *absmax > f32::MAX / 2.0 && !found.is_finite() {
                continue;
            }
            let apart = (f64::from(*found) - f64::from(*absmax)).abs();
            prop_assert!(apart <= nested_bound(nested, offset), "{i}: {absmax} became {found}");
        }
    }

    #[test]
    fn codes_equal_those_of_the_specified_arithmetic((shape, numbers) in weights()) {
        for format in formats(shape.1, &numbers) {
            let bytes = quantize(format, &numbers, shape.0, shape.1).unwrap();
            let codes = part(&bytes, format, shape, WeightPart::Codes);
            let by_rows = matches!(format, WeightFormat::Int8 | WeightFormat::Int8Scaled(..) | FP8);
            let unit = if by_rows { shape.1.max(1) } else { NF4_BLOCK };
            let mut numbers = numbers.clone();
            format.rotation().turn(&mut numbers);
            for (u, run) in numbers.chunks(unit).enumerate() {
                let absmax = run.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                for (k, x) in run.iter().enumerate() {
                    let i = u * unit + k;
                    let (found, expected) = match format {
                        WeightFormat::Int8 => {
                            let y = if absmax == 0.0 { 0.0 } else { x / absmax * 127.0 };
                            (i32::from(codes[i] as i8), y.round_ties_even() as i32)
                        }
                        WeightFormat::Int8Scaled(..) => {
                            let scale = absmax / 127.0;
                            let y = if scale == 0.0 { 0.0 } else { (x / scale).clamp(-127.0, 127.0) };
                            (i32::from(codes[i] as i8), y.round_ties_even() as i32)
                        }
                        FP8 => {
                            let scale = absmax / 448.0;
                            let y = if scale == 0.0 { 0.0 } else { (x / scale).clamp(-448.0, 448.0) };
                            (i32::from(codes[i]), i32::from(nearest_e4m3(y)))
                        }
                        _ => {
                            let y = if absmax == 0.0 { 0.0 } else { x / absmax };
                            let above = |t: &[f32]| y > (t[0] + t[1]) * 0.5;
                            let expected = nf4_table().windows(2).filter(|t| above(t)).count();
                            (nibble(codes, i) as i32, expected as i32)
                        }
                    };
                    prop_assert_eq!(found, expected, "{} {:?} {}: {} of {}", format, shape, i, x, absmax);
                }
            }
            if unit == NF4_BLOCK && numbers.len() % 2 == 1 {
                prop_assert_eq!(nibble(codes, numbers.len()), 0);
            }
        }
    }

    #[test]
    fn a_number_that_is_not_finite_is_found_at_any_position(
        ((rows, columns), mut numbers) in weights().prop_filter("empty", |(_, n)| !n.is_empty()),
        place in any::<prop::sample::Index>(),
        what in prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(-f32::NAN),
            Just(f32::from_bits(0x7f80_0001))],
    ) {
        let place = place.index(numbers.len());
        numbers[place] = what;
        for format in WeightFormat::MADE_AT_LOAD.map(|format| format.for_columns(columns)) {
            prop_assert_eq!(quantize(format, &numbers, rows, columns), Err(QuantizeError::NotFinite));
        }
    }
}

/// By looking at all codes of this sign: the nearest, and of two the even one.
fn nearest_e4m3(y: f32) -> u8 {
    let sign = u8::from(y.is_sign_negative()) << 7;
    let apart = |code: u8| (f64::from(e4m3_to_f32(code | sign)) - f64::from(y)).abs();
    let better = |a: u8, b: u8| {
        let nearer = apart(b) < apart(a) || apart(b) == apart(a) && b.is_multiple_of(2);
        if nearer { b } else { a }
    };
    (0..0x7f).reduce(better).unwrap() | sign
}

#[test]
fn e4m3_encodes_its_own_values_exactly_and_rounds_ties_to_even() {
    for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
        let value = e4m3_to_f32(code);
        let next = if code & 0x7f < 0x7e {
            e4m3_to_f32(code + 1)
        } else {
            value
        };
        let middle = (value + next) / 2.0;
        let values = [value, middle, middle.next_up(), middle.next_down()].map(|x| x.clamp(-448.0, 448.0));
        // A 448 among them makes the scale 1.
        let bytes = quantize(FP8, &[&[448.0][..], &values].concat(), 1, 5).unwrap();
        let codes = part(&bytes, FP8, (1, 5), WeightPart::Codes);
        assert_eq!(f32s(&bytes[..4]), [1.0]);
        assert_eq!(codes[1], code, "{value}");
        let expected = values.map(nearest_e4m3);
        assert_eq!(codes[1..], expected, "{values:?}");
    }
}

#[test]
fn a_number_on_a_midpoint_gets_the_lower_code() {
    for (lower, pair) in nf4_table().windows(2).enumerate() {
        let midpoint = (pair[0] + pair[1]) * 0.5;
        // The 1 makes the absolute maximum 1.
        let numbers = [1.0, midpoint, midpoint.next_up(), pair[0], pair[1]];
        let bytes = quantize(WeightFormat::Nf4, &numbers, 1, 5).unwrap();
        let codes = part(&bytes, WeightFormat::Nf4, (1, 5), WeightPart::Codes);
        let codes: Vec<usize> = (0..5).map(|i| nibble(codes, i)).collect();
        assert_eq!(codes, [15, lower, lower + 1, lower, lower + 1]);
    }
}

#[test]
fn zeros_get_the_code_of_zero() {
    let codes = |format, numbers: &[f32]| {
        let shape = (1, numbers.len());
        let bytes = quantize(format, numbers, 1, numbers.len()).unwrap();
        part(&bytes, format, shape, WeightPart::Codes).to_vec()
    };
    assert_eq!(codes(WeightFormat::Int8, &[0.0, -0.0]), [0, 0]);
    assert_eq!(codes(FP8, &[0.0, -0.0]), [0, 0]);
    // A scale that is too small for a float: 200 of the smallest.
    assert_eq!(codes(FP8, &[f32::from_bits(200), -f32::from_bits(200)]), [0, 0]);
    assert_eq!(codes(WeightFormat::Nf4, &[0.0, -0.0, 0.0]), [0x77, 0x70]);
}

#[test]
fn weights_that_cannot_be_quantized_are_refused_with_the_reason() {
    let stored = WeightFormat::Fp8(Fp8Scales::Tensor);
    assert_eq!(
        quantize(stored, &[1.0], 1, 1),
        Err(QuantizeError::NotMadeAtLoad(stored))
    );
    for (rows, columns) in [(1, 2), (0, 5), (usize::MAX, 2)] {
        let outcome = quantize(WeightFormat::Nf4, &[1.0], rows, columns);
        let given = 1;
        assert_eq!(outcome, Err(QuantizeError::Count { given, rows, columns }));
    }
}

/// A checkpoint of one weight of brain floats, and a plan that quantizes it.
fn at_load(numbers: &[f32], shape: &[usize], format: WeightFormat) -> (tempfile::NamedTempFile, LoadPlan) {
    let bytes: Vec<u8> = numbers
        .iter()
        .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
        .collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &bytes).unwrap();
    let range = ByteRange {
        offset: 0,
        length: bytes.len() as u64,
    };
    let source = TensorSource {
        name: "block.weight".to_owned(),
        pieces: vec![SourcePiece::File {
            file: file.path().into(),
            range,
        }],
        stored: Stored::Bf16,
        shape: shape.to_vec(),
        target: Target::Quantized(format),
        block: None,
    };
    (file, LoadPlan::Files(vec![source]))
}

fn load(
    plan: &LoadPlan,
    go_on: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
) -> Result<Vec<u8>, LoadError> {
    let mut card = CpuCard::new(CpuSettings::default()).unwrap();
    let component = Component {
        id: ComponentId::new("c"),
        name: "c".to_owned(),
        bytes: plan.bytes(),
        reload_seconds: 1.0,
        parts: residency::Parts::default(),
    };
    card.load(&component, plan, residency::Part::WHOLE, go_on)?;
    let Weight::Quantized(weight) = card
        .tensors(&component.id)
        .unwrap()
        .weight("block.weight")
        .unwrap()
    else {
        panic!("not quantized");
    };
    Ok(weight.bytes.to_vec1().unwrap())
}

fn weight_of(count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| bf16::from_f32(((i * 7919) % 1013) as f32 - 506.0).to_f32())
        .collect()
}

#[test]
fn a_load_quantizes_and_reports_its_progress() {
    // The last: rows that are longer than one chunk of the quantization.
    for shape in [
        &[][..],
        &[5],
        &[0, 3],
        &[3, 0],
        &[4, 3, 5, 7],
        &[1000, 1023],
        &[2, 300_000],
    ] {
        let (rows, columns) = rows_and_columns(shape);
        let numbers = weight_of(rows * columns);
        for format in formats(columns, &numbers) {
            let (_file, plan) = at_load(&numbers, shape, format);
            let mut last = None;
            let bytes = load(&plan, &mut |progress| {
                assert!(last <= Some(progress.done) && progress.done <= progress.total);
                last = Some(progress.done);
                ControlFlow::Continue(())
            });
            assert!(
                bytes.unwrap() == quantize(format, &numbers, rows, columns).unwrap(),
                "{format} {shape:?}"
            );
            assert_eq!(last, Some(format.bytes(rows, columns)));
        }
    }
}

#[test]
fn a_load_of_a_tensor_that_is_not_finite_names_it_and_leaves_nothing() {
    let shape = [300, 1023];
    for place in [0, 131_071, 131_072, 300 * 1023 - 1] {
        let mut numbers = weight_of(300 * 1023);
        numbers[place] = f32::NAN;
        for format in formats(shape[1], &[]) {
            let (_file, plan) = at_load(&numbers, &shape, format);
            let outcome = load(&plan, &mut |_| ControlFlow::Continue(()));
            let Err(LoadError::NotFinite { tensor }) = outcome else {
                panic!("{format} {place}: {outcome:?}");
            };
            assert_eq!(tensor, "block.weight");
        }
    }
}

#[test]
fn a_load_that_quantizes_can_be_cancelled() {
    let (_file, plan) = at_load(&weight_of(80_000_000), &[8000, 10_000], WeightFormat::Int8);
    let mut reported = Vec::new();
    let outcome = load(&plan, &mut |progress| {
        reported.push(progress.done);
        if progress.done.0 == 0 {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    });
    assert!(matches!(outcome, Err(LoadError::Cancelled)), "{outcome:?}");
    assert!(reported.len() == 2 && reported[1] < plan.bytes(), "{reported:?}");
}
